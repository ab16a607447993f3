"""A folder in which the pages' commands find what they name: runs, files and models of a reader, made small."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import yaml
from pages import ROOT, Command
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


class World:
    """Makes what commands name, once, and copies it into a folder for each command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.makers: dict[str, Callable[[Path], object]] = {
            "tiny": lambda path: None,
            "bin": self._shims,
            "runs/a": self._run,
            "runs/b": self._other_run,
            "runs/c": self._other_run,
            "out/model": lambda path: self._jaxrl("export", "runs/a", "out/model"),
            "out/tiny": lambda path: shutil.copytree(folder / "tiny", path),
            "run.yaml": self._config,
            "answers.jsonl": lambda path: _write_rows(path, [{**row, "response": "#### 4"} for row in PROBLEMS]),
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

    def _other_run(self, path: Path) -> None:
        self._make("runs/a")
        shutil.copytree(self.folder / "runs" / "a", path)
        config = (path / "config.yaml").read_text(encoding="utf-8")
        _write(path / "config.yaml", config.replace("lr: 2.0e-05", "lr: 3.0e-05"))

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


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
