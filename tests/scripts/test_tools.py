"""The suite's tools, and other scripts: each has help, and faults still are faults of this tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import sabotage

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("bench_sandbox", "compile_for_gpu", "gpu_battery", "mutants", "sabotage")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_help(name: str):
    words = [sys.executable, ROOT / "scripts" / f"{name}.py", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert f"usage: {name}.py" in done.stdout


def test_each_fault_can_be_put_in_and_leaves_python():
    faults = sabotage.faults()
    for fault in faults:
        ast.parse(sabotage.broken(fault))
        assert all((ROOT / tests).exists() for tests in fault["tests"].split()), fault
    assert len({Path(fault["file"]).parent for fault in faults}) >= 20, "twenty rooms"
    with pytest.raises(ValueError, match=r"must have 'import' once, found"):
        sabotage.broken(faults[0] | {"old": "import"})
