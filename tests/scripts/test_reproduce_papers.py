"""`scripts/reproduce_papers.py`: quick runs, pages, the calibration, and closed forms against hand counts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reproduce_papers
import yaml
from papers import calibration, closed_form, headline, pages, pat_closed, problems
from papers.calibration import calibrate, residual, solve, write
from papers.cases import EXPERIMENTS
from papers.closed_form import drain, drained, rollout_s
from papers.facts import FACTS, HERE, SETUPS, Fact
from papers.problems import PROBLEMS
from papers.runs import read

from jaxrl.models.shapes import named_shape
from jaxrl.sim.cost_model import CostModel, causal_pairs
from jaxrl.sim.hardware import H800, HARDWARE

FOLDER = HERE.parents[1] / "docs" / "reproductions"
FILE = FOLDER / "calibration.json"
NEWEST = {file.stem[:-11]: file for file in sorted(FOLDER.glob("*-20*.json"))}
COST = CostModel(named_shape("Qwen2.5-7B"), H800)


# ---------------------------------------------------------------- results and pages


@pytest.mark.parametrize("paper", EXPERIMENTS)
def test_a_page_is_what_its_result_says(paper: str):
    """Of the newest result of each paper: tables, closed forms beside ours, verdicts."""
    assert pages.page(*read(NEWEST[paper])) == NEWEST[paper].with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_headline_is_what_the_newest_results_say():
    assert headline.page(FOLDER, calibration.read(FILE)) == (FOLDER / "headline.md").read_text(encoding="utf-8")


def test_a_row_is_met_within_the_bar_and_not_by_errors_that_cancel():
    gain = headline.Line("a speed-up", 1.4, np.array([1.45, 1.51]))
    assert gain.error == pytest.approx(0.2)
    assert gain.met
    assert not replace(gain, cancels=True).met
    assert "sum only" in replace(gain, cancels=True).cells
    assert not replace(gain, gain=False, ours=np.array([1.8])).met  # of the number itself: 29 %
    assert not replace(gain, ours=None).met
    assert "not run" in replace(gain, ours=None).cells


@pytest.mark.parametrize(
    "paper", ["april", *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS if name != "april")]
)
def test_a_quick_run_makes_a_result_and_a_page(paper: str, tmp_path: Path):
    assert reproduce_papers.main([paper, "--tiny", "--steps=2", "--seeds=1", f"--out={tmp_path}"]) == 0
    (file,) = tmp_path.glob("*.json")
    header, runs = read(file)
    assert header["tiny"]
    for r in runs:
        stages = zip(*(r.values[name] for name in ("start_s", "gen_s", "reward_s", "train_s")), strict=True)
        assert r.values["step_s"] == pytest.approx([sum(each) for each in stages])
        base = next(other for other in runs if other.case == r.case.base)
        assert r.values["trained_tokens"] == base.values["trained_tokens"], "a stream trainer changes no group"
    text = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "no figure below means anything" in text
    assert "one seed" in text


# ---------------------------------------------------------------- facts and the calibration


def test_each_fact_has_a_problem_and_no_calibration_sees_what_the_papers_methods_reached():
    predicted = [name for problem in PROBLEMS.values() for name in problem.facts]
    cited = [name for problem in PROBLEMS.values() for name in problem.cited.values()]
    assert sorted(predicted) == sorted(name for name, fact in FACTS.items() if fact.role in ("fit", "check"))
    assert sorted(cited) == sorted(name for name, fact in FACTS.items() if fact.role == "input")
    assert all(fact.note for fact in FACTS.values() if fact.role == "unused")
    assert (
        yaml.safe_load((HERE / "reported.yaml").read_text())["RollPacker Table 2, + tail batching"]["32B/32k"] == 2.21
    )
    readers = {file.name for file in HERE.glob("*.py") if 'HERE / "reported.yaml"' in file.read_text()}
    assert readers == {"pages.py"}


@pytest.mark.slow
def test_the_whole_calibration_is_the_file():
    """The last bits of a BLAS move a fit within what its facts leave open: values are compared in that unit."""
    kept = calibration.read(FILE)
    for name, solution in calibrate(list(PROBLEMS.values())).items():
        for each, constant in solution.entry["constants"].items():
            open_spread = constant["prior_log_spread"] * math.sqrt(1 - constant["informed"])
            assert abs(math.log(constant["value"] / kept[name][each])) <= 0.3 * open_spread, (name, each)


def test_a_fit_recovers_constants_from_made_up_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    drawn = problems.outlier_batches
    monkeypatch.setattr(problems, "outlier_batches", lambda setup, values: drawn(setup, values, 1))  # quicker
    problem = PROBLEMS["pat_a40"]
    truth = {"memory": 0.7, "launch_s": 80e-6, "collective_s": 30e-6, "link": 0.3}
    truth = {f"efficiency.{name}": value for name, value in truth.items()}
    fixed = {"efficiency.mfu": 0.2, "efficiency.train_fixed_s": 10.0, "context": 1024.0}
    fixed |= {"lengths.median": 900.0, "lengths.sigma": 0.6}
    facts = {
        name: Fact(name, "made up", "here", "1", value, value, tolerance=1e-4)
        for name, value in problem.predict(truth | fixed).items()
    }
    free = tuple(each for each in problem.constants if each.name in truth)
    found = solve(replace(problem, constants=free, facts=tuple(facts), fixed=fixed, checks=lambda _: {}), {}, facts)
    assert {name: found.values[name] for name in truth} == pytest.approx(truth, rel=0.02)
    assert all(abs(row["residual"]) < 1e-3 for row in found.entry["facts"])
    published = replace(facts["pat.a40.tp2_batch1"], low=2.0, high=4.0)
    assert [residual(published, value) for value in (1.0, 3.0, 8.0)] == [math.log(0.5), 0.0, math.log(2)]
    write({"pat_a40": found}, tmp_path / "stale.json")
    with pytest.raises(ValueError, match="calibrate again"):
        calibration.read(tmp_path / "stale.json")


# ---------------------------------------------------------------- closed forms


def test_a_drain_is_the_sum_of_its_steps():
    prompts, lengths = [5, 7, 9], [3, 1, 6]
    now = COST.prefill_s(1, 21, sum(causal_pairs(p) for p in prompts))
    expected = {}
    for step in range(6):
        rows = [i for i in range(3) if lengths[i] > step]
        now += COST.decode_step_s(1, len(rows), sum(prompts[i] + step for i in rows))
        expected |= {i: now for i in rows if lengths[i] == step + 1}
    assert drain(COST, 1, prompts, lengths) == pytest.approx(sorted(expected.values()), rel=1e-9)


def test_a_generation_that_switches_in_closed_form():
    """Two dp groups of two rows, to tp 2 when one row is left: the same steps, each at its degree."""
    setup = replace(SETUPS["pat.h100.8b"], num_devices=2, tp=1, num_prompts=4, max_tokens=500)
    cost, batch = CostModel(named_shape(setup.model), HARDWARE["H100"]), [[500], [100], [200], [300]]
    reading = pat_closed.Reading(tp=1, new_tp=2, rows=1)
    stay = pat_closed.generation_s(cost, setup, batch, replace(reading, rows=0))
    assert stay == pytest.approx(rollout_s(cost, setup, batch), rel=1e-9)
    # group 0 has the rows of 500 and 200 tokens, group 1 those of 100 and 300, which end last but one
    now, second = drained(cost, 1, [100, 300])[-1], drained(cost, 1, [500, 200])[0]
    alone = np.cumsum([cost.decode_step_s(1, 1, closed_form.PROMPT_TOKENS + step) for step in range(200, 500)])
    done = 200 + int(np.searchsorted(second + alone, now, side="right"))
    switch = cost.switch_cost(1, 2)
    moved_s = switch.weights_s + switch.fixed_s + switch.kv_s_per_token * (closed_form.PROMPT_TOKENS + done)
    rest = sum(cost.decode_step_s(2, 1, closed_form.PROMPT_TOKENS + step) for step in range(done, 500))
    assert pat_closed.generation_s(cost, setup, batch, reading) == pytest.approx(now + moved_s + rest, rel=1e-3)
