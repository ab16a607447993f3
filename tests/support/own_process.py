"""Calls of a test file's functions in a process of their own: a layout change that XLA cannot compile aborts the
process on some versions, and must not take the other tests along.

The file ends with `if __name__ == "__main__": call(globals())`. A call that has `float64` in it has 64 bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[2]


def alone(file: str, text: str) -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    environment = os.environ | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "0"}
    words = [sys.executable, file, text]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{text}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert "rematerialization" not in done.stderr, done.stderr
    print(done.stdout)


def call(names: dict[str, Any]) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with jax.enable_x64("float64" in sys.argv[1]):
        exec(sys.argv[1], names)
