"""A worker's layout, round by round and plan by plan: decisions, their journal, what is observed, and failures."""

from __future__ import annotations

from typing import Any

import numpy as np
from checking import assert_empty, assert_whole, engine_in, make_request

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.mechanisms.adaptive_layouts.control import Decision, LayoutControl
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost
from jaxrl.scheduling.layouts.relayout import Relayout, SwitchFailed, TimeTaken
from jaxrl.scheduling.tokens.plan import Capacity, Request
from jaxrl.scheduling.tokens.progress import Completed, TraceEvent
from jaxrl.types import Sample, SampleKey

DEGREES = (1, 2, 4)
CAPACITIES = {
    tp: Capacity(4 // tp, 4 * tp, 60 * tp + 1, block_size=4, max_prefill_tokens=32) for tp in DEGREES
}  # rows and blocks of all layouts together stay
ONE_ROW_S = {1: 0.010, 2: 0.008, 4: 0.004}


def step_s(tp: int, rows: int) -> float:
    """One row takes 10, 8, 4 ms at tp 1, 2, 4; each row more in a dp group costs 4 ms x tp."""
    return ONE_ROW_S[tp] + 0.004 * tp * (rows - 1)


def predictor() -> LatencyPredictor:
    decode = [
        Measurement(tp, rows, context, step_s(tp, rows)) for tp in DEGREES for rows in (1, 17) for context in (1, 4096)
    ]
    prefill = [Measurement(tp, rows, 16, 0.01 * rows) for tp in DEGREES for rows in (1, 4)]
    costs = [SwitchCost(a, b, 0.002, 0.0, 0.001) for a in DEGREES for b in DEGREES if a != b]
    identity = ProfileIdentity("m", "", "", 4, "", "")
    return LatencyPredictor(Profile(identity, tuple(decode), tuple(prefill), tuple(costs)))


class World:
    """An engine over replayed lengths with plans that take `slow` times the profile's seconds.

    `predicts`: whether there is a predictor, and so a switch rule.
    """

    def __init__(
        self, lengths: list[int], slow: float = 1.0, initial: int = 1, *, predicts: bool = True, **options: Any
    ) -> None:
        self.requests: list[Request] = []
        self.lengths: dict[SampleKey, int] = {}
        self.launch(lengths)
        self.events: list[TraceEvent] = []
        self.engine, self.executor = engine_in(initial, self.lengths, CAPACITIES, trace=self.events.append)
        inner = self.executor.inner
        inner.cost = lambda plan, steps: slow * steps * step_s(inner.tp, fullest(plan)) if steps else 0.05
        inner.switch_cost = lambda move: TimeTaken(0.003, 0.002, 0.001)
        self.predictor = predictor()
        section = AdaptiveLayouts.Options(min_gain=0.0, cooldown=1, state="migrate").replace(**options)
        self.control = LayoutControl(self.engine, section, DEGREES, initial, self.predictor if predicts else None)
        self.written: list[Decision] = []
        self.samples: dict[int, Sample] = {}

    def launch(self, lengths: list[int]) -> None:
        """The next round has requests of these lengths."""
        first = len(self.lengths)
        self.requests = [make_request(first + i, max_tokens=60, prompt=first + i) for i in range(len(lengths))]
        self.lengths.update((request.key, n) for request, n in zip(self.requests, lengths, strict=True))

    def run(self, recorded: list[Decision] | None = None, plans: int = 1 << 30, kind: str = "all") -> None:
        """A round, up to so many plans; it has not ended then."""
        self.control.begin(kind, recorded or (), self.written.append)
        for request in self.requests:
            self.engine.add(request)
        while not self.engine.is_idle and plans:
            self.control.before_plan()
            for finished in self.engine.step():
                self.samples[finished.request_id] = finished.sample
                self.control.finished(len(finished.sample))
            self.control.after_plan(float(self.engine.counters.plans))
            plans -= 1

    def check(self) -> None:
        for request in self.requests:
            assert_whole(self.samples[request.request_id], request, self.lengths[request.key])
        assert_empty(self.engine)

    @property
    def completions(self) -> list[Completed]:
        return [event for event in self.events if isinstance(event, Completed)]


def fullest(plan: Any) -> int:
    return max(np.bincount(plan.rows.dp_groups)) if plan.num_decoding else 1


LENGTHS = [60, 20, 25, 30, 20, 12, 8, 5, 30, 12, 6, 3]
CHAIN = [60, 20, 40, 30]  # one row in each dp group: from tp 1 to 2 with two rows left, and to 4 with one


def fail_once(executor: Any, *, usable: bool) -> None:
    switch = executor.switch

    def fail(move: Relayout) -> None:
        executor.switch = switch
        raise SwitchFailed("no room", is_usable=usable)

    executor.switch = fail


def test_a_switch_that_fails_is_recomputed_from_and_replayed_so():
    world = World(LENGTHS)
    fail_once(world.executor, usable=True)
    world.run()
    world.check()
    failed = world.control.switches[0]
    assert failed.done is None
    assert failed.to_json()["failed"] is True
    assert [d.failed for d in world.written[:2]] == [False, True]
    assert world.written[0].dispatch == world.written[1].dispatch
    metrics = world.control.end(0)
    assert metrics["rollout/layout/failed_switches"] == 1
    last_word = list({d.dispatch: d for d in world.written}.values())
    again = World(LENGTHS, slow=8.0)
    again.run(last_word)
    again.check()
    assert again.completions == world.completions


# The planner between rounds and the switch rule inside them, together


def run_round(world: World, preemptions: int, kind: str = "all") -> tuple[list[int], int]:
    """The degrees of a round with rows that end one after another, and the degree that the next round starts in."""
    world.launch(CHAIN)
    tp = world.control.degree(kind)
    world.run(kind=kind)
    seen = [tp, *(episode.decision.to_tp for episode in world.control.switches)]
    assert world.control.tp == seen[-1]
    world.control.end(preemptions)
    return seen, world.control.degree(kind)


def test_a_round_starts_in_the_planners_degree_goes_up_and_returns():
    world = World([], planner=True)
    # Four rows: 10 ms at tp 1. Two, in different groups at tp 2: 8 ms. One: 4 ms at tp 4.
    assert run_round(world, preemptions=0) == ([1, 2, 4], 1), "up inside, and back to the planner's degree"
    assert run_round(world, preemptions=3) == ([1, 2, 4], 2), "the planner doubles, whatever the round ended in"
    assert run_round(world, preemptions=3) == ([2, 4], 2), "it never falls below the planner's degree"
    assert run_round(world, preemptions=9) == ([2, 4], 4)
    assert run_round(world, preemptions=9) == ([4], 4), "no way up is left"
    for degree in (4, 4, 4, 2):
        assert run_round(world, preemptions=0) == ([4], degree)
    assert run_round(world, preemptions=0) == ([2, 4], 2)
    assert all(len(world.samples[key.prompt_index]) == length for key, length in world.lengths.items())


def test_a_checkpoint_has_the_planner_the_lengths_and_the_correction():
    world, other = (World([], slow=1.5, planner=True, bound="expected") for _ in range(2))
    run_round(world, 3)
    run_round(world, 4)
    world.control.begin()
    world.control.cancel()  # which teaches the planner nothing
    other.control.load_state_dict(world.control.state_dict())
    assert other.control.degree() == world.control.degree() == 2
    assert other.predictor.ratio(1) == world.predictor.ratio(1) != 1
    assert other.control.history is not None
    assert sorted(other.control.history.lengths()) == sorted(CHAIN * 2)


def test_a_phase_begins_in_the_layout_of_the_likely_round():
    """An evaluation says nothing of the next training round."""
    world = World([], planner=True)
    run_round(world, 3, "short")
    run_round(world, 4, "short")
    world.control.begin("eval")
    world.control.end(0)
    assert world.control.tp == 1
    other = World([], planner=True)
    other.control.load_state_dict(world.control.state_dict())
    for each in (world, other):
        each.control.enter()
        assert each.control.tp == 2
        assert run_round(each, 4, "short") == ([2, 4], 2)
