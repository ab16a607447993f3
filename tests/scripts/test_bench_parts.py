"""What the benchmarks are made of: the gauge's filter, records, ceilings, costs, profiles, workers."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import bench_ceilings
import bench_work
import jax
import jax.numpy as jnp
import pytest
from bench import ceilings, costs, profiles, records, step_case, trl_case, worker
from bench.ceilings import measure_ceilings
from bench.measure import Bench, Gauge, Run, keep, summarise, verdict

from jaxrl.models.shapes import named_shape

ROOT = Path(__file__).resolve().parents[2]

KEEP_CASES = {
    "nothing measured": ([], []),
    "all at the best": ([(10, 10), (10, 10)], [True, True]),
    "93 % of the best is enough": ([(10, 10), (9.3, 10)], [True, True]),
    "just below is not": ([(10, 10), (9.29, 10)], [True, False]),
    "either bracket drops": ([(10, 5), (5, 10), (9.5, 9.5)], [False, False, True]),
    "the best may come last": ([(5, 5), (5, 5), (5, 10)], [False, False, False]),
    "accelerators need no gauge": ([None, None], [True, True]),
}


def test_runs_count_with_both_brackets_near_the_best():
    for name, (brackets, expected) in KEEP_CASES.items():
        assert keep(brackets) == expected, name


def test_summaries_are_medians_of_the_kept_runs():
    runs = [Run("a", {"seconds": s}, b) for s, b in [(1.0, (10, 10)), (9.0, (10, 4)), (3.0, (10, 10)), (2.0, (10, 10))]]
    runs += [Run("b", {"seconds": s}, (4.0, 10)) for s in (5.0, 7.0)]
    found = summarise(runs)
    a, b = found["a"], found["b"]
    assert (a.medians, a.kept, a.dropped, a.disturbed) == ({"seconds": 2.0}, 3, 1, False)
    assert (b.medians, b.kept, b.dropped, b.disturbed) == ({"seconds": 6.0}, 0, 2, True)


class Readings:
    """A gauge that reads what it is told to."""

    def __init__(self, *values: float) -> None:
        self.readings: list[float] = []
        self._values = list(values)

    def __call__(self) -> float:
        self.readings.append(self._values.pop(0))
        return self.readings[-1]


def test_cases_take_turns_and_share_brackets():
    order: list[str] = []

    def case(name: str) -> Any:
        return lambda: order.append(name) or {"seconds": 1.0}

    bench = Bench(Readings(10, 9.5, 5, 10, 10), lambda _: None)  # pyright: ignore[reportArgumentType]
    bench.interleave({"a": case("a"), "b": case("b")}, 2, warm_up=1)
    assert order == ["a", "b"] * 3, "the first turn does not count"
    assert [run.brackets for run in bench.runs] == [(10, 9.5), (9.5, 5), (5, 10), (10, 10)]
    assert bench.counts() == (2, 2)
    assert "2 kept, 2 dropped" in verdict(bench)
    assert "DISTURBED" not in verdict(bench)


def test_a_turn_of_the_same_work_is_kept_or_dropped_whole():
    tokens = iter([7, 7, 9, 9, 8, 3])
    bench = Bench(Readings(10, 5, *[10] * 6), lambda _: None)  # pyright: ignore[reportArgumentType]
    cases = dict.fromkeys("ab", lambda: {"seconds": 1.0, "tokens": float(next(tokens))})
    bench.interleave(cases, 2, same=["tokens"])
    assert [run.brackets for run in bench.runs] == [(5, 10)] * 2 + [(10, 10)] * 2
    assert {name: case.medians["tokens"] for name, case in summarise(bench.runs).items()} == {"a": 9, "b": 9}
    with pytest.raises(RuntimeError, match=r"tokens is to be the same .*'a': 8.0, 'b': 3.0"):
        bench.interleave(cases, 1, same=["tokens"])


def test_a_wholly_disturbed_benchmark_says_so():
    bench = Bench(Readings(10, 5, 10), lambda _: None)  # pyright: ignore[reportArgumentType]
    bench.interleave({"a": lambda: {"seconds": 1.0}}, 2)
    assert "0 kept, 2 dropped" in verdict(bench)
    assert "EVERY RUN WAS DISTURBED" in verdict(bench)
    assert summarise(bench.runs)["a"].disturbed


def test_without_a_gauge_nothing_is_dropped():
    bench = Bench(None, lambda _: None)
    bench.interleave({"a": lambda: {"seconds": 1.0}}, 3)
    assert bench.counts() == (3, 0)
    assert "none dropped" in verdict(bench)


def test_gauge_waits_and_measures_for_as_long_as_it_says():
    gauge = Gauge(seconds=0.02, threads=2, settle_s=0.05)
    began = time.perf_counter()
    capacity = gauge()
    assert capacity > 0
    assert gauge.readings == [capacity]
    assert time.perf_counter() - began >= 0.05 + 3 * 0.02
    gauge.close()


def test_a_blink_does_not_lower_a_gauge(monkeypatch: pytest.MonkeyPatch):
    gauge = Gauge(seconds=0.001, threads=1, settle_s=0.0)
    readings = iter([10.0, 4.0, 9.0, 4.0, 10.0, 5.0])
    monkeypatch.setattr(gauge, "_read", lambda: next(readings))
    assert [gauge(), gauge()] == [9.0, 5.0]
    gauge.close()


def test_ceilings_are_positive_and_the_best_of_both():
    found = measure_ceilings(quick=True)
    assert found.copy > 0
    assert found.read > 0
    assert found.bandwidth == max(found.copy, found.read)
    assert set(found.flops) == {"float32_full", "float32", "bfloat16"}
    # what a wider product reaches, a narrower one may use
    assert 0 < found.flops["float32_full"] <= found.flops["float32"] <= found.flops["bfloat16"]
    lower = {name: 0.5 * value for name, value in found.flops.items()}
    better = found.best(ceilings.Ceilings(2 * found.copy, 0.5 * found.read, lower))
    assert (better.copy, better.read) == (2 * found.copy, found.read)
    assert better.flops == found.flops
    assert found.nominal is None
    assert found.record()["datasheet"] is None
    assert found.of_datasheet(bytes_per_s=1.0) is None


def test_shares_of_a_data_sheet():
    sheet = ceilings.datasheet("NVIDIA H100 80GB HBM3")
    assert sheet is not None
    assert ceilings.datasheet("NVIDIA H100 PCIe") is None, "another card, of other rates"
    two = ceilings.Ceilings(6e12, 6.7e12, {"bfloat16": 1.2e15, "float32": 6e14}, sheet, devices=2)
    shares = {name: share for name, _, _, share in two.table()}
    assert shares["copy"] == pytest.approx(6e12 / (2 * 3.35e12))
    assert shares["bfloat16"] == pytest.approx(1.2e15 / (2 * 989.4e12))
    assert shares["float32"] is None, "the sheet's figure is for bfloat16"
    record = two.record()
    assert record["bandwidth_bytes_per_s"] == 6.7e12
    assert record["datasheet"]["bandwidth_bytes_per_s"] == 2 * 3.35e12


def test_ceilings_are_measured_on_random_data():
    a, b = (ceilings.random_array((64, 64), "bfloat16", seed) for seed in (0, 1))
    assert len(set(a.astype("float32").reshape(-1).tolist())) > 100
    assert not bool((a == b).all())


def test_calls_are_queued_and_waited_for_once(monkeypatch):
    """Each try waits once, however many calls it has; a call that takes long is queued alone."""
    waits: list[int] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waits.append(x) or x)
    calls = itertools.count(1)
    ceilings.queued_s(lambda: next(calls), tries=3, at_least_s=100)
    assert waits == [1, 2, *(2 + ceilings.MOST_QUEUED * i for i in (1, 2, 3))]

    def slow() -> int:
        time.sleep(0.02)
        return next(calls)

    waits.clear()
    assert ceilings.queued_s(slow, tries=2, at_least_s=0.01) >= 0.02
    assert len(waits) == 4


def test_thin_products_are_those_of_a_decode_step():
    config = named_shape("tiny")
    sizes = bench_ceilings.products(config)
    layers = sum(inner * outer for name, (inner, outer) in sizes.items() if name != "head")
    assert config.num_layers * layers == costs.layer_matrices(config)
    assert sizes["head"][0] * sizes["head"][1] == costs.head_entries(config)


# -- profiles ----------------------------------------------------------------------------------------------------------

GPU_TRACE = """
planes {
  id: 1 name: "/host:CPU"
  lines { name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "submit" } }
}
planes {
  id: 2 name: "/device:GPU:0"
  lines {
    name: "Stream #14(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 2000000 duration_ps: 3000000 }
    events { metadata_id: 3 offset_ps: 5000000 duration_ps: 1000000 }
  }
  lines { name: "Stream #15(MemcpyD2H)" events { metadata_id: 4 offset_ps: 0 duration_ps: 500000 } }
  lines { name: "XLA Modules" events { metadata_id: 5 offset_ps: 0 duration_ps: 6000000 } }
  event_metadata { key: 1 value { id: 1 name: "_attend_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "gemm_fusion_dot_7" } }
  event_metadata { key: 3 value { id: 3 name: "gemm_fusion_dot_9_1" } }
  event_metadata { key: 4 value { id: 4 name: "MemcpyD2H" } }
  event_metadata { key: 5 value { id: 5 name: "jit_decode" } }
}
"""


def test_a_gpu_trace_counts_each_kernel_once():
    """The lines of modules and of the host repeat the time that the streams have."""
    found = profiles.summary(profiles.events(jax.profiler.ProfileData.from_text_proto(GPU_TRACE)))
    assert found["kernels_s"] == pytest.approx(6.5e-6)
    assert found["launches"] == 4
    assert not found["of_a_loop"]
    in_graph = GPU_TRACE.replace('"MemcpyD2H" }', '"set_while_condition" }')
    assert profiles.summary(profiles.events(jax.profiler.ProfileData.from_text_proto(in_graph)))["of_a_loop"]
    launches = {name: each["launches"] for name, each in found["groups"].items()}
    assert launches == {"products": 2, "attention": 1, "copies": 1}
    assert found["groups"]["products"]["seconds"] == pytest.approx(4e-6)
    assert found["top"][0] == {"name": "gemm_fusion_dot", "seconds": pytest.approx(4e-6), "launches": 2}
    text = profiles.table(found, per=2)
    assert "[products]" in text
    assert "0.002" in text


# jaxlib 0.11.2 makes its type of an event's numbers at first use, and aborts where Python 3.12's warning is an error
@pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__ attribute:DeprecationWarning")
def test_a_cpu_trace_counts_what_is_inside_a_loop_once():
    side, turns = 256, 3
    step = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), x))
    x = jnp.ones((side, side))
    jax.block_until_ready(step(x))
    found = profiles.during(lambda: jax.block_until_ready(step(x)))
    assert found["groups"]["products"]["launches"] == turns
    assert 0 < found["kernels_s"] <= found["wall_s"] * records.num_cores()
    named = {each["name"]: each for each in found["top"]}
    assert named["while"]["seconds"] < 0.5 * found["kernels_s"], "the loop's own time, without its body's"


def test_records_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/scripts/bench_x.py"])
    called = records.command(["--model", "/home/someone/models/m.gguf", "--json=/data/out/", "--rows", "1", "8"])
    assert called == "bench_x.py --model m.gguf --json=out --rows 1 8"
    device = {"platform": "cpu", "kind": "AMD EPYC (TM) 7/B13", "count": 1, "cores": 2}
    record = records.header("decode", device, records.versions(), called) | {"results": {"x": [1.5, None]}}
    file = records.append_record(tmp_path / "new", record)
    assert file.name == "decode-1x-amd-epyc-tm-7-b13.jsonl"
    records.append_record(tmp_path / "new", record | {"results": {}})
    first, second = records.read_records(file)
    assert first == json.loads(json.dumps(record))
    assert second["results"] == {}
    assert set(first) >= {"date", "command", "commit", "dirty", "device", "versions"}
    assert set(first["versions"]) == {"python", "jax", "jaxlib"}


def test_a_record_holds_no_path_and_no_host(tmp_path):
    model = records.Model(path="some_package:folder/file.gguf")
    assert model.name == "file.gguf"
    head = records.header("decode", {"platform": "cpu", "kind": "x", "count": 1}, records.versions(), "bench")
    text = json.dumps(head)
    assert os.uname().nodename not in text.replace(head["commit"], "")
    assert str(ROOT) not in text


def test_costs_are_those_worked_out_by_hand():
    config = named_shape("tiny")  # E 32, F 48, L 2, H 4, K 2, D 8, V 256, tied
    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
    assert costs.layer_matrices(config) == matrices
    assert costs.weight_bytes(config, 2) == 2 * (matrices + 256 * 32)
    # 3 rows, steps that read 5 + 1, 5 + 2 and 5 + 3 positions of 2 * L * K * D numbers
    assert costs.decode_kv_bytes(config, 3, 5, 4, 4) == 3 * 7 * (2 * 2 * 2 * 8) * 4
    assert costs.decode_flops(config, 3, 5, 4) == 3 * (2 * (matrices + 256 * 32) + 4 * 2 * 4 * 8 * 7)
    layers = 10 * (2 * matrices + 4 * 2 * 4 * 8 * 5)
    assert costs.train_flops(config, 3, 10, 6) == 3 * 3 * (layers + 6 * 2 * 256 * 32)


def test_a_worker_answers_on_request_and_ends():
    with worker.Worker("echo", bench_work.echo, "spec") as one:
        assert one.info["spec"] == "spec"
        assert one.info["pid"] != os.getpid()
        assert [one(x=i)["got"] for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("work", "request_", "error", "text"),
    [
        (bench_work.echo, {"fail": True}, RuntimeError, "broken in the worker"),
        (bench_work.echo, {"die": True}, RuntimeError, "died with status 3"),
        (bench_work.refuse, {}, ValueError, "must be otherwise"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_told(work, request_, error, text):
    with pytest.raises(error, match=text), worker.Worker("echo", work, "spec") as one:
        one(**request_)


def test_memory_of_this_process():
    assert 0 < worker.resident_bytes() <= worker.peak_bytes()


def test_foreign_imports_leave_the_repository_out():
    before = [str(ROOT), *sys.path]
    sys.path.insert(0, str(ROOT))
    with worker.foreign_imports():
        assert ROOT not in {Path(entry or ".").resolve() for entry in sys.path}
    assert sys.path == before
    sys.path.pop(0)


def test_trl_gets_the_options_that_it_knows():
    """TRL's options come and go: what the installed version lacks is left out and named."""

    def made(beta: float, num_generations: int) -> None: ...

    known, gone = trl_case._known(made, {"beta": 0.0, "gone": 1, "num_generations": 4})
    assert (known, gone) == ({"beta": 0.0, "num_generations": 4}, ["gone"])


def test_trl_steps_are_timed_between_its_callbacks_and_wait_for_requests():
    sent: list[dict[str, Any]] = []
    answers: list[dict[str, Any] | None] = [{}, None]

    def ask(values: dict[str, Any]) -> dict[str, Any] | None:
        sent.append(values)
        return answers.pop(0)

    class Control:
        should_training_stop = False

    spec = trl_case.TrlSpec("w", "d", "float32", "cpu", prompts=2, samples=3, new=5, lr=1e-6, seed=0)
    steps, control = trl_case._steps(object, None, spec, ask, 0), Control()
    for stopping in (False, True):
        steps.on_step_begin(None, None, control)
        time.sleep(0.02)
        steps.on_step_end(None, None, control)
        assert control.should_training_stop == stopping
    assert all(0.02 <= values["seconds"] < 10 and values["response_tokens"] == 30 for values in sent)


def test_both_grpo_steps_have_the_same_reward(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(step_case.REWARD)
    scope: dict[str, Any] = {}
    exec(file.read_text(), scope)
    texts = ["", "a", "t1 t2", "élan"]
    assert trl_case._reward(texts) == [scope["compute_score"]("", text, "", {}) for text in texts]
