"""The tables of the benchmarks, made of made-up medians: each figure adds up, and the battery's page finds its keys."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_attention
import bench_ceilings
import bench_decode
import bench_judge
import bench_speculation
import bench_step
import bench_stream
import bench_sync
import bench_train
import numpy as np
import pytest
from bench import at_context, costs, records, step_case
from bench.ceilings import Ceilings
from bench.decode_cases import Setting
from bench.measure import Bench, Run, Summary
from gpu import figures, parts

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.shapes import named_shape

TINY, MODEL = named_shape("tiny"), records.Model(shape="tiny")
CEILINGS = Ceilings(4e9, 5e9, {"float32_full": 1e11, "float32": 2e11, "bfloat16": 3e11})
PROFILE = {"wall_s": 1.0, "kernels_s": 0.4, "of_a_loop": False, "launches": 12, "groups": {}, "top": []}


def summary(**medians: float) -> Summary:
    return Summary(medians, 2, 1, False)


def setting(*words: str) -> Any:
    options = bench_decode.BENCHMARK.parsed(["--quick", *words])
    return Setting(options, MODEL, TINY, None, Bench(None, print))  # type: ignore[arg-type]


# ---------------------------------------------------------------- each table


def of_ceilings() -> dict[str, Any]:
    sizes = {
        f"{name} {rows}": {"case": name, "inner": inner, "outer": outer, "rows": rows, "dtype": "float32"}
        for name, (inner, outer) in bench_ceilings.products(TINY).items()
        for rows in (1, 4)
    }
    cases = bench_ceilings._cases(dict.fromkeys(sizes, summary(seconds=0.5)), sizes, CEILINGS)
    for case in cases:
        weight_bytes = 4 * case["inner"] * case["outer"]
        assert case["bytes_per_s"] == pytest.approx(weight_bytes / 0.5)
        assert case["copy_fraction"] == pytest.approx(weight_bytes / 0.5 / 4e9)
        assert case["flops_fraction"] == pytest.approx(2 * case["rows"] * weight_bytes / 4 / 0.5 / 2e11)
    return {"cases": cases}


def of_rows_at_context() -> dict[str, Any]:
    given = setting("--at-context", "32", "--rows", "3", "--profile")
    found = {"profiles": {"3 32 float32": PROFILE}, "left_out": []}
    medians = summary(seconds=1.0, step_s=0.125, plan_s=0.5, host_per_plan_s=0.1)
    results = at_context.results(given, {"3 32 float32": medians}, found, CEILINGS)
    (case,) = results["cases"]
    assert (case["tokens"], case["tokens_per_s"], case["host_share"]) == (24, 24, 0.2)
    assert case["kv_bytes"] == 3 * 32 * 2 * 2 * 2 * 8 * 4
    assert case["bytes_per_step"] == case["weight_bytes"] + case["kv_bytes"]
    assert case["copy_fraction"] == pytest.approx(case["bytes_per_step"] / 0.125 / 4e9)
    assert case["bandwidth_fraction"] == pytest.approx(case["bytes_per_step"] / 0.125 / 5e9)
    assert (case["launches_per_step"], case["kernels_per_step_s"]) == (3, 0.1)
    assert case["gap_share"] == pytest.approx(0.2)
    of_a_loop = {"3 32 float32": PROFILE | {"of_a_loop": True, "kernels_s": 0.1}}
    (case,) = at_context.results(given, {"3 32 float32": medians}, found | {"profiles": of_a_loop}, CEILINGS)["cases"]
    assert (case["launches_per_step"], case["kernels_per_step_s"]) == (12, 0.1)
    return results


def of_train() -> dict[str, Any]:
    options = bench_train.BENCHMARK.parsed(["--quick", "--microbatches", "3", "--rows", "2"])
    ours = summary(seconds=2.0, loss=0.1, peak_bytes=3e6)
    theirs = summary(seconds=1.0, loss=0.1, peak_bytes=1e6)
    infos = {
        "jaxrl float32": {"optimizer": "AdamW", "planned_bytes": 2e6, "profile": PROFILE, "microbatches": [[2, 32]]},
        "torch float32": {"optimizer": "AdamW"},
    }
    summaries = {"jaxrl float32": ours, "torch float32": theirs}
    results = bench_train._results(options, MODEL, summaries, infos, CEILINGS)
    case, _ = results["cases"]
    assert (case["tokens"], case["tokens_per_s"]) == (3 * 2 * 32, 96)
    assert case["flops"] == costs.train_flops(TINY, 6, 32, 16)
    assert case["mfu"] * 1e11 * 2.0 == pytest.approx(case["flops"]), "of float32 in full precision"
    assert (case["peak_over_plan"], case["mfu_datasheet"]) == (1.5, None)
    (ratio,) = results["ratios"]
    assert (ratio["tokens_per_s"], ratio["peak"], ratio["disturbed"]) == (0.5, 3.0, False)
    return results


def of_step() -> dict[str, Any]:
    options = bench_step.BENCHMARK.parsed(["--quick", "--repetitions", "2"])
    phases = {"timing_s/gen": 0.6, "timing_s/update_actor": 0.3, "timing_s/sync": 0.05}
    values = {"timing_s/step": 1.0, "seconds": 1.0, "recompiles": 0.0, "response_tokens": 32.0, "prompt_tokens": 40.0}
    values |= {"peak_bytes": 2e9, "peak_above_baseline_bytes": 1e9}
    bench = Bench(None, print)
    bench.runs = [Run("jaxrl float32", values | phases | {"timing_s/sync": sync_s}) for sync_s in (0.05, 0.09)]
    bench.runs.append(Run("trl float32", values | {"seconds": 4.0}))
    infos = {"jaxrl float32": {"programs": 3, "warm_up_s": 2.0, "cold_warm_up_s": 9.0}, "trl float32": {}}
    results = bench_step._results(options, MODEL, bench, infos, CEILINGS)
    case, _ = results["cases"]
    assert case["residual_share"] == pytest.approx(0.05), "the largest of any step"
    assert (case["tokens_per_s"], results["ratios"]["float32"]["trl_over_jaxrl"]) == (32, 4)
    read = costs.weight_bytes(TINY, 4) + costs.decode_kv_bytes(TINY, 4, 10, 8, 4)
    assert case["gen_bandwidth_fraction"] == pytest.approx(read / (0.6 / 8) / 5e9)
    assert case["update_mfu"] == pytest.approx(costs.train_flops(TINY, 4, 18, 8) / 0.3 / 1e11)
    assert results["broken_promises"] == [], "a fifth may be in no phase of a trial"
    assert len(bench_step._broken([case | {"recompiles": 2.0}])) == 2
    assert bench_step._broken([case | {"residual_share": -0.01}]) == []
    return results


def of_sync() -> dict[str, Any]:
    cases = bench_sync._cases({"weights float32 2": summary(seconds=2.0)}, {"weights float32 2": 4_000_000}, CEILINGS)
    assert (cases[0]["workers"], cases[0]["bytes_per_s"], cases[0]["over_copy"]) == (2, 2e6, 2000)
    return {"cases": cases}


def of_attention() -> dict[str, Any]:
    place = bench_attention.Place(TINY, on_gpu=False, interpret=True)
    paged = {"what": "paged", "rows": 2, "context": 64, "dtype": "float32"}
    packed = {"what": "packed", "rows": 1, "tokens": 64, "segments": 2, "dtype": "float32"}
    sizes = {f"{point['what']} {name}": {"case": name} | point for point, names in (
        (paged, ("jaxrl", "jax-4")), (packed, ("pallas", "xla"))) for name in names}  # fmt: skip
    seconds = dict(zip(sizes, (1.0, 3.0, 2.0, 1.0), strict=True))
    summaries = {label: summary(seconds=value, forward_s=value / 4) for label, value in seconds.items()}
    cases = bench_attention._cases(place, summaries, sizes, CEILINGS)
    assert cases[0]["bytes_per_s"] == 2 * 64 * (2 * 2 * 8 * 4)
    pairs = 2 * 32 * 32 / 2
    assert cases[2]["forward_flops_per_s"] == pytest.approx(4 * 4 * 8 * pairs / 0.5)
    assert cases[2]["flops_per_s"] == pytest.approx(3.5 * 4 * 4 * 8 * pairs / 2)
    assert cases[2]["flops_fraction"] == pytest.approx(cases[2]["flops_per_s"] / 1e11)
    ratios = bench_attention._ratios(cases)
    assert [ratio["ratio"] for ratio in ratios] == ["jaxrl / jax-4", "pallas / xla"]
    assert (ratios[0]["speed"], ratios[1]["forward"], ratios[1]["both"]) == (3, 0.5, 0.5)
    return {"cases": cases, "ratios": ratios}


MADE = {"ceilings": of_ceilings, "decode-1.5b": of_rows_at_context, "train": of_train, "step": of_step}
MADE |= {"sync": of_sync, "attention": of_attention}
NOT_HERE = {("train", "mfu_datasheet"), ("attention", "speed"), ("attention", "both")}
"""Of figures of other cards, or beside what a card alone runs."""


@pytest.mark.parametrize("part", MADE)
def test_figures_add_up_and_have_the_names_that_the_battery_looks_for(part: str):
    results = json.loads(json.dumps(MADE[part]()))
    record = {"part": part, "bench": part, "ceilings": CEILINGS.record(), "results": results}
    asked = [figure for figure in figures.trial_figures() if figure.part == part]
    assert asked
    assert {(figure.part, figure.key) for figure in asked if figure.value([record]) is None} <= NOT_HERE


def test_a_trial_of_the_battery_has_no_other_parts():
    apart = {"rules", "tests", "check"}  # tests of their own
    assert {part.name for part in parts.trial_parts()} == {*MADE, *apart}


# ---------------------------------------------------------------- those that the battery does not run


def test_decoding_beside_transformers():
    given = setting("--prompt", "16", "--new", "11")
    medians = {"seconds": 4.0, "prefill_s": 2.0, "decode_s": 2.0}
    summaries = {"engine 2 float32": summary(**medians), "transformers 2 float32": summary(**medians | {"seconds": 8})}
    results = bench_decode._uniform_results(given, summaries, CEILINGS)
    case, _ = results["cases"]
    assert (case["tokens"], case["decode_tokens"], case["step_s"]) == (22, 20, 0.2)
    assert (case["tokens_per_s"], case["decode_tokens_per_s"]) == (5.5, 10)
    assert case["bytes_per_s"] == pytest.approx(case["bytes_per_step"] / 0.2)
    assert case["bandwidth_fraction"] == pytest.approx(case["bytes_per_s"] / 5e9)
    (ratio,) = results["ratios"]
    assert (ratio["ratio"], ratio["decode"], ratio["total"]) == ("engine / transformers", 1, 2)
    with pytest.raises(ValueError, match="cannot be told from noise: raise --new"):
        bench_decode._uniform_results(given, {"engine 2 float32": summary(**medians | {"decode_s": -0.1})}, CEILINGS)


def test_steps_with_gradients_beside_the_rollout():
    phases = {"timing_s/step": 6.0, "timing_s/gen": 4.0, "timing_s/update_actor": 1.0}
    found = {"update_s": 1.0, "hidden_s": 2.0, "hidden_share": 2 / 3, "streamed_share": 0.5, "beside_s": 1.5}
    taken = {"plain": 9.0, "stream": 6.0}
    results = bench_stream._results({name: summary(seconds=s, **phases, **found) for name, s in taken.items()})
    assert (results["speed"], results["cases"][1]["sum_s"]) == (1.5, 7.0)


def test_seconds_beside_each_other_are_read_from_the_timeline():
    """Two parts of gradients; plans of two workers, which overlap and count once; other spans do not count."""
    spans = [("plan", 0, 10), ("plan", 5, 20), ("plan", 30, 40), ("part 1", 8, 12), ("part 2", 18, 35), ("gen", 0, 99)]
    events = [{"ph": "X", "name": name, "ts": 1e6 * a, "dur": 1e6 * (b - a)} for name, a, b in spans]
    events += [{"ph": "C", "name": "plan", "ts": 0, "args": {}}]
    lines = "[\n" + "".join(json.dumps(event) + ",\n" for event in events)
    assert step_case.beside(lines) == pytest.approx(4 + 2 + 5)
    assert step_case.beside("[\n") == 0
    assert step_case.merged([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]


def test_a_judge_is_held_against_its_own_base():
    streaming = {f"{name} float32": summary(seconds=s, steps=3.0) for name, s in (("resident", 2.0), ("serial", 5.0))}
    turns = {f"{name} float32": summary(seconds=s) for name, s in (("rollout", 4.0), ("gaps", 6.0))}
    assert [case["over"] for case in bench_judge._cases(streaming | turns)] == [1, 2.5, 1, 1.5]


def test_a_forged_index_is_right_as_often_as_asked():
    rng, options = np.random.default_rng(0), argparse.Namespace(width=4)
    response = rng.integers(1000, size=400).astype(np.int32)
    for right in (0.0, 0.5, 1.0):
        index = bench_speculation.forged(rng, response, options, right)
        hits = [index.draft(response[place - 7 : place], 1) == response[place] for place in range(7, 399)]
        assert all(len(hit) == 1 for hit in hits), "a draft at every place"
        assert np.mean(hits) == pytest.approx(right, abs=0.1)


def test_up_to_how_many_rows_drafts_pay():
    drafts = {"accept_rate": 0.5, "drafted_share": 0.4, "tokens_per_step": 2.0, "other": 0.0}
    seconds: Mapping[str, float] = {"1 rows, plain": 4, "1 rows, 0.5": 2, "8 rows, plain": 4, "8 rows, 0.5": 5}
    costs_of = {name: (1.0, 1.5 if name.startswith("1 ") else 4.0) for name in seconds}
    summaries = {name: summary(seconds=value, **drafts) for name, value in seconds.items()}
    cases = bench_speculation._cases(summaries, list(seconds), costs_of)
    assert [case["faster"] for case in cases] == [1, 2, 1, 0.8]
    assert [cases[i]["foreseen"] for i in (1, 3)] == [pytest.approx(4 / 3), 0.5]
    assert bench_speculation.pays_up_to(cases, 0.5, "faster") == "up to 1 rows"
    assert bench_speculation.pays_up_to(cases, 0.9, "faster") == "with none"


# ---------------------------------------------------------------- what steps are given


def test_prompts_of_a_step_have_the_length_asked_for(tmp_path: Path):
    folder = tmp_path / "shape"
    step_case.write_tokenizer(TINY, folder)
    step_case.write_inputs(tmp_path, str(folder), 5, 12, seed=1)
    tokenizer = Tokenizer.from_path(folder)
    questions = [line["question"] for line in records.read_records(tmp_path / "train.jsonl")]
    assert len(set(questions)) == 5
    assert [len(tokenizer.encode(question)) for question in questions] == [12] * 5
