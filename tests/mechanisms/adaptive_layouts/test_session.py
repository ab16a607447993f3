"""Layout sessions of several workers: what the journal says is repeated by the worker that it names, and what a
checkpoint holds goes to each."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from adaptive_runs import LARGE, WORKLOAD, config

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.record.journal import Journal
from jaxrl.run.simulation import build
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100


def switches(num_workers: int, journal: Journal, **layout: Any) -> list[list[Any]]:
    """The switches of each worker, in a run of one step with this journal: (dispatch, from tp, to tp)."""
    made = config(switch=True, **layout)
    made = made.replace(
        rollout=made.rollout.replace(num_workers=num_workers), trainer=made.trainer.replace(total_training_steps=1)
    )
    simulation = build(made, CostModel(LARGE, H100), WORKLOAD)
    sessions = simulation.run.mechanism(AdaptiveLayouts)
    sessions._journal = journal
    assert simulation.loop.run()
    found = [[switch.decision for switch in control.switches] for control in sessions.controls]
    return [[(each.dispatch, each.from_tp, each.to_tp) for each in own] for own in found]


def keys(path: Path) -> list[list[int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["key"] for line in lines[1:] if line["switch"] is not None]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_round_that_runs_again_switches_as_the_journal_says(num_workers: int, tmp_path: Path):
    """The second run's rule would not switch; the journal of the first makes it. One worker's keys do not name it, as
    before there were several."""
    path = tmp_path / "journal.jsonl"
    with closing(Journal(path, 0)) as journal:
        first = switches(num_workers, journal)
    assert all(first), "every worker switches"
    expected = [
        [0, own[0], *([worker, num_workers] if num_workers > 1 else [])]
        for worker, each in enumerate(first)
        for own in each
    ]
    assert sorted(keys(path)) == sorted(expected)
    for name, expected in (("empty.jsonl", [[] for _ in first]), (path.name, first)):
        with closing(Journal(tmp_path / name, 0)) as found:
            assert switches(num_workers, found, min_gain=0.9) == expected


def test_decisions_of_another_number_of_workers_are_not_repeated(tmp_path: Path):
    """Their rows are not those of this run. It decides anew."""
    path, before, after = tmp_path / "journal.jsonl", 2, 1
    with closing(Journal(path, 0)) as journal:
        assert any(switches(before, journal))
    with closing(Journal(path, 0)) as journal:
        assert switches(after, journal, min_gain=0.9) == [[] for _ in range(after)], "nothing of them"
    with closing(Journal(tmp_path / "other.jsonl", 0)) as journal:
        expected = switches(after, journal)
    with closing(Journal(path, 0)) as journal:
        assert switches(after, journal) == expected, "as if the journal were empty"
