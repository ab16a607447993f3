"""Completion: what a shell is offered at a Tab, in the shells that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_what_a_shell_is_offered(on_path: Path):
    def offered(line: str) -> set[str]:
        done = subprocess.run(["bash", "-c", BASH, "bash", line], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return {text.strip() for text in done.stdout.splitlines()}

    assert offered("jaxrl comp") == {"completion"}
    assert {"rollout.layout.switch=", "rollout.layout.state="} <= offered("jaxrl train rollout.lay")
    assert offered("jaxrl train rollout.dtype=") == {"auto", "float32", "bfloat16", "float64"}
    assert offered("jaxrl train --config configs/algorithms/dap") == {"configs/algorithms/dapo.yaml"}
