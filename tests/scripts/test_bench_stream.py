"""The benchmark of gradients beside the rollout: what it reads from a timeline, what it draws, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benches import ROOT, run_quick

sys.path.insert(0, str(ROOT / "scripts"))

import bench_stream
from bench import stream_case


def test_seconds_beside_each_other_are_read_from_the_timeline():
    """Two parts of gradients; plans of two workers, which overlap and count once; other spans do not count."""
    spans = [
        ("plan", 0, 10),
        ("plan", 5, 20),
        ("plan", 30, 40),
        ("part 1", 8, 12),
        ("part 2", 18, 35),
        ("gen", 0, 99),
    ]
    events = [{"ph": "X", "name": name, "ts": 1e6 * a, "dur": 1e6 * (b - a)} for name, a, b in spans]
    events += [{"ph": "C", "name": "plan", "ts": 0, "args": {}}]
    lines = "[\n" + "".join(json.dumps(event) + ",\n" for event in events)
    assert stream_case.beside(lines) == pytest.approx(4 + 2 + 5)
    assert stream_case.beside("[\n") == 0
    assert stream_case.merged([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]


@pytest.mark.slow
def test_a_trial(tmp_path: Path):
    record, _ = run_quick(tmp_path, "bench_stream")
    assert (record["bench"], record["device"]["count"]) == ("stream", 2)
    plain, stream = record["results"]["cases"]
    assert (plain["case"], stream["case"]) == ("plain", "stream")
    for name in ("response_tokens", "longest"):
        assert plain[name] == stream[name], "the same responses"
    assert plain["hidden_s"] == plain["beside_s"] == plain["streamed_share"] == 0
    assert stream["sum_s"] > 0
    assert record["results"]["speed"] > 0


@pytest.mark.slow
def test_a_trial_in_turns(tmp_path: Path):
    record, _ = run_quick(tmp_path, "bench_stream", "--in-turns")
    assert (record["bench"], record["device"]["count"]) == ("stream-in-turns", 1)
    assert [case["case"] for case in record["results"]["cases"]] == ["plans", "gradients", "after", "turns"]
    assert all(case["seconds"] > 0 for case in record["results"]["cases"])
    assert record["results"]["gain"] < 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hidden", "100"], "--hidden (100) must be a multiple of 64, the width of a head"),
        (["--samples", "1"], "--samples (1) must be at least 2: GRPO compares a prompt's responses"),
        (["--plans", "0"], "--plans (0) must be at least 1"),
        (["--devices", "3"], "--devices (3) is settled: two, and one with --in-turns"),
        (["--dtypes", "bfloat16"], "--dtypes (bfloat16) must be float32"),
        (["--shape", "Qwen2.5-7B"], "--model and --shape are of no use here: --hidden and --layers make the model"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert bench_stream.main(arguments) == 2
    assert capsys.readouterr().err == f"bench_stream: {sentence}\n"
