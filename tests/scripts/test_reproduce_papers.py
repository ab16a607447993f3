"""`scripts/reproduce_papers.py`: the pages that are kept, runs at a tiny size, and what is refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reproduce_papers
from papers import tables
from papers.calibrate import read as read_calibration
from papers.cases import EXPERIMENTS, STREAM_BASE, STREAM_FREED, below_tail_batching, cases_of, jobs_of, whole_rows
from papers.fetch import SingleFetch
from papers.pages import page
from papers.records import read
from papers.runs import Steps, run
from papers.setups import EPOCH_STEPS, Case

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reproductions"


def test_only_pages_read_what_the_papers_methods_reached():
    for file in sorted((ROOT / "scripts" / "papers").glob("*.py")):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imports for alias in node.names}
        assert ("REPORTED" in names) == (file.stem == "pages" or file.stem.endswith("_page")), file.name


# ---------------------------------------------------------------- the script


NEWEST = {file.stem[:-11]: file for file in sorted(FOLDER.glob("*-20*.json"))}


@pytest.mark.parametrize("paper", EXPERIMENTS)
def test_a_page_is_what_its_result_says(paper: str):
    """Of the newest result of each paper: tables, closed forms beside ours, verdicts."""
    assert NEWEST.keys() == EXPERIMENTS.keys()
    record, runs = read(NEWEST[paper])
    assert page(record, runs) == NEWEST[paper].with_suffix(".md").read_text(encoding="utf-8")


def tiny(folder: Path, *papers: str, steps: int = 1, seeds: int = 1) -> list[Path]:
    """The results of a tiny run."""
    words = ["--tiny", "--steps", str(steps), "--seeds", str(seeds), "--out", str(folder)]
    assert reproduce_papers.main([*papers, *words]) == 0
    return sorted(folder.glob("*.json"))


def test_a_tiny_run_makes_a_result_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (file,) = tiny(tmp_path, "rollpacker")
    look_at_rollpacker(file)
    assert "one seed" in file.with_suffix(".md").read_text(encoding="utf-8")
    assert "seed 0" in capsys.readouterr().out


def look_at_rollpacker(file: Path) -> None:
    header, runs = read(file)
    assert header["tiny"]
    assert header["calibration"]["file"] == "calibration.json"
    tail = next(r for r in runs if r.case.rule == "tail" and r.case.prompt_factor == 1.25)
    assert len(tail.step_s) == tail.case.period == 5
    assert tail.long == [False, False, False, False, True]
    for r in runs:
        stages = zip(r.start_s, r.gen_s, r.reward_s, r.train_s, strict=True)
        assert r.step_s == pytest.approx([sum(each) for each in stages])
        if r.case.stream != "off":
            (base,) = (other for other in runs if other.case == r.case.base)
            assert r.trained_tokens == base.trained_tokens
            for i, freed in enumerate(r.freed_at):
                assert freed or r.step_s[i] == base.step_s[i]
                assert not freed or r.case.rule == "plain" or r.long[i], "a short round"
    assert any(sum(r.streamed) for r in runs)
    text = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "no figure below means anything" in text
    assert "| 32B/32k |" in text
    for section in ("Table 2, row by row", "Table 3: when devices are freed", "Table 4: groups fetched once"):
        assert f"## RollPacker {section}" in text


@pytest.mark.slow
def test_tiny_runs_make_results_and_pages(tmp_path: Path):
    files = tiny(tmp_path, seeds=2)
    assert [file.name.split("-")[0] for file in files] == ["april", "pat", "rhymerl", *["rollpacker"] * 3]
    look_at_rollpacker(files[3])
    text = files[3].with_suffix(".md").read_text(encoding="utf-8")
    assert "one seed" not in text
    assert re.search(r"speed-up \| in closed form .*\n.*\n\| 7B/8k .* \d\.\d\d ± \d\.\d\d \|", text)
    assert "## APRIL Table 1" in files[0].with_suffix(".md").read_text(encoding="utf-8")
    rewards = files[4].with_suffix(".md").read_text(encoding="utf-8")
    assert all(f"## {section}" in rewards for section in ("RollPacker Fig. 14c", "RollPacker Table 2", "Where the"))
    whole = files[5].with_suffix(".md").read_text(encoding="utf-8")
    assert len(re.findall(r"\| (?:7B/8k|14B/16k|32B/32k) \| \+ stream trainer \|", whole)) == 3
    for file in files[1:]:  # with other readings, and without
        text = file.with_suffix(".md").read_text(encoding="utf-8")
        assert reproduce_papers.main(["--page", str(file)]) == 0
        assert file.with_suffix(".md").read_text(encoding="utf-8") == text
    assert "| Fig. 11a | Llama-3.1-8B | 8 x H100 | 24,576 |" in files[1].with_suffix(".md").read_text(encoding="utf-8")


def rhymerls_rows(plain: Steps, naive: Steps, speculating: Steps) -> None:
    """Of one task: no row changes the samples, each is faster than the one above, drafts come from the epoch before."""
    rows = [(r.case.pipeline, r.case.speculation) for r in (plain, naive, speculating)]
    assert rows == [("off", False), ("naive", False), ("two_tier", True)]
    assert plain.trained_tokens == naive.trained_tokens == speculating.trained_tokens
    assert sum(naive.step_s) < sum(plain.step_s)
    assert speculating.accepted[:EPOCH_STEPS] == [0.0] * EPOCH_STEPS, "nothing was drawn before"
    assert min(speculating.accepted[EPOCH_STEPS:]) > 0.5
    assert plain.per_step == [1.0] * len(plain.per_step)


def test_rhymerls_rows_build_on_each_other_and_its_samples_stay():
    cases = [case for case in cases_of("rhymerl", 2, range(1), 64, 32) if case.tasks == ("math",)]
    calibration = read_calibration(FOLDER / "calibration.json")
    rhymerls_rows(*(run(cases[i], calibration) for i in (0, 1, 3)))


@pytest.mark.slow
def test_rhymerls_result_has_all_rows_of_both_tasks(tmp_path: Path):
    (file,) = tiny(tmp_path, "rhymerl", steps=2)
    _, runs = read(file)
    assert [r.case.tasks[0] for r in runs] == ["math"] * 4 + ["code"] * 4
    for first in (0, 4):
        plain, naive, _, speculating = runs[first : first + 4]
        rhymerls_rows(plain, naive, speculating)
    assert "| Math-14B | + speculation |" in file.with_suffix(".md").read_text(encoding="utf-8")


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert reproduce_papers.main(["--calibration", str(tmp_path / "none.json")]) == 1
    assert "no such calibration file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        reproduce_papers.main(["flexes"])
    assert "PAPER ('flexes') must be one of rollpacker, april, pat, rhymerl" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        reproduce_papers.main(["--steps", "0"])
    assert "--steps (0) must be >= 1" in capsys.readouterr().err
    (tmp_path / "old.json").write_text('{"schema": 0}')
    assert reproduce_papers.main(["--page", str(tmp_path / "old.json")]) == 1
    assert "schema 0 must be 1" in capsys.readouterr().err


class Recorded:
    """A `GradientStream` that says what it is told."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.is_done = True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.log.append(name)

    def give(self, groups: Sequence[Any], step: int) -> None:
        self.log.append((list(groups), step))

    def poll(self) -> bool:
        return self.is_done


def test_a_single_fetch():
    stream: Any = Recorded()
    single = SingleFetch(stream, 3)
    for _ in range(2):  # rounds
        stream.log.clear()
        single.open()
        stream.is_done = False
        assert not single.poll(), "the weights are on their way"
        stream.is_done = True
        assert single.poll()
        single.give(["a", "b", "c", "d"], 7)  # type: ignore[arg-type]
        assert not single.poll(), "once"
        single.finish()
        single.close()
        assert stream.log == ["open", (["a", "b", "c"], 7), "finish", "close"]


def test_what_differs_in_the_stream_alone_is_run_together():
    cases = cases_of("rollpacker", 10, range(2), 64, 1)
    jobs = jobs_of(cases)
    assert sorted(case.title for job in jobs for case in job) == sorted(case.title for case in cases)
    of_table3 = [job for job in jobs if job[0].own_trainer]
    assert [(len(job), job[0].seed, job[0].steps) for job in of_table3] == [(13, 0, 5), (13, 1, 5)]
    for job in jobs:
        assert all(case.base == job[0] for case in job)
        assert [case.stream for case in job].count("off") == 1
    assert len({case.title for case in cases}) == len(cases)
    assert STREAM_FREED["w/o"] == STREAM_BASE
    rows = list(below_tail_batching("rollpacker.32b").values())
    added = [("sample", False, "off"), ("sample", True, "off"), ("sample", True, "adaptive")]
    assert [(row.score_when, row.planner, row.stream) for row in rows] == added
    whole = list(whole_rows("rollpacker.32b").values())
    assert [replace(row, timeout="whole", anchors="learnt", judge="workers") for row in whole] == rows
    assert {(row.timeout, row.anchors, row.judge) for row in whole} == {("adaptive", "rows", "devices")}


@pytest.mark.parametrize(("factors", "period"), [((1.25, 1.25), 5), ((1.5, 1.0), 3), ((1.0, 1.5), 1), ((2.0, 1.0), 2)])
def test_a_period_is_the_short_rounds_that_fill_the_queue_and_the_long_ones(factors: tuple[float, float], period: int):
    assert Case("rollpacker.14b", "tail", *factors).period == period


def test_speedups_are_held_against_what_is_above_one():
    assert tables.error_of(1.48, 1.4) == pytest.approx(0.2)
    assert tables.verdict(tables.error_of(1.48, 1.4)) == "yes"
    assert tables.error_of(1.28, 1.4) == pytest.approx(-0.3)
    assert tables.verdict(tables.error_of(1.28, 1.4)) == "**no**"


def test_figures_are_means_over_seeds_with_their_spread():
    assert tables.shown([1.0, 1.5, 2.0]) == "1.50 ± 0.50"
    assert tables.shown([1.5]) == "1.50 (one seed)", "which is no result"
    cells = ["1.49 ± 0.13", "1.40 ± 0.00", "1.40", "+23% ± 32%", "+0% ± 0%", "yes"]
    assert tables.over_seeds([1.4, 1.58], [1.4, 1.4], 1.4) == cells
    assert reproduce_papers.parsed([]).seeds >= 5
