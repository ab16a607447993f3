"""Runs what compiles for a GPU in a process that finds the CUDA plugin, or skips the test."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("JAXRL_CUDA_PLUGIN", Path(sys.prefix) / "compile-gpu"))
"""Where the plugin lies: `scripts/test.sh` installs it there, apart from the packages that every process sees."""


@functools.cache
def compile_for_gpu(*arguments: str) -> dict[str, Any]:
    """What `scripts/compile_for_gpu.py` prints with `--json`; the same request is compiled once per test process."""
    return run_for_gpu(ROOT / "scripts" / "compile_for_gpu.py", *arguments, "--json")


def run_for_gpu(script: Path, *arguments: str) -> Any:
    """The JSON that a Python file prints; `scripts` is on its path."""
    if not FOLDER.is_dir() and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip(f"the CUDA plugin of JAX is neither installed nor in {FOLDER}: pip install 'jaxrl[compile-gpu]'")
    folders = [FOLDER, ROOT, ROOT / "scripts"]
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
