"""Layout sessions of several workers: what the journal says is repeated by the worker that it names, and what a
checkpoint holds goes to each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adaptive_runs import LARGE, WORKLOAD, config

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.record.journal import Journal
from jaxrl.runtime.simulation import build
from jaxrl.scheduling.mechanism import RoundEnd
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100
from jaxrl.types import Sample, SampleKey


def switches(num_workers: int, journal: Journal, **layout: Any) -> list[list[Any]]:
    """The switches of each worker, in a run of one step with this journal: (dispatch, from tp, to tp)."""
    made = config(switch=True, **layout)
    made = made.replace(
        rollout=made.rollout.replace(num_workers=num_workers),
        trainer=made.trainer.replace(total_training_steps=1),
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


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_decisions_of_another_number_of_workers_are_not_repeated(
    before: int, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Their rows are not those of this run. It decides anew, and says so once."""
    path = tmp_path / "journal.jsonl"
    with closing(Journal(path, 0)) as journal:
        assert any(switches(before, journal))
    with closing(Journal(path, 0)) as journal:
        assert switches(after, journal, min_gain=0.9) == [[] for _ in range(after)], "nothing of them"
    assert [record.getMessage() for record in caplog.records] == [
        f"step 1: the journal has layout decisions of a run with {before} worker(s), and this one has {after} "
        "(rollout.num_workers): they are not repeated, and the step decides anew"
    ]
    with closing(Journal(tmp_path / "other.jsonl", 0)) as journal:
        expected = switches(after, journal)
    with closing(Journal(path, 0)) as journal:
        assert switches(after, journal) == expected, "as if the journal were empty"


def test_no_worker_decides_before_the_last_known_decision_has_been_repeated():
    """Worker 1 has a decision to repeat; until then worker 0 decides nothing, although nothing of it is known."""
    asked: list[tuple[int, bool]] = []

    def control(worker: int, follows: bool) -> Any:
        def before_plan(decides: bool) -> None:
            asked.append((worker, decides))
            made.follows = False

        made = SimpleNamespace(follows=follows, before_plan=before_plan)
        return made

    tracer: Any = None
    sessions = AdaptiveLayouts([control(0, False), control(1, True)], lambda: 0.0, tracer, None, None)
    for worker in (0, 1, 0, 1):
        sessions.before_plan(worker)
    assert asked == [(0, False), (1, False), (0, True), (1, True)]


class Control:
    """Of a worker that has ended a round and has a state."""

    def __init__(self, metrics: dict[str, float], state: dict[str, Any]) -> None:
        self.metrics, self.state, self.heard = metrics, state, list[Any]()
        self.switches, self.predictor = [], None

    def end(self, preemptions: int) -> dict[str, float]:
        self.heard.append(preemptions)
        return self.metrics

    def finished(self, length: int) -> None:
        self.heard.append(length)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heard.append(state)


def sessions_of(controls: Sequence[Control]) -> AdaptiveLayouts:
    tracer: Any = None
    found: list[Any] = list(controls)
    return AdaptiveLayouts(found, lambda: 0.0, tracer, None, None)


def ended(sessions: AdaptiveLayouts, *preemptions: int) -> dict[str, float]:
    """The metrics of a round of these workers alone."""
    return sessions.round_ends(RoundEnd([Counters(preemptions=count) for count in preemptions], None))


def test_metrics_add_up_or_are_means():
    controls = [
        Control({"rollout/layout/switches": 2, "rollout/layout/final_tp": 4, "rollout/layout/cost_s": 1.5}, {}),
        Control({"rollout/layout/switches": 0, "rollout/layout/final_tp": 1}, {}),
    ]
    assert ended(sessions_of(controls), 7, 9) == {
        "rollout/layout/switches": 2,
        "rollout/layout/final_tp": 2.5,
        "rollout/layout/cost_s": 1.5,
    }
    assert [each.heard for each in controls] == [[7], [9]], "each planner hears of its own preemptions"
    alone = Control({"rollout/layout/final_tp": 4}, {})
    assert ended(sessions_of([alone]), 3) is alone.metrics


def test_every_worker_hears_of_every_length():
    controls = [Control({}, {}) for _ in range(3)]
    zeros = np.zeros(55, np.int32)
    sample = Sample(SampleKey(0, 0, 0), zeros, zeros, zeros, zeros, "stop")
    sessions_of(controls).on_finished([sample], is_stopping=False)
    assert [each.heard for each in controls] == [[55]] * 3


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(1, 1, ["a"]), (2, 2, ["a", "b"]), (1, 3, ["a", "a", "a"]), (2, 3, ["a", "b", "a"]), (3, 1, ["a"])],
)
def test_a_checkpoint_goes_to_as_many_workers_as_there_are(before: int, after: int, expected: list[str]):
    saved = sessions_of([Control({}, {"of": name}) for name in "abc"[:before]]).state_dict()
    assert json.loads(json.dumps(saved)) == saved
    assert (saved == {"of": "a"}) == (before == 1), "one worker's is as it was before there were several"
    controls = [Control({}, {}) for _ in range(after)]
    sessions_of(controls).load_state_dict(saved)
    assert [each.heard for each in controls] == [[{"of": name}] for name in expected]
