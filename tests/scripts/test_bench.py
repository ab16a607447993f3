"""The benchmarks' harness: what counts, what a record holds, what is refused; and each benchmark at its tiniest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import costs, harness
from bench.harness import NAMES, Bench, Case, LeftOut

from jaxrl.models.shapes import named_shape

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- a benchmark from end to end


def cases(options: Any) -> Any:
    def refuse(turn: int) -> dict[str, float]:
        raise LeftOut("it has no such kernel")

    yield [
        Case({"case": "fast"}, lambda turn: {"seconds": 1.0}, lambda average, *_: {"twice": 2 * average["seconds"]}),
        Case({"case": "slow"}, lambda turn: {"seconds": 3.0}, extra={"why": "old"}),
        Case({"case": "other"}, refuse),
    ]


def test_a_record_has_cases_ratios_and_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = Bench("text", cases, {"rows": ([4], "of x")}, place="host", has_model=False, promises=lambda _: ["broken"])
    monkeypatch.setattr(harness, "load", lambda name: bench)
    monkeypatch.setattr(harness, "num_cores", lambda: 1)
    assert harness.main(["sync", "--rows", "2", f"--json={tmp_path}/"]) == 1, "a promise is broken"
    assert harness.main(["sync", "--rows", "0"]) == 2
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    record = json.loads(text)
    assert re.fullmatch(r"sync-1x-[a-z0-9.-]+\.jsonl", file.name)
    assert record["command"] == f"bench.py sync --rows 2 --json={tmp_path.name}"
    assert str(ROOT) not in text
    assert os.uname().nodename not in text.replace(record["commit"], "")
    assert {"date", "commit", "dirty", "device", "versions", "schema"} <= {*record}
    results = record["results"]
    assert results["rows"] == [2]
    shared = {"kept": 5, "dropped": 0, "disturbed": False}
    assert results["cases"] == [
        {"case": "fast", "seconds": 1.0, "twice": 2.0} | shared,
        {"case": "slow", "seconds": 3.0, "why": "old"} | shared,
    ]
    assert results["ratios"] == [{"ratio": "fast / slow", "speed": 3.0, "disturbed": False}]
    assert results["left_out"] == [{"case": "other", "reason": "it has no such kernel"}]


REFUSED = [
    ("attention", "--contexts 0", r"--contexts \(0\) must be at least 1"),
    ("decode", "--at-context 64", r"--at-context \(64\) must be at least 81: the middle of 8 plans"),
    ("option", "--config x --skip 40 a.b 1", r"--skip \(40\) must be at least 0 and below --steps \(40\)"),
]


@pytest.mark.parametrize(("name", "words", "sentence"), REFUSED)
def test_nonsense_is_refused_in_one_sentence(name: str, words: str, sentence: str, capsys: pytest.CaptureFixture[str]):
    assert harness.main([name, *words.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"^bench.py {name}: .*{sentence}", error), error
    assert error.count("\n") == 1, error


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


# ---------------------------------------------------------------- parts


def test_costs_are_those_worked_out_by_hand():
    config = named_shape("tiny")  # E 32, F 48, L 2, H 4, K 2, D 8, V 256, tied
    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
    assert costs.layer_matrices(config) == matrices
    assert costs.weight_bytes(config, 2) == 2 * (matrices + 256 * 32)
    assert costs.kv_bytes_per_token(config, 4) == 2 * 2 * 2 * 8 * 4
    assert costs.decode_flops(config, 3, 7) == 3 * (2 * (matrices + 256 * 32) + 4 * 2 * 4 * 8 * 7)
    layers = 10 * (2 * matrices + 4 * 2 * 4 * 8 * 5)
    assert costs.train_flops(config, 3, 10, 6) == 3 * 3 * (layers + 6 * 2 * 256 * 32)
