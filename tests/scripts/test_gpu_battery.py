"""The GPU battery: its parts are commands of the benchmarks; and on a CPU all of it at its tiniest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_battery
import pytest
from bench import harness
from gpu import page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("is_trial", [False, True])
def test_parts_are_commands_that_the_benchmarks_take(is_trial: bool):
    for each in gpu_battery.parts(is_trial):
        name, *words = each.command[2:]
        harness.parser(name, harness.load(name)).parse_args(words)
    texts = [(each["part"], each["text"]) for each in page.figures()]
    assert len(texts) == len({*texts}) > 80


@pytest.mark.slow
def test_a_trial_passes_and_finds_every_figure(tmp_path: Path):
    words = [sys.executable, ROOT / "scripts" / "gpu_battery.py", "--quick", "--minutes", "20", "--out", tmp_path]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    found = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    statuses = {each["part"]: each["status"] for each in found if each["bench"] == "part"}
    assert statuses.pop("tests") == "passed"
    assert {*statuses.values()} == {"passed"}, statuses
    unknown = [each for each in page.figures(is_trial=True) if page.value(each, found) is None]
    of_gpus = ("mfu_datasheet", "speed")  # no data sheet; cuDNN, and a table of 16 parts
    assert {each["key"] for each in unknown} <= {*of_gpus}
