"""A folder in which the pages' commands find what they name: runs, files and models of a reader, made small."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import yaml
from pages import ROOT, Command, blocks
from tiny import write_tiny_model

from jaxrl.cli import main

SMALL = {
    # 135 million parameters from a package, or a model from elsewhere, take a minute a step here
    "model.path": "random:tiny",
    # as few problems, samples and tokens as the rules still have something to do with
    "data.train_batch_size": "2",
    "data.val_size": "2",
    "data.max_prompt_length": "192",  # a token is a byte
    "data.max_response_length": "16",
    "rollout.n": "2",
    "rollout.max_num_seqs": "8",
    "rollout.max_num_batched_tokens": "256",
    "rollout.decode_steps": "4",
    "rollout.warmup": "false",
    "rollout.stop": "[a, e, i, o, u]",  # a random model ends no response by itself
    "actor.ppo_max_token_len_per_gpu": "512",
    "actor.logprob_chunk_tokens": "256",
    "reward.num_workers": "1",
    "trainer.total_training_steps": "1",
    "trainer.num_devices": "1",
    "trainer.compilation_cache_dir": "",  # the tests have one of their own
}
"""Options that are added to a training configuration of the pages where the command does not give them itself."""

PROBLEMS = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}. #### {2 * i}"} for i in range(12)]
CONVERSATIONS = [{"prompt": f"{i} + {i}?", "completion": str(2 * i)} for i in range(4)]
PAIRS = [{"prompt": f"{i} + {i}?", "chosen": str(2 * i), "rejected": str(i)} for i in range(4)]
HUB_MODEL, HUB_DATA = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"


class World:
    """Makes what commands name, once, and copies it into a folder for each command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.makers: dict[str, Callable[[Path], object]] = {
            "tiny": lambda path: None,
            "bin": self._shims,
            "runs/a": self._run,
            "runs/b": self._other_run,
            "runs/lora": self._run_of_adapters,
            "runs/c": self._other_run,
            "runs/quarter-simulated": self._simulated_run,
            "out/model": lambda path: self._jaxrl("export", "runs/a", "out/model"),
            "out/tiny": lambda path: shutil.copytree(folder / "tiny", path),
            "out/reward.py": _length_reward,
            "my_reward.py": _reward,
            "run.yaml": self._config,
            "profile.json": self._profile,
            ".cache/jaxrl/profiles/smollm2-135m-cpu8.json": self._profile_of_eight,
            "answers.jsonl": lambda path: _write_rows(path, [{**row, "response": "#### 4"} for row in PROBLEMS]),
            "path/to/HumanEval.jsonl.gz": _programs,
            "hub": self._hub,
            "runs/sft": self._run_of_sft,
            "conversations.jsonl": lambda path: _write_rows(path, CONVERSATIONS),
            "pairs.jsonl": lambda path: _write_rows(path, PAIRS),
            **dict.fromkeys(("train.jsonl", "test.jsonl", "chain_sum.jsonl"), _problems),
            **dict.fromkeys(("path/to/gsm8k_train.jsonl", "path/to/gsm8k_test.jsonl"), _problems),
        }
        write_tiny_model(folder / "tiny", max_position_embeddings=4096)  # as long as any page asks for
        _link_repository(folder)

    def reading_place(self, folder: Path) -> None:
        """What a command's arguments and configuration need in order to be read."""
        _link_repository(folder)
        for name in ("bin", "run.yaml"):
            self._copy(name, folder)

    def place_for(self, command: Command, folder: Path, *more: str) -> None:
        """Fills an empty folder with what a command names and does not make itself, and with `more`."""
        _link_repository(folder)
        wanted = ["tiny", "bin", *more]
        wanted += [name for name in self.makers if name not in wanted and _reads(command.text, name)]
        for name in wanted:
            self._copy(name, folder)

    def _copy(self, name: str, folder: Path) -> None:
        self._make(name)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (self.folder / name).is_dir():
            shutil.copytree(self.folder / name, folder / name)
        else:
            shutil.copy(self.folder / name, folder / name)

    def _make(self, name: str) -> None:
        path = self.folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.makers[name](path)

    def _jaxrl(self, *arguments: str) -> None:
        for name in self.makers:
            if _reads(" ".join(arguments), name):
                self._make(name)
        with chdir(self.folder):
            assert main(arguments) == 0, arguments

    def _run(self, path: Path) -> None:
        """A run of so many steps that a search for factors has enough responses."""
        options = SMALL | {"trainer.total_training_steps": "6", "trainer.run_dir": "runs/a"}
        self._jaxrl("train", "--config", "configs/chain_sum.yaml", *(f"{k}={v}" for k, v in options.items()))

    def _run_of_adapters(self, path: Path) -> None:
        more = {"trainer.total_training_steps": "1", "trainer.run_dir": "runs/lora", "model.lora_rank": "2"}
        self._jaxrl("train", "--config", "configs/chain_sum.yaml", *(f"{k}={v}" for k, v in (SMALL | more).items()))

    def _run_of_sft(self, path: Path) -> None:
        more = {"model.lora_rank": "0", "trainer.run_dir": "runs/sft", "data.train_files": "[conversations.jsonl]"}
        more |= {"actor.optim.lr_warmup_steps": "0"}
        self._jaxrl("sft", "--config", "configs/sft.yaml", *(f"{k}={v}" for k, v in (SMALL | more).items()))

    def _other_run(self, path: Path) -> None:
        self._make("runs/a")
        shutil.copytree(self.folder / "runs" / "a", path)
        config = (path / "config.yaml").read_text(encoding="utf-8")
        _write(path / "config.yaml", config.replace("lr: 2.0e-05", "lr: 3.0e-05"))

    def _simulated_run(self, path: Path) -> None:
        options = (
            "trainer.run_dir=runs/quarter",
            "trainer.total_training_steps=20",
            "rollout.tail_batching.enable=false",
        )
        self._jaxrl("simulate", "--config", "configs/tail_batching.yaml", "simulate.num_devices=8", *options)

    def _profile(self, path: Path) -> None:
        sizes = ("--max-batch", "4", "--token-budget", "1024", "--repeats", "1", "trainer.num_devices=2")
        self._jaxrl("profile", "--config", "run.yaml", *sizes, "--out", "profile.json")

    def _profile_of_eight(self, path: Path) -> None:
        options = SMALL | {"trainer.num_devices": "8"}
        sizes = ("--max-batch", "4", "--token-budget", "1024", "--repeats", "1", "--out", str(path))
        config = ("--config", "configs/adaptive_layout.yaml", *(f"{k}={v}" for k, v in options.items()))
        self._jaxrl("profile", *config, *sizes)

    def _config(self, path: Path) -> None:
        """A reader's own configuration: the quickstart's, small, on all devices."""
        values = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
        for name, value in (SMALL | {"trainer.num_devices": "0", "trainer.run_dir": "runs/own"}).items():
            *sections, option = name.split(".")
            node = values
            for section in sections:
                node = node.setdefault(section, {})
            node[option] = yaml.safe_load(value) if value else ""
        _write(path, yaml.safe_dump(values))

    def _hub(self, path: Path) -> None:
        """The Hub's cache as a download leaves it."""
        model = path / "hub" / f"models--{HUB_MODEL.replace('/', '--')}"
        data = path / "hub" / f"datasets--{HUB_DATA.replace('/', '--')}"
        for repository in (model, data):
            _write(repository / "refs" / "main", "0" * 40)
        with chdir(self.folder):
            assert main(["export", "random:tiny", str(model / "snapshots" / ("0" * 40))]) == 0
        for name in ("train", "test"):
            _write_parquet(data / "snapshots" / ("0" * 40) / "main" / f"{name}-00000-of-00001.parquet")

    def _shims(self, path: Path) -> None:
        """`jaxrl` and `python` as a shell finds them."""
        path.mkdir()
        for name, command in (("jaxrl", f"{sys.executable} -m jaxrl"), ("python", sys.executable)):
            _write(path / name, f'#!/bin/sh\nexec {command} "$@"\n')
            (path / name).chmod(0o755)


def environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """Of a command in a process of its own. What it sets of XLA's flags is added to the tests' own."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "XLA_FLAGS" in variables:
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags) + " " + variables["XLA_FLAGS"]
    own = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *(str(ROOT / name) for name in [variables.get("PYTHONPATH")] if name)]
        ),
        "HOME": str(folder),
        "HF_HOME": str(folder / "hub"),
        "XLA_FLAGS": flags.strip(),
    }
    return os.environ | variables | own


def _reads(text: str, name: str) -> bool:
    """Whether a command names it otherwise than as what it writes."""
    for match in re.finditer(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", text):
        before = text[: match.start()]
        if not re.search(r"(--out |--json |trainer\.run_dir=|> |export \S+ |write_tiny_model\(')$", before):
            return True
    return False


def _link_repository(folder: Path) -> None:
    for name in ("configs", "examples", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)


def _reward(path: Path) -> None:
    """The function with which docs/your-reward.md begins."""
    (block,) = [block for block in blocks("python") if block.page == "docs/your-reward.md"]
    _write(path, block.text)


def _length_reward(path: Path) -> None:
    """Whose values differ for a random model's responses too."""
    _write(path, "def compute_score(solution_str, **given):\n    return len(solution_str) / 99\n")


def _problems(path: Path) -> None:
    _write_rows(path, _held_out(path.name))


def _held_out(name: str) -> list[dict[str, str]]:
    """Of a test file other problems than of the others."""
    return PROBLEMS[8:] if "test" in name else PROBLEMS[:8]


def _programs(path: Path) -> None:
    row = {
        "task_id": "made-up/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
    }
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row | {"task_id": f"made-up/{i}"}) + "\n" for i in range(6))


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _write_parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(_held_out(path.name)), path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
