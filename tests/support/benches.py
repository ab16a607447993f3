"""Benchmarks as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_quick(folder: Path, script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """The one record that a trial on one CPU device leaves in `folder`, and what it prints."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{script}.py"), "--quick", f"--json={folder}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.iterdir()
    (line,) = file.read_text(encoding="utf-8").splitlines()
    return json.loads(line), done.stdout
