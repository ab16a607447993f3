"""Completion: what a shell is offered at a Tab, in the shells that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import argcomplete
import pytest

from jaxrl.cli import _parser
from jaxrl.commands.completion import answer_shell

ROOT = Path(__file__).resolve().parents[2]
BASH = """
eval "$(jaxrl completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete jaxrl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `jaxrl` that shells find."""
    command = tmp_path / "bin" / "jaxrl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxrl "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOME", str(tmp_path))
    return command


def test_a_shell_is_answered(on_path: Path):
    done = subprocess.run(["bash", "-c", BASH, "bash", "jaxrl comp"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "completion"), done.stderr


def test_what_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # where no folder configs is
    (tmp_path / "own.yaml").touch()
    monkeypatch.setattr(argcomplete, "autocomplete", lambda parser, **_: None)  # it writes to the shell's descriptors
    parser, commands = _parser()
    answer_shell(parser, commands)

    def offered(command: str, argument: str, prefix: str) -> set[str]:
        (action,) = (each for each in commands[command]._actions if argument in (each.dest, *each.option_strings))
        found = action.completer(prefix=prefix)  # pyright: ignore[reportAttributeAccessIssue]
        return {text for text in found if text.startswith(prefix)}

    assert {"rollout.layout.switch=", "rollout.layout.state="} <= offered("train", "overrides", "rollout.lay")
    assert offered("train", "overrides", "rollout.dtype=f") == {"rollout.dtype=float32", "rollout.dtype=float64"}
    assert offered("train", "overrides", "reward.path=ow") == {"reward.path=own.yaml"}
    assert offered("train", "overrides", "no.such=") == set()
    assert offered("train", "--config", "configs/algorithms/dap") == {"configs/algorithms/dapo.yaml"}
    assert offered("train", "--config", "ow") == offered("generate", "--model", "ow") == {"own.yaml"}
    assert {"rollout", "rollout.n"} <= offered("options", "section", "rol")
    assert offered("completion", "shell", "") == {"bash", "zsh", "fish"}
