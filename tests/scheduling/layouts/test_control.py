"""A worker's layout from plan to plan: decisions, their journal, what is observed, and failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from checking import assert_empty, assert_whole, make_engine, make_request

from jaxrl.scheduling.layouts.control import MAX_TRACE, Decision, LayoutControl, LengthHistory
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost
from jaxrl.scheduling.layouts.relayout import Relayout, SwitchFailed, SwitchTimes
from jaxrl.scheduling.layouts.round_layouts import RoundLayouts
from jaxrl.scheduling.layouts.switch_rule import LayoutSwitchConfig, LayoutSwitchRule
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Capacity, Request
from jaxrl.scheduling.tokens.progress import Completed, Progress, TraceEvent
from jaxrl.types import Sample

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
    """An engine over replayed lengths whose plans take what the profile says, `slow` times as long."""

    def __init__(self, lengths: list[int], slow: float = 1.0, **options: Any) -> None:
        self.requests = [make_request(i, max_tokens=60, prompt=i) for i in range(len(lengths))]
        self.lengths = {request.key: n for request, n in zip(self.requests, lengths, strict=True)}
        self.events: list[TraceEvent] = []
        own = CAPACITIES[1]
        self.engine, self.executor = make_engine(
            self.lengths,
            BatcherConfig(decode_steps=4),
            num_groups=own.num_groups,
            num_slots=own.num_slots,
            num_blocks=own.num_blocks,
            max_prefill_tokens=own.max_prefill_tokens,
            layouts=CAPACITIES,
            trace=self.events.append,
        )
        inner = self.executor.inner
        inner._cost = lambda plan, steps: slow * steps * step_s(inner.tp, fullest(plan)) if steps else 0.05
        inner._switch_cost = lambda move: SwitchTimes(0.003, 0.002, 0.001)
        self.predictor = predictor()
        config = replace(LayoutSwitchConfig(DEGREES, min_gain=0.0, cooldown=1, state="migrate"), **options)
        self.history = LengthHistory()
        layouts = RoundLayouts(1, LayoutSwitchRule(config, self.predictor))
        self.control = LayoutControl(self.engine, layouts, DEGREES, self.predictor, self.history)
        self.written: list[Decision] = []
        self.samples: dict[int, Sample] = {}

    def run(self, recorded: list[Decision] | None = None, plans: int = 1 << 30) -> None:
        """A round, up to so many plans."""
        self.control.start("all", recorded or (), self.written.append)
        for request in self.requests:
            self.engine.add(request)
        while not self.engine.is_idle and plans:
            self.control.consider()
            for finished in self.engine.step():
                self.samples[finished.request_id] = finished.sample
                self.control.finished(len(finished.sample))
            self.control.note(float(self.engine.counters.plans))
            plans -= 1

    def check(self) -> None:
        for request in self.requests:
            assert_whole(self.samples[request.request_id], request, self.lengths[request.key])
        assert_empty(self.engine)

    @property
    def completions(self) -> list[Completed]:
        return [event for event in self.events if isinstance(event, Completed)]


def fullest(plan: Any) -> int:
    rows: dict[int, int] = {}
    for row in plan.decode:
        rows[row.dp_group] = rows.get(row.dp_group, 0) + 1
    return max(rows.values(), default=1)


LENGTHS = [60, 20, 25, 30, 20, 12, 8, 5, 30, 12, 6, 3]


def test_a_draining_round_goes_up_and_the_next_one_starts_below():
    world = World(LENGTHS)
    world.run()
    ways = [(e.decision.from_tp, e.decision.to_tp) for e in world.control.episodes]
    assert ways[-1][1] == 4
    assert len(ways) >= 1
    metrics = world.control.end(preemptions=0)
    assert metrics["rollout/layout/switches"] == len(ways)
    assert metrics["rollout/layout/final_tp"] == 4
    assert metrics["rollout/layout/cost_s"] == pytest.approx(0.006 * len(ways))
    assert metrics["rollout/layout/predicted_cost_s"] == pytest.approx(0.003 * len(ways))
    assert metrics["rollout/layout/step_s"] == pytest.approx(metrics["rollout/layout/predicted_step_s"], rel=0.02)
    assert metrics["rollout/layout/step_correction"] == pytest.approx(1, abs=0.02)
    world.check()
    assert [decision.switch for decision in world.written if decision.switch] == [
        episode.decision for episode in world.control.episodes
    ]
    picture = world.control.picture()
    assert picture["points"][0][0] == 0
    assert picture["points"][0][2] == 1
    assert picture["points"][-1][2] == 4
    assert [s["to_tp"] for s in picture["switches"]] == [to for _, to in ways]
    assert world.control.start() == world.control.tp == 1, "the way back, with nobody live"


def test_the_predictor_follows_the_machine():
    world = World(LENGTHS, slow=1.5)
    world.run()
    assert 1.2 < world.predictor.ratio(1) < 1.5, "a tenth of the way with every plan"
    metrics = world.control.end(0)
    assert 1 < metrics["rollout/layout/step_correction"] < 1.5


def test_decisions_survive_the_journal():
    world = World(LENGTHS)
    world.run()
    for decision in [*world.written, Decision(3, None), Decision(4, world.written[0].switch, failed=True)]:
        assert Decision.from_json(decision.to_json() | {"step": 3, "kind": "layout", "key": [0, 1]}) == decision
    with pytest.raises(ValueError, match="this version reads schema 1"):
        Decision.from_json({"schema": 0})


@pytest.mark.parametrize("crash", [3, 8, 12, 100])
def test_a_round_that_runs_again_decides_the_same(crash: int):
    """The second run's machine is eight times slower; up to the crash nothing shows of that."""
    first = World(LENGTHS)
    first.run(plans=crash)
    whole = World(LENGTHS)
    whole.run()
    whole.written.insert(1, Decision(whole.written[0].dispatch + 1, None))  # and one that stayed
    for recorded in (first.written, whole.written):
        again = World(LENGTHS, slow=8.0)
        again.run(recorded)
        again.check()
        last = max((d.dispatch for d in recorded), default=-1)
        assert all(decision.dispatch > last for decision in again.written), "what was written is not written twice"
        switched = [e.decision for e in again.control.episodes if e.decision.dispatch <= last]
        assert switched == [d.switch for d in recorded if d.switch]
    assert [e.decision for e in again.control.episodes] == [d.switch for d in whole.written if d.switch]


def test_ends_come_in_the_same_order_again():
    first = World(LENGTHS)
    first.run()
    again = World(LENGTHS, slow=8.0)
    again.run(first.written)
    assert again.completions == first.completions


def with_response(request: Request, length: int) -> Request:
    ones, zeros = (1,) * length, (0.0,) * length
    return replace(
        request,
        generated=ones,
        generated_sampled_logprobs=zeros,
        generated_rollout_logprobs=zeros,
        generated_versions=ones,
    )


def test_expected_lengths_come_from_history():
    world = World(LENGTHS, bound="expected")
    for length in (4, 6, 60):
        world.history.add(length)
    assert world.history.expected_remaining(Progress(with_response(world.requests[0], 5), 0)) == (1 + 55) / 2
    assert world.history.expected_remaining(Progress(with_response(world.requests[0], 60), 0)) is None
    asked: list[float | None] = []
    inner = world.control.layouts.wants

    def wants(now: Any) -> bool:
        asked.extend(row.expected_remaining for rows in now.groups for row in rows)
        return inner(now)

    world.control.layouts.wants = wants  # pyright: ignore[reportAttributeAccessIssue]
    world.run()
    assert asked[0] == (4 + 6 + 60) / 3
    assert any(value is not None and value != asked[0] for value in asked)
    assert len(world.history._lengths) == 3 + len(LENGTHS)
    world.check()


def fail_once(executor: Any, *, usable: bool) -> None:
    """The executor's next switch fails halfway."""
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
    failed = world.control.episodes[0]
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


def test_a_switch_that_leaves_nothing_usable_ends_the_round():
    world = World(LENGTHS)
    fail_once(world.executor, usable=False)
    with pytest.raises(SwitchFailed):
        world.run()


def test_long_rounds_keep_a_short_picture():
    world = World([60, 60])
    world.control.start()
    for i in range(5000):
        world.control.note(float(i))
    points = world.control.picture()["points"]
    assert len(points) <= MAX_TRACE + 1
    assert points[-1][0] == 4999


def test_an_executor_that_cannot_change_is_refused():
    engine, _ = make_engine({})

    class Plain:
        num_groups, num_slots, num_blocks, block_size, max_prefill_tokens = 1, 1, 5, 4, 8

        def check(self, request: Request) -> None: ...
        def submit(self, plan: Any) -> Any: ...
        def collect(self, ticket: Any) -> Any: ...

    plain = Engine(Plain(), engine.batcher.config)
    with pytest.raises(ValueError, match="layout control: Plain cannot change its layout"):
        LayoutControl(plain, RoundLayouts(1), (1,))
