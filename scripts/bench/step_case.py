"""jaxrl's whole GRPO step in a process of its own, from the pieces that `jaxrl train` puts together.

Backend, reward pool, Trainer and Loop are built as `jaxrl.runtime.build` builds them; only work outside a timed step is
left out (evaluation, checkpoints, the run directory). Responses have no stop token: all are of full length.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import Config, from_mapping
from jaxrl.models.config import ModelConfig

from .records import prepare_devices
from .worker import Ask, peak_bytes, resident_bytes

REWARD = '''"""A reward that costs nothing and differs between responses."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 7 / 6
'''
WORDS = ("one", "two", "three", "seven", "eleven", "plus", "minus", "times", "more", "less", "the", "of", "and", "is")
PROMPT_SLACK = 8  # a prompt made of words may miss its length by part of a word


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One GRPO step.

    Attributes:
      folder: a folder that `write_inputs` made.
      path: `model.path` of it.
      random_init: random weights from `seed`.
      prompts, samples, prompt_tokens, new: prompts per step, responses to each, tokens of a prompt and of a response.
      train_tokens: the most tokens of a microbatch; 0: as many as one step has.
    """

    folder: str
    path: str
    random_init: bool
    dtype: str
    devices: int
    prompts: int
    samples: int
    prompt_tokens: int
    new: int
    remat: str
    train_tokens: int
    lr: float
    seed: int


def write_tokenizer(config: ModelConfig, folder: Path) -> None:
    """A model folder without weights: config.json, and a tokenizer with one word per token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "pad_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")


def write_inputs(folder: Path, tokenizer_path: str, count: int, prompt_tokens: int, seed: int) -> None:
    """train.jsonl with `count` distinct prompts of about `prompt_tokens` tokens (never more), and reward.py."""
    from jaxrl.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_path(tokenizer_path)
    draw = random.Random(seed)
    synthetic = tokenizer.decode([1]) == "t1"
    words = [f"t{i}" for i in range(tokenizer.vocab_size)] if synthetic else WORDS
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for _ in range(count):
            text = draw.choice(words)
            while len(tokenizer.encode(longer := f"{text} {draw.choice(words)}")) <= prompt_tokens:
                text = longer
            file.write(json.dumps({"question": text, "answer": "0"}) + "\n")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def export(spec: tuple[str, str], ask: Ask) -> None:
    """What `jaxrl export` does, in float32: spec is (model.path or random:folder, target folder)."""
    from jaxrl.commands.export import export

    export(*spec, "float32")
    ask({})


def run(spec: StepSpec, ask: Ask) -> None:
    """Trains step by step: per request one step, its metrics as the loop reports them, and the peak memory."""
    prepare_devices(spec.devices)
    from jaxrl.data.prompts import PromptSource, load_train
    from jaxrl.loop import Hooks, Loop
    from jaxrl.record.journal import Journal
    from jaxrl.record.timeline import Timeline
    from jaxrl.rewards.domains import build_scorer
    from jaxrl.rewards.pool import build_pool
    from jaxrl.runtime.backend import RolloutBackend, text_by
    from jaxrl.runtime.build import build_engine, build_executor, load_weights, read_tokenizer_and_model
    from jaxrl.runtime.rules import batch_rule
    from jaxrl.sharding.layout import Layout
    from jaxrl.sharding.mesh import make_mesh
    from jaxrl.train.step import Trainer

    config = _config(spec)
    baseline = resident_bytes()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mesh = make_mesh(prepare_devices(spec.devices))
        tokenizer, model = read_tokenizer_and_model(config)
        params = load_weights(config, mesh)
        prompts = PromptSource(load_train(config), tokenizer, config)
        trainer = Trainer(config, model, params, mesh)
        del params
        pool = stack.enter_context(contextlib.closing(build_pool(config, build_scorer(config))))
        pool.warm()
        timeline = stack.enter_context(Timeline(scratch / "timeline.json"))
        journal = stack.enter_context(contextlib.closing(Journal(scratch / "journal.jsonl", -1)))
        executor = build_executor(config, model, Layout(mesh, 1))
        engine = build_engine(config, executor, tokenizer)
        text_of = text_by(tokenizer)
        backend = RolloutBackend(
            engine, executor, pool, text_of, lambda: trainer.params, journal=journal, timeline=timeline
        )
        backend.enter_rollout(0)
        began = time.perf_counter()
        programs = executor.warm_up(first=[trainer.programs])
        info = {"programs": programs, "warm_up_s": time.perf_counter() - began}
        steps = _Steps(ask, info, baseline)
        loop = Loop(
            config,
            prompts,
            (),
            backend,
            trainer,
            timeline,
            Hooks(_nothing, steps.on_step, _nothing, _nothing, steps.stop),
            rule=batch_rule(config),
            stop_token_ids=(),
            total_steps=1 << 30,
            num_devices=mesh.size,
        )
        loop.run()


class _Steps:
    """The loop's hooks: it asks `stop` between any two steps, and there the worker waits for its next request."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], info: dict[str, Any], baseline: int) -> None:
        self._ask, self._values, self._baseline = ask, info, baseline

    def stop(self) -> bool:
        return self._ask(self._values) is None

    def on_step(self, step: int, measured: dict[str, float], groups: Any) -> None:
        tokens = [len(sample) for group in groups for sample in group.samples]
        prompts = [len(group.prompt.token_ids) for group in groups for _ in group.samples]
        self._values = {
            "seconds": measured["timing_s/step"],
            **{name: value for name, value in measured.items() if name.startswith("timing_s/")},
            "recompiles": float(measured["rollout/recompiles"] + measured["actor/recompiles"]),
            "response_tokens": float(sum(tokens)),
            "prompt_tokens": float(sum(prompts)),
            "peak_bytes": float(peak_bytes()),
            "peak_above_baseline_bytes": float(peak_bytes() - self._baseline),
        }


def _nothing(*_: Any) -> None:
    """A hook that has nothing to do."""


def data_section(folder: str, prompts: int, prompt_tokens: int, new: int, seed: int) -> dict[str, Any]:
    """Options of `data` for a folder that `write_inputs` made, with batches of `prompts` prompts."""
    return {
        "train_files": [str(Path(folder) / "train.jsonl")],
        "apply_chat_template": False,
        "max_prompt_length": prompt_tokens + PROMPT_SLACK,
        "max_response_length": new,
        "train_batch_size": prompts,
        "seed": seed,
    }


def _config(spec: StepSpec) -> Config:
    longest = spec.prompt_tokens + PROMPT_SLACK + spec.new
    rows = spec.prompts * spec.samples
    return from_mapping(
        {
            "model": {"path": spec.path, "random_init": spec.random_init},
            "data": data_section(spec.folder, spec.prompts, spec.prompt_tokens, spec.new, spec.seed),
            "rollout": {
                "n": spec.samples,
                "dtype": spec.dtype,
                "max_num_seqs": -(-rows // spec.devices),
                "max_num_batched_tokens": max(512, spec.prompt_tokens + PROMPT_SLACK),
            },
            "actor": {
                "dtype": spec.dtype,
                "remat": spec.remat,
                "old_logprobs": "rollout",
                "ppo_max_token_len_per_gpu": max(longest, spec.train_tokens or -(-rows // spec.devices) * longest),
                "optim": {"lr": spec.lr},
            },
            "reward": {"kind": "custom", "path": str(Path(spec.folder) / "reward.py")},
            "trainer": {"seed": spec.seed, "num_devices": spec.devices, "save_freq": 0},
        }
    )
