"""The benchmarks' harness: what counts, what a record holds, what is refused; and each benchmark at its tiniest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_work
import jax
import pytest
from bench import costs, harness, machine, profiles, worker
from bench.harness import NAMES, Bench, Case, LeftOut, Turn

from jaxrl.models.shapes import named_shape

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- statistics

KEPT = {
    "nothing measured": ([], []),
    "93 % of the best is enough, and less is not": ([[10, 9.3], [10, 9.29]], [True, False]),
    "any gauge drops its turn, and the best may come last": ([[5, 10, 5], [10, 10, 9], [10, 10]], [False, False, True]),
    "accelerators need no gauge": ([[], []], [True, True]),
}


@pytest.mark.parametrize("name", KEPT)
def test_turns_count_whose_gauges_all_are_near_the_best(name: str):
    gauges, expected = KEPT[name]
    assert harness.keep([Turn({}, list(each)) for each in gauges]) == expected


def turns(*seconds: tuple[float, list[float]]) -> list[Turn]:
    return [Turn({"a": {"seconds": value}}, gauges) for value, gauges in seconds]


def test_averages_are_over_the_turns_that_count_or_over_all_where_none_does():
    some = turns((1.0, [10, 10]), (9.0, [10, 4]), (4.0, [10, 10]))
    assert harness.summarise("a", some) == ({"seconds": 2.5}, {"kept": 2, "dropped": 1, "disturbed": False})
    none = [*turns((5.0, [4]), (8.0, [4])), Turn({}, [10])]
    assert harness.summarise("a", none) == ({"seconds": 6.5}, {"kept": 0, "dropped": 2, "disturbed": True})
    mean, _ = harness.summarise("a", turns((1.0, []), (2.0, []), (6.0, [])), "mean")
    assert mean == {"seconds": 3.0, "seconds_std": pytest.approx(7**0.5)}


def test_cases_take_turns_and_share_gauges():
    order: list[str] = []
    group = [Case({"case": name}, lambda turn, name=name: order.append(f"{name}{turn}") or {}) for name in "ab"]
    readings = iter([10.0, 9.5, 5.0, 10.0, 9.0])
    found = list(harness.take_turns(group, 2, lambda: next(readings)))
    assert order == ["a0", "b0", "a1", "b1"]
    assert [turn.gauges for turn in found] == [[10, 9.5, 5], [5, 10, 9]]


def test_ratios_are_of_cases_that_differ_in_nothing_else():
    facts = [{"case": name, "rows": rows} for rows in (1, 2) for name in ("ours", "theirs")]
    cases = [each | {"seconds": i + 1.0, "disturbed": i == 3} for i, each in enumerate(facts)]
    assert harness.ratios(cases, facts) == [
        {"ratio": "ours / theirs", "rows": 1, "speed": 2.0, "disturbed": False},
        {"ratio": "ours / theirs", "rows": 2, "speed": 4 / 3, "disturbed": True},
    ]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("seconds", 1.5, "1.500 s"),
        ("timing_s/gen", 0.0021, "2.100 ms"),
        ("copy_fraction", 0.5, "50.0%"),
        ("bytes_per_s", 2e9, "2.0 GB/s"),
        ("peak_bytes", 2e9, "2.000 GB"),
        ("tokens_per_s", 12.0, "12"),
    ],
)
def test_figures_have_the_units_of_their_names(name: str, value: float, text: str):
    assert harness.shown(name, value) == text


def test_a_gauge_measures():
    began = time.perf_counter()
    assert harness.Gauge()() > 0
    assert time.perf_counter() - began >= 0.2 + 3 * 0.04


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
    ("attention", "--packed 16", r"--packed \(16\) must be rows and tokens, such as 16x1024"),
    ("decode", "--at-context 64", r"--at-context \(64\) must be at least 81: the middle of 8 plans"),
    ("decode", "--model no/such/folder", r"no/such/folder"),
    ("decode", "--rows 8 0", r"--rows \(0\) must be at least 1"),
    ("decode", "--shape SmolLM3", r"--shape \(SmolLM3\) must be one of tiny, SmolLM2-135M"),
    ("option", "--config x --skip 40 a.b 1", r"--skip \(40\) must be at least 0 and below --steps \(40\)"),
    ("step", "--samples 1", r"--samples \(1\) must be at least 2"),
    ("train", "--attention none", r"actor.attention must be one of .*, found 'none'"),
    ("train", "--response 192", r"--response \(192\) must be below --tokens \(192\)"),
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


def test_the_records_that_are_kept_are_read():
    for file in (ROOT / "docs" / "benchmarks").glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert {"schema", "bench", "date", "device", "results"} <= {*json.loads(line)}, file.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ceilings", "decode"])  # the battery's trial runs the others
def test_a_trial_leaves_a_record(name: str, tmp_path: Path):
    words = [sys.executable, ROOT / "scripts" / "bench.py", name, "--quick", f"--json={tmp_path}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    assert all(case["seconds"] > 0 for case in json.loads(file.read_text())["results"]["cases"])


def test_option_means_are_over_seeds(tmp_path: Path):
    words = ["--config", str(ROOT / "configs" / "partial_rollout.yaml"), "--steps", "3", "--skip", "1", "--seeds", "2"]
    option = "rollout.partial_rollout.max_staleness"
    assert harness.main(["option", *words, f"--json={tmp_path}", option, "1", "-1"]) == 0
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())["results"]["cases"]
    assert [(each["case"], each["kept"]) for each in found] == [("1", 2), ("-1", 2)]
    assert all(each["rollout_s"] <= each["step_s"] and each["step_s_std"] > 0 for each in found)


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


def test_ceilings_are_the_best_of_both_and_shares_are_of_all_devices():
    sheet = machine.DATASHEETS["NVIDIA H100 80GB HBM3"]
    rates = {"float32_full": 1e12, "float32": 2e12, "bfloat16": 4e12}
    two = machine.Ceilings(6e12, 6.7e12, rates, sheet, devices=2)
    best = two.best(machine.Ceilings(7e12, 1.0, {**rates, "float32": 3e12}, sheet, devices=2))
    assert (best.copy, best.read, best.flops["float32"]) == (7e12, 6.7e12, 3e12)
    assert best.products("float32") == 1e12, "jaxrl multiplies float32 in full precision"
    shares = best.of_bytes(3.35e12)
    assert shares["datasheet_fraction"] == pytest.approx(0.5)
    assert shares["copy_fraction"] == shares["bandwidth_fraction"] == pytest.approx(3.35 / 7)
    assert best.record()["datasheet"]["bandwidth_bytes_per_s"] == 2 * 3.35e12


GPU_TRACE = """
planes {
  id: 2 name: "/device:GPU:0"
  lines {
    name: "Stream #14(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 2000000 duration_ps: 3000000 }
    events { metadata_id: 3 offset_ps: 5000000 duration_ps: 1000000 }
  }
  lines { name: "XLA Modules" events { metadata_id: 5 offset_ps: 0 duration_ps: 6000000 } }
  event_metadata { key: 1 value { id: 1 name: "_attend_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "gemm_fusion_dot_7" } }
  event_metadata { key: 3 value { id: 3 name: "gemm_fusion_dot_9_1" } }
  event_metadata { key: 5 value { id: 5 name: "jit_decode" } }
}
"""


def test_a_gpu_trace_counts_each_kernel_once():
    """The lines of modules repeat the time that the streams have."""
    found = profiles.summary(profiles.events(jax.profiler.ProfileData.from_text_proto(GPU_TRACE)))
    assert (found["kernels_s"], found["launches"], found["of_a_loop"]) == (pytest.approx(6e-6), 3, False)
    assert {name: each["launches"] for name, each in found["groups"].items()} == {"products": 2, "attention": 1}
    assert found["top"][0] == {"name": "gemm_fusion_dot", "seconds": pytest.approx(4e-6), "launches": 2}
    assert "[products]" in profiles.table(found, per=2)


@pytest.mark.parametrize(
    ("work", "request_", "error", "text"),
    [
        (bench_work.echo, {"fail": True}, RuntimeError, "broken in the worker"),
        (bench_work.echo, {"die": True}, RuntimeError, "died with status 3"),
        (bench_work.refuse, {}, ValueError, "must be otherwise"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_told(
    work: Callable[..., Any], request_: dict[str, Any], error: type[Exception], text: str
):
    with pytest.raises(error, match=text), worker.Worker("echo", work, "spec") as one:
        one(**request_)
