"""`scripts/reproduce_papers.py`: quick runs, pages, the calibration, and closed forms against hand counts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reproduce_papers
from papers import calibration, headline, pages
from papers.calibration import calibrate
from papers.cases import EXPERIMENTS
from papers.closed_form import drain
from papers.facts import FACTS, HERE
from papers.problems import PROBLEMS
from papers.runs import read

from jaxrl.models.shapes import named_shape
from jaxrl.scheduling.layouts.latency import causal_pairs
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H800

FOLDER = HERE.parents[1] / "docs" / "reproductions"
FILE = FOLDER / "calibration.json"
NEWEST = {file.stem[:-11]: file for file in sorted(FOLDER.glob("*-20*.json"))}
COST = CostModel(named_shape("Qwen2.5-7B"), H800)


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
    assert not replace(gain, fitted=True).met
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
        base = next((other for other in runs if other.case == r.case.base), r)
        assert r.values["trained_tokens"] == base.values["trained_tokens"], "a stream trainer changes no group"
    text = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "no figure below means anything" in text


def test_each_fact_has_a_problem_and_no_calibration_sees_what_the_papers_methods_reached():
    predicted = [name for problem in PROBLEMS.values() for name in problem.facts]
    assert sorted(predicted) == sorted(name for name, fact in FACTS.items() if fact.role in ("fit", "check"))
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


def test_a_drain_is_the_sum_of_its_steps():
    prompts, lengths = [5, 7, 9], [3, 1, 6]
    now = COST.prefill_s(1, 21, sum(causal_pairs(p) for p in prompts))
    expected = {}
    for step in range(6):
        rows = [i for i in range(3) if lengths[i] > step]
        now += COST.decode_step_s(1, len(rows), sum(prompts[i] + step for i in rows))
        expected |= {i: now for i in rows if lengths[i] == step + 1}
    assert drain(COST, 1, prompts, lengths) == pytest.approx(sorted(expected.values()), rel=1e-9)
