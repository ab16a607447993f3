"""Whole runs of a small random model in one process or in several on this machine, for their seconds.

`Runs` starts `jaxrl train` and `jaxrl hosts` as a user does, and reads what they have recorded. All runs share model,
problems and a compilation cache; each has a run directory of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("step", "gen", "reward", "old_log_prob", "update_actor", "sync")
SPECIAL = ("<|endoftext|>", "<|end|>")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 7 / 6
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a run.

    Attributes:
      devices: virtual ones of a CPU, of all processes together. workers: the same.
      steps: of which the first `skip`, in which programs are compiled, do not count.
    """

    devices: int
    workers: int
    steps: int
    skip: int
    prompts: int
    samples: int
    longest: int
    hidden: int


class Runs:
    """Runs of these sizes, in `folder`, in which earlier ones may be."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder, self.sizes = folder, sizes
        folder.mkdir(parents=True, exist_ok=True)
        _write_model(folder / "model", sizes.hidden)
        problems = ({"question": f"{i} and {i * 7 % 11}", "answer": str(i)} for i in range(4 * sizes.prompts))
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems), encoding="utf-8")
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")

    def train(self, processes: int, source: Path = ROOT, *, ordered: bool = True) -> dict[str, float]:
        """A run; medians over its steps of seconds per phase (`timing_s/...`) and of what hosts cost (`hosts/...`), and
        `seconds`, all of it.

        Args:
          processes: 1: without a launcher.
          source: a checkout of this project, whose command it is.
          ordered: as many workers as the sizes say; else the single one of a run that asks for nothing.
        """
        run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        workers = (f"rollout.num_workers={self.sizes.workers}",) if ordered and self.sizes.workers > 1 else ()
        began = time.perf_counter()
        self._command(processes, source, "train", f"trainer.run_dir={run_dir}", *workers)
        seconds = time.perf_counter() - began
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[self.sizes.skip :]
        steps = [json.loads(line) for line in lines]
        names = [name for name in steps[0] if name.startswith(("timing_s/", "hosts/"))]
        found = {name: statistics.median(step[name] for step in steps) for name in names}
        found["tokens"] = statistics.median(step["perf/total_num_tokens"] for step in steps)
        return found | {"seconds": seconds}

    def hosts(self, processes: int) -> dict[str, Any]:
        """What `jaxrl hosts` measures."""
        file = self.folder / f"hosts {processes}.json"
        self._command(processes, ROOT, "hosts", f"trainer.run_dir={self.folder / 'none'}", f"--json={file}")
        return json.loads(file.read_text(encoding="utf-8"))

    @property
    def weight_bytes(self) -> int:
        """Of the rollout's weights, float32."""
        import jax

        from jaxrl.models import decoder
        from jaxrl.models.loading import config_of

        model = config_of(f"random:{self.folder / 'model'}")
        shapes = jax.eval_shape(lambda key: decoder.init(model, key, "float32"), jax.random.key(0))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    def _command(self, processes: int, source: Path, name: str, *more: str) -> None:
        sizes, several = self.sizes, ()
        if processes > 1:
            per_host = sizes.devices // processes
            several = ("hosts.launcher=local", f"hosts.num={processes}", f"hosts.devices_per_host={per_host}")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={sizes.devices}",
            "PYTHONPATH": str(source),
        }
        done = subprocess.run(
            [sys.executable, "-m", "jaxrl", name, *self._options(), *several, *more],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{processes} processes, {name}: exit status {done.returncode}: {done.stderr[-2000:]}")

    def _options(self) -> tuple[str, ...]:
        sizes = self.sizes
        rows = sizes.prompts * sizes.samples // sizes.devices
        return (
            f"model.path=random:{self.folder / 'model'}",
            f"data.train_files=[{self.folder / 'train.jsonl'}]",
            f"data.train_batch_size={sizes.prompts}",
            "data.max_prompt_length=64",
            "data.apply_chat_template=false",
            f"data.max_response_length={sizes.longest}",
            f"rollout.n={sizes.samples}",
            f"rollout.max_num_seqs={max(rows, 1)}",
            "rollout.dtype=float32",
            "rollout.max_num_batched_tokens=256",
            "rollout.num_blocks=400",
            "rollout.warmup=false",
            "actor.dtype=float32",
            f"actor.ppo_mini_batch_size={sizes.prompts}",
            "actor.ppo_max_token_len_per_gpu=2048",
            "reward.kind=custom",
            f"reward.path={self.folder / 'reward.py'}",
            "reward.num_workers=1",
            f"trainer.total_training_steps={sizes.steps}",
            f"trainer.compilation_cache_dir={self.folder / 'cache'}",
        )


def _write_model(folder: Path, hidden: int) -> None:
    """A Llama of four layers without weights, and a tokenizer of bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1], "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
