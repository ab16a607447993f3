"""The GPU battery: what runs when, what is kept, its page; and on a CPU all of it at its tiniest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_battery
import pytest
from bench import harness
from gpu import page
from gpu.battery import Battery, Part

ROOT = Path(__file__).resolve().parents[2]
WRITE = (
    "import json, pathlib, sys; pathlib.Path(sys.argv[1], 'r.jsonl')"
    ".write_text(json.dumps({'bench': 'x', 'results': {'cases': [{'n': 1}]}}) + '\\n'); print('done'); "
)


def part(name: str, then: str = "", seconds: float = 1.0) -> Part:
    return Part(name, seconds, (sys.executable, "-c", WRITE + then, "{folder}"))


def battery(out: Path, *parts: Part) -> Battery:
    head: dict[str, Any] = {"bench": "part"}
    return Battery(parts, out, lambda command: head, dict(os.environ), say=lambda _: None)


def test_a_later_call_runs_what_is_left_and_then_what_failed(tmp_path: Path):
    parts = part("bad", "sys.exit(3)"), part("good"), part("slow", "import time; time.sleep(99)"), part("long")
    first = battery(tmp_path, *parts)
    first.run(first.waiting(), 60)
    assert first.statuses() == {"bad": "failed", "good": "passed", "slow": "over its limit", "long": "passed"}
    assert sum(each["bench"] == "x" for each in first.records()) == 4, "those of a part that fails, too"
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"bench": "part", "part": "goo')  # killed while it wrote
    later = battery(tmp_path, *parts, part("new"))
    assert [each.name for each in later.waiting()] == ["new", "bad", "slow"]
    assert [each.name for each in later.waiting(only=["bad"], again=["good"])] == ["good", "bad"]
    with pytest.raises(ValueError, match=r"part \(none\) must be one of bad, good"):
        later.waiting(["none"])


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
