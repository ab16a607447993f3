"""The benchmarks: each has help and its line on the page, and runs at its tiniest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench import harness
from bench.harness import NAMES

ROOT = Path(__file__).resolve().parents[2]


def test_every_benchmark_has_help_and_a_line_on_its_page(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python scripts/bench\.py (\w+)(.*?)(?:#.*)?$", page, re.MULTILINE)
    assert {name for name, _ in commands} == {*NAMES}
    for name, words in commands:
        with pytest.raises(SystemExit):
            harness.main([name, "--help"])
        text = capsys.readouterr().out
        assert f"python scripts/bench.py {name}" in text
        assert {*re.findall(r"--[\w-]+", words)} <= {*re.findall(r"--[\w-]+", text)}, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ceilings", "decode"])  # the battery's trial runs the others
def test_a_trial_leaves_a_record(name: str, tmp_path: Path):
    words = [sys.executable, ROOT / "scripts" / "bench.py", name, "--quick", f"--json={tmp_path}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    assert all(case["seconds"] > 0 for case in json.loads(file.read_text())["results"]["cases"])
