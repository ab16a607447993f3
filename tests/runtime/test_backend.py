"""The backend over replayed lengths and a pool that answers when it is told to."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from replay_worker import ReplayWorker, ReplayWorkers

from jaxrl.config import from_mapping
from jaxrl.record.journal import Journal
from jaxrl.record.timeline import Timeline
from jaxrl.rewards.tally import VerdictTally
from jaxrl.runtime.backend import RolloutBackend, text_by
from jaxrl.scheduling.rounds.adaptive_timeout import AdaptiveTimeouts, TimeoutRule
from jaxrl.scheduling.rounds.events import (
    Abort,
    AwaitVerdict,
    CancelScore,
    Event,
    Interrupted,
    Launch,
    RoundStarted,
    SampleAborted,
    SampleFinished,
    Score,
    Verdict,
)
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.workers import Workers
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

PARAMS = SamplingParams(max_tokens=40, stop_token_ids=(2,))


def make_prompt(index: int) -> Prompt:
    return Prompt(0, index, (1, 2, index), f"prompt {index}", "test")


def key(p: int, s: int = 0) -> SampleKey:
    return SampleKey(0, p, s)


class Pool:
    """Answers in the order that it is told: `hold` keeps samples back until everything else is answered."""

    def __init__(
        self,
        hold: Sequence[SampleKey] = (),
        bad: dict[SampleKey, str] | None = None,
        outside: dict[SampleKey, tuple[float, dict[str, Any]]] | None = None,
    ) -> None:
        self.hold, self.bad, self.outside, self.is_outside = list(hold), bad or {}, outside or {}, True
        self.submitted: list[SampleKey] = []
        self.limits: dict[SampleKey, tuple[float, ...]] = {}
        self._queue: deque[SampleKey] = deque()
        self._held: list[SampleKey] = []

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        assert sample.text, "scorers get text"
        self.submitted.append(sample.key)
        self.limits[sample.key] = limits_s
        (self._held if sample.key in self.hold else self._queue).append(sample.key)

    def cancel(self, keys: Collection[SampleKey]) -> None:
        self._queue = deque(one for one in self._queue if one not in keys)
        self._held = [one for one in self._held if one not in keys]

    def completed(self) -> list[Verdict]:
        answered = list(reversed(self._queue))  # the latest first
        self._queue.clear()
        return [self._verdict(one) for one in answered]

    def wait(self, timeout_s: float) -> list[Verdict]:
        if not self._queue:
            self._queue.extend(self._held)
            self._held = []
        return self.completed()

    @property
    def num_pending(self) -> int:
        return len(self._queue) + len(self._held)

    def take_metrics(self) -> dict[str, float]:
        return {"reward/num_scored": float(len(self.submitted))}

    def _verdict(self, one: SampleKey) -> Verdict:
        if one in self.outside:
            return Verdict(1.0, one, *self.outside[one][:1], "ok", self.outside[one][1], 0.5, self.is_outside)
        status: Any = self.bad.get(one, "ok")
        if status != "ok":
            return Verdict(1.0, one, 0.0, status, {"error": f"{status} of {one.prompt_index}"})
        return Verdict(1.0, one, one.prompt_index + one.sample_index / 10, "ok", {}, 0.5)


class Bytes:
    """One token per character."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids)


class House:
    """A backend with the parts that it is built on."""

    def __init__(
        self,
        folder: Path,
        lengths: dict[SampleKey, int],
        pool: Pool,
        last_step: int = 0,
        num_workers: int = 1,
        timeouts: AdaptiveTimeouts | None = None,
        tally: VerdictTally | None = None,
    ) -> None:
        self.worker: Any = ReplayWorker(lengths) if num_workers == 1 else ReplayWorkers(lengths, num_workers)
        executors = [self.worker] if num_workers == 1 else self.worker.workers
        engines = [Engine(executor, BatcherConfig(decode_steps=4)) for executor in executors]
        self.engine: Any = engines[0] if num_workers == 1 else Workers(engines)
        self.pool = pool
        self.journal = Journal(folder / "journal.jsonl", last_step)
        self.timeline = Timeline(folder / "timeline.json")
        self.progress: list[tuple[int, ...]] = []
        self.backend = RolloutBackend(
            self.engine,
            self.worker,
            pool,
            text_by(Bytes()),
            lambda: "weights",
            journal=self.journal,
            timeline=self.timeline,
            on_progress=lambda *at: self.progress.append(at),
            timeouts=timeouts,
            tally=tally,
        )

    def close(self) -> None:
        self.journal.close()
        self.timeline.close()

    def run_round(
        self, prompts: Sequence[Prompt], n: int, step: int = 1, kind: str = "plain"
    ) -> tuple[Round, list[Event]]:
        round, events = Round(prompts, n), []
        self.backend.begin(step, PARAMS, kind)
        while not round.done:
            events.append(self.backend.wait())
            for command in round.handle(events[-1]):
                self.backend.apply(command)
        return round, events


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def houses(tmp_path: Path, request: Any) -> Iterator[Any]:
    opened: list[House] = []

    def build(lengths: dict[SampleKey, int], pool: Pool, **more: Any) -> House:
        opened.append(House(tmp_path, lengths, pool, num_workers=request.param, **more))
        opened[-1].backend.enter_rollout(0)
        return opened[-1]

    yield build
    for house in opened:
        house.close()


LENGTHS = {key(p, s): 3 + 7 * ((5 * p + 3 * s) % 4) + s for p in range(5) for s in range(2)}
PROMPTS = [make_prompt(p) for p in range(5)]


def scored(events: Sequence[Event]) -> list[SampleKey]:
    return [event.key for event in events if isinstance(event, Verdict)]


def finished(events: Sequence[Event]) -> list[SampleKey]:
    return [event.sample.key for event in events if isinstance(event, SampleFinished)]


@pytest.mark.parametrize("hold", [[], [key(0)], [key(0), key(1), key(4, 1)], list(LENGTHS)])
def test_verdicts_come_in_the_order_of_completion_however_late(houses: Any, hold: list[SampleKey]):
    house = houses(LENGTHS, Pool(hold=hold))
    round, events = house.run_round(PROMPTS, 2)
    assert isinstance(events[0], RoundStarted)
    assert scored(events) == finished(events)
    assert sorted(finished(events)) == sorted(LENGTHS)
    dispatches = [event.dispatch for event in events if isinstance(event, SampleFinished)]
    assert dispatches == sorted(dispatches)
    for group in round.groups():
        for sample in group.samples:
            assert sample.reward == sample.key.prompt_index + sample.key.sample_index / 10
            assert len(sample) == LENGTHS[sample.key]
            assert sample.text == Bytes().decode(sample.token_ids.tolist())
    metrics = house.backend.end()
    assert metrics["reward/num_scored"] == len(LENGTHS)
    assert metrics["rollout/recompiles"] == metrics["rollout/preemptions"] == 0
    assert 0 < metrics["rollout/bubble_ratio"] < 1
    engines = [house.engine] if isinstance(house.engine, Engine) else house.engine.engines
    assert metrics["rollout/decode_steps"] == sum(engine.counters.steps for engine in engines)
    assert metrics["rollout/prefill_tokens"] == sum(engine.counters.prefill_tokens for engine in engines)
    assert all(engine.counters.plans for engine in engines), "each worker had something to do"
    busy, rows, tokens, done, launched = house.progress[-1]
    assert (busy, rows, done, launched) == (0, 4, len(LENGTHS), len(LENGTHS))
    assert tokens == sum(LENGTHS.values()) - len(LENGTHS), "the first token of each comes from its prefill"


def test_the_same_events_whatever_the_pool_does(houses: Any):
    def told(hold: list[SampleKey]) -> tuple[list[SampleKey], list[SampleKey]]:
        _, events = houses(LENGTHS, Pool(hold=hold)).run_round(PROMPTS, 2)
        return finished(events), scored(events)

    assert told([]) == told(list(LENGTHS)[::3]) == told(list(LENGTHS))


def test_a_verdict_of_the_clock_is_on_the_disk_before_the_round_hears_of_it(houses: Any, tmp_path: Path):
    bad = {key(1): "timeout", key(3, 1): "crash", key(2): "error"}
    house = houses(LENGTHS, Pool(bad=bad))
    round = Round(PROMPTS, 2)
    house.backend.begin(7, PARAMS)
    heard = []
    while not round.done:
        event = house.backend.wait()
        if isinstance(event, Verdict) and event.status in ("timeout", "crash"):
            heard.append(event.key)
            text = (tmp_path / "journal.jsonl").read_text()
            place = f'"key":[0,0,{event.key.prompt_index},{event.key.sample_index},0]'
            assert f'{{"step":7,"kind":"verdict",{place},"status":"{event.status}"' in text
        for command in round.handle(event):
            house.backend.apply(command)
    assert sorted(heard) == [key(1), key(3, 1)]
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 3, "an error is the scorer's own, no clock's"


def test_after_a_crash_the_journal_is_heard_and_the_pool_not_asked(houses: Any):
    bad = {key(1): "timeout", key(3, 1): "crash"}
    first, events = houses(LENGTHS, Pool(bad=bad)).run_round(PROMPTS, 2, step=7)
    again = houses(LENGTHS, Pool(), last_step=6)  # a new process; this time nothing would time out
    second, events_again = again.run_round(PROMPTS, 2, step=7)
    assert not set(again.pool.submitted) & set(bad)
    assert scored(events) == scored(events_again)
    for a, b in zip(first.groups(), second.groups(), strict=True):
        for x, y in zip(a.samples, b.samples, strict=True):
            assert (x.key, x.reward, x.reward_info.get("error")) == (y.key, y.reward, y.reward_info.get("error"))
    counts = again.backend.end()
    assert counts["reward/num_scored"] == len(LENGTHS), "what the journal says counts as it did the first time"
    assert (counts["reward/timeouts"], counts["reward/crashes"]) == (1, 1)
    third = houses(LENGTHS, Pool(), last_step=7)
    third.run_round(PROMPTS, 2, step=8)
    assert sorted(third.pool.submitted) == sorted(LENGTHS), "another step asks anew"


def test_what_something_outside_decided_is_replayed_whole(houses: Any):
    said = {"cut_off": 2, "case_s": [0.5, 2.0, 2.0], "judge": "good", "long": "x" * 10_000}
    outside = {key(1): (0.25, said), key(3, 1): (-1.5, {"outside": True})}
    houses(LENGTHS, Pool(outside=outside)).run_round(PROMPTS, 2, step=7)
    again = houses(LENGTHS, Pool(), last_step=6)  # a new process, in which the scorer would say something else
    _, events = again.run_round(PROMPTS, 2, step=7)
    assert not set(again.pool.submitted) & set(outside)
    heard = {event.key: event for event in events if isinstance(event, Verdict) and event.outside}
    assert {one: verdict.reward for one, verdict in heard.items()} == {key(1): 0.25, key(3, 1): -1.5}
    kept = {name: value for name, value in said.items() if name != "long"}
    assert heard[key(1)].info == kept, "a value that is too long for the journal is not kept"
    counts = again.backend.end()
    assert counts["reward/num_scored"] == len(LENGTHS)
    assert counts["reward/timeouts"] == 0


def test_a_step_that_runs_again_has_the_same_counts_by_domain(houses: Any):
    def counts(house: Any) -> dict[str, float]:
        house.run_round(PROMPTS, 2, step=7)
        found = house.backend.end()
        return {name: value for name, value in found.items() if name.startswith("reward/") and name[-2:] != "_s"}

    reward = {"domains": {"test": {"kind": "math"}, "others": {"kind": "math"}}}
    config = from_mapping({"model": {"path": "x"}, "data": {"answer_key": "answer"}, "reward": reward})
    bad, outside = {key(1): "timeout", key(3, 1): "crash"}, {key(2): (0.25, {"parts": {"tags": 1.0}})}
    first = counts(houses(LENGTHS, Pool(bad=bad, outside=outside), tally=VerdictTally.configured(config)))
    assert (first["reward/test/timeouts"], first["reward/test/crashes"]) == (1, 1)
    assert (first["reward/test/num_scored"], first["reward/others/num_scored"]) == (len(LENGTHS), 0)
    assert first["reward/part/tags/mean"] == 1.0
    again = houses(LENGTHS, Pool(), last_step=6, tally=VerdictTally.configured(config))
    assert counts(again) == first
    assert len(again.pool.submitted) == len(LENGTHS) - 3


def test_time_limits_are_given_and_learned_and_what_they_may_decide_is_journalled(houses: Any, tmp_path: Path):
    def info(seconds: float, cut_off: int = 0) -> tuple[float, dict[str, Any]]:
        correct = not cut_off
        return float(correct), {"case_s": [seconds], "correct": correct, "cut_off": cut_off}

    said = {key(0): info(0.5), key(1): info(10.0), key(2): info(30.0, 1), key(3): info(0.25)}
    house = houses(LENGTHS, Pool(outside=said), timeouts=AdaptiveTimeouts(TimeoutRule()))
    house.pool.is_outside = False  # only what the limits may have decided
    house.run_round(PROMPTS, 2, step=7)
    assert {house.pool.limits[one] for one in said} == {()}, "nothing was known of these prompts"
    entries = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()[1:]]
    journalled = {SampleKey(0, *entry["key"][2:]): entry["info"]["case_s"] for entry in entries}
    assert journalled == {key(1): [10.0], key(2): [30.0]}, "what took less than a second passes under every limit"
    counts = house.backend.end()
    assert (counts["reward/code/cut_off"], counts["reward/code/anchor_s/max"]) == (1.0, 10.0)
    house.run_round(PROMPTS, 2, step=8)
    given = {one.prompt_index: limits for one, limits in house.pool.limits.items() if not one.sample_index}
    assert given == {0: (2.0,), 1: (15.0,), 2: (), 3: (2.0,), 4: ()}
    house.backend.end()
    house.run_round(PROMPTS, 2, step=8, kind="eval")
    assert set(house.pool.limits.values()) == {()}, "an evaluation does not depend on what training has seen"
    assert "reward/code/cut_off" not in house.backend.end()
    again = houses(LENGTHS, Pool(), last_step=6, timeouts=AdaptiveTimeouts(TimeoutRule()))
    again.run_round(PROMPTS, 2, step=7)
    assert not set(again.pool.submitted) & set(journalled)
    assert again.backend.end()["reward/code/anchor_s/max"] == 10.0, "what is replayed teaches as well"


def test_a_journal_of_an_older_version_is_read(houses: Any, tmp_path: Path):
    entry = {"step": 7, "kind": "verdict", "key": [0, 0, 1, 0, 0], "status": "timeout", "error": "no score in time"}
    (tmp_path / "journal.jsonl").write_text('{"journal":1}\n' + json.dumps(entry) + "\n")
    _, events = houses(LENGTHS, Pool(), last_step=6).run_round(PROMPTS, 2, step=7)
    (heard,) = [event for event in events if isinstance(event, Verdict) and event.status != "ok"]
    assert (heard.key, heard.reward, heard.info) == (key(1), 0.0, {"error": "no score in time"})


@pytest.mark.parametrize("between", [(), (8,)], ids=["in turn", "one-step-off"])
def test_an_evaluation_does_not_hear_the_training_rounds_verdicts(houses: Any, between: tuple[int, ...]):
    """Held-out prompts are numbered from 0 in epoch 0, like those of the training set. With one-step-off the training
    round of the next step comes before a step's evaluation."""

    def run(house: House, step: int, kind: str) -> Round:
        round, _ = house.run_round(PROMPTS, 2, step, kind)
        house.backend.end()
        return round

    house = houses(LENGTHS, Pool(bad={key(1): "timeout"}))
    run(house, 7, "plain")
    house.pool.bad, house.pool.submitted = {}, []
    for step in between:
        run(house, step, "plain")
    house.pool.bad, house.pool.submitted = {key(2): "crash"}, []
    evaluation = run(house, 7, "eval")
    assert sorted(house.pool.submitted) == sorted(LENGTHS)
    assert {s.key for g in evaluation.groups() for s in g.samples if s.reward_info} == {key(2)}
    # and after a crash each of the two gets its own again
    again = houses(LENGTHS, Pool(), last_step=6)
    run(again, 7, "plain")
    assert set(LENGTHS) - set(again.pool.submitted) == {key(1)}
    for step in between:
        run(again, step, "plain")
    again.pool.submitted = []
    run(again, 7, "eval")
    assert set(LENGTHS) - set(again.pool.submitted) == {key(2)}


@pytest.mark.parametrize("order", [[(7, "short"), (7, "eval")], [(7, "short"), (8, "long"), (7, "eval"), (8, "eval")]])
def test_layouts_know_an_evaluation_from_the_training_round_of_its_step(houses: Any, order: list[tuple[int, str]]):
    """The place of a layout's decisions in the journal: the step, and 0 for training or 1 for evaluation."""
    house, places = houses(LENGTHS, Pool()), []
    house.backend._layouts = house.backend._plans.layouts = SimpleNamespace(
        begin=lambda *place: places.append(place),
        before_plan=lambda worker: None,
        after_plan=lambda worker: None,
        finished=lambda length: None,
        end=lambda preemptions: {},
        told=list,
    )
    for step, kind in order:
        house.run_round(PROMPTS, 1, step, kind)
        house.backend.end()
    assert places == [(step, int(kind == "eval"), kind) for step, kind in order]


def test_cancel_drops_everything_and_the_next_round_starts_clean(houses: Any):
    house = houses(LENGTHS, Pool(hold=[key(0)], bad={key(2): "timeout"}))
    round = Round(PROMPTS, 2)
    house.backend.begin(1, PARAMS)
    while len(round.ledger.finished) < 4:
        for command in round.handle(house.backend.wait()):
            house.backend.apply(command)
    house.backend.cancel()
    assert house.engine.is_idle
    house.pool.hold = []
    submitted = len(house.pool.submitted)
    round, events = house.run_round(PROMPTS, 2, step=1)
    assert round.done
    assert scored(events) == finished(events)
    assert len(house.pool.submitted) - submitted >= len(LENGTHS) - 1, "a timeout heard before the stop is journalled"
    house.backend.end()


def test_a_stop_is_heard_while_no_event_comes(houses: Any):
    """A response may take as long as all others together: a stop must not wait for its end."""
    house = houses({key(0): 40}, Pool())
    house.backend._interrupted = lambda: len(house.progress) >= 3
    round = Round([PROMPTS[0]], 1)
    house.backend.begin(1, PARAMS)
    for command in round.handle(house.backend.wait()):
        house.backend.apply(command)
    with pytest.raises(Interrupted):
        house.backend.wait()
    assert len(house.progress) == 3, "it ran on after the stop"
    house.backend.cancel()
    assert house.engine.is_idle


def test_a_pool_that_is_asked_for_a_slow_verdict_is_progress(houses: Any):
    house = houses({key(0): 2}, Pool())
    beats, answers = [], iter([[], [], [Verdict(1.0, key(0), 1.0)]])
    house.pool.completed, house.pool.wait = list, lambda timeout_s: next(answers)
    house.backend._beat = lambda: beats.append(1)
    house.run_round([PROMPTS[0]], 1)
    assert len(beats) == 3


def begin(house: House, keys: Sequence[SampleKey], step: int = 1) -> RolloutBackend:
    """A round in which one prompt has been launched."""
    house.backend.begin(step, PARAMS)
    assert isinstance(house.backend.wait(), RoundStarted)
    house.backend.apply(Launch(PROMPTS[0], tuple(keys)))
    return house.backend


def next_finished(backend: RolloutBackend) -> Sample:
    event = backend.wait()
    assert isinstance(event, SampleFinished)
    return event.sample


def next_aborted(backend: RolloutBackend) -> Sample:
    event = backend.wait()
    assert isinstance(event, SampleAborted)
    return event.sample


@pytest.mark.parametrize("houses", [1], indirect=True)  # which plan brings what is that of one
def test_abort_is_told_once_for_each_also_for_those_whose_end_was_still_to_be_told(houses: Any):
    house = houses({key(0, 0): 2, key(0, 1): 2, key(0, 2): 30}, Pool())
    keys = (key(0, 0), key(0, 1), key(0, 2))
    backend = begin(house, keys)
    first = next_finished(backend)
    assert first.key == keys[0]
    backend.apply(Abort(keys[1:]))  # the first of them has finished in the same plan
    untold, running = next_aborted(backend), next_aborted(backend)
    assert [(s.key, s.finish_reason) for s in (untold, running)] == [(k, "abort") for k in keys[1:]]
    assert (len(untold), len(running)) == (2, 5), "the tokens of the plan in flight are not waited for"
    house.engine.drain()
    assert house.engine.is_idle
    backend.apply(Score(PROMPTS[0], first))
    verdict = backend.wait()
    assert isinstance(verdict, Verdict)
    assert verdict.key == keys[0]
    with pytest.raises(RuntimeError, match="nothing is running or being scored"):
        backend.wait()


@pytest.mark.parametrize("keep", [False, True])
def test_a_response_that_ended_untold_is_aborted_without_keep_and_told_with_it(houses: Any, keep: bool):
    keys = (key(0, 0), key(0, 1))
    backend = begin(houses(dict.fromkeys(keys, 3), Pool()), keys)
    assert next_finished(backend).key == keys[0]
    backend.apply(Abort(keys[1:], keep=keep))
    event = backend.wait()
    assert isinstance(event, SampleFinished if keep else SampleAborted)
    assert event.sample.key == keys[1]
    backend.end()


def test_generation_is_over_when_the_last_response_has_been_told(houses: Any):
    """A plan of rows that have all stopped is still in flight; it is no progress."""
    house = houses({key(0, 0): 3}, Pool(hold=[key(0, 0)]))
    backend = begin(house, [key(0, 0)])
    assert backend.generating
    sample = next_finished(backend)
    assert not backend.generating
    assert not house.engine.is_idle
    num_told = len(house.progress)
    backend.apply(Score(PROMPTS[0], sample))
    assert isinstance(backend.wait(), Verdict)
    assert house.engine.is_idle
    assert len(house.progress) == num_told
    backend.apply(Launch(PROMPTS[0], (key(0, 1),)))
    assert backend.generating, "a verdict may make the round go on"
    backend.cancel()
    assert not backend.generating


def test_without_journal_and_timeline_nothing_is_kept_and_nothing_found():
    """A time-out is heard; the same step run again asks anew. Events bear the time of the clock that is given."""
    worker, pool = ReplayWorker(LENGTHS), Pool(bad={key(1): "timeout"})
    times = iter(range(100, 1000))
    engine = Engine(worker, BatcherConfig(decode_steps=4))
    backend = RolloutBackend(engine, worker, pool, text_by(Bytes()), lambda: None, clock=lambda: next(times))
    for bad in ({key(1)}, set()):
        backend.enter_rollout(0)
        backend.begin(7, PARAMS)
        backend._round = 0  # as in a run that starts step 7 again
        round, events = Round(PROMPTS, 2), []
        while not round.done:
            events.append(backend.wait())
            for command in round.handle(events[-1]):
                backend.apply(command)
        backend.end()
        stamps = [event.time_s for event in events if not isinstance(event, Verdict)]
        assert min(stamps) >= 100
        assert stamps == sorted(stamps)
        assert len(set(stamps)) > 2
        assert {e.key for e in events if isinstance(e, Verdict) and e.status == "timeout"} == bad
        pool.bad = {}
    assert sorted(pool.submitted) == sorted(2 * list(LENGTHS))


def test_kept_responses_are_whole_and_go_on_from_their_token_ids(houses: Any):
    house = houses({key(0, 0): 2, key(0, 1): 7, key(0, 2): 30}, Pool())
    keys = (key(0, 0), key(0, 1), key(0, 2))
    backend = begin(house, keys)
    assert next_finished(backend).key == keys[0]
    backend.apply(Abort(keys[1:], keep=True))
    ended = next_finished(backend)
    assert (ended.key, len(ended)) == (keys[1], 7), "it ended in the plan in flight, which was waited for"
    begun = next_aborted(backend)
    kept = 13 if isinstance(house.engine, Workers) else 9  # of several, each has two plans in flight
    assert (begun.key, len(begun), begun.versions.tolist()) == (keys[2], kept, [0] * kept)
    backend.end()

    backend.leave_rollout()
    backend.enter_rollout(1)
    backend.begin(2, PARAMS)
    backend.wait()
    backend.apply(Launch(PROMPTS[0], keys[2:], resumed=(begun,), finished=(ended,)))
    whole = next_finished(backend)
    assert (whole.key, len(whole)) == (keys[2], 30), "the finished one is not run again"
    assert whole.versions.tolist() == [0] * kept + [1] * (30 - kept)
    assert whole.token_ids.tolist()[:kept] == begun.token_ids.tolist()
    assert whole.text == Bytes().decode(whole.token_ids.tolist())
    backend.end()


@pytest.mark.parametrize("houses", [1], indirect=True)  # which plan brings what is that of one
def test_a_verdict_is_awaited_without_a_plan_and_one_that_is_cancelled_never_comes(houses: Any):
    house = houses({key(0, 0): 2, key(0, 1): 3, key(0, 2): 30}, Pool(hold=[key(0, 0)]))
    keys = (key(0, 0), key(0, 1), key(0, 2))
    backend = begin(house, keys)
    for _ in range(2):
        backend.apply(Score(PROMPTS[0], next_finished(backend)))
    backend.apply(AwaitVerdict(keys[0]))
    num_plans = len(house.progress)
    verdict = backend.wait()
    assert isinstance(verdict, Verdict)
    assert verdict.key == keys[0]
    assert len(house.progress) == num_plans, "no plan was made while the verdict was awaited"
    backend.apply(CancelScore(keys[1:2]))  # it has come in and has not been told
    assert next_finished(backend).key == keys[2], "and not the verdict"
    backend.end()


def test_the_verdict_behind_a_cancelled_one_comes(houses: Any):
    house = houses({key(0, 0): 2, key(0, 1): 3}, Pool(hold=[key(0, 0)]))
    keys = (key(0, 0), key(0, 1))
    backend = begin(house, keys)
    samples = [next_finished(backend) for _ in keys]
    for sample in samples:
        backend.apply(Score(PROMPTS[0], sample))
    assert backend._verdicts.completed() == []
    backend.apply(CancelScore(keys[:1]))
    verdict = backend.wait()
    assert isinstance(verdict, Verdict)
    assert verdict.key == keys[1]
    backend.apply(Score(PROMPTS[0], samples[0]))  # asked for again: one verdict follows
    house.pool.hold = []
    verdict = backend.wait()
    assert isinstance(verdict, Verdict)
    assert verdict.key == keys[0]
    with pytest.raises(RuntimeError, match="nothing is running or being scored"):
        backend.wait()
    backend.end()


def test_a_pool_that_loses_a_sample_is_found_out(houses: Any):
    class Leaky(Pool):
        def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
            if sample.key != key(2, 1):
                super().submit(prompt, sample)

    house = houses(LENGTHS, Leaky())
    with pytest.raises(RuntimeError, match=r"pool has lost SampleKey\(.*prompt_index=2, sample_index=1"):
        house.run_round(PROMPTS, 2)


def spans_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of each track of a timeline."""
    events = json.loads((folder / "timeline.json").read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            spans[names[event["tid"]]].append(event)
    return spans


def test_plans_of_two_workers_are_drawn_side_by_side(tmp_path: Path):
    """Each plan on its worker's track, in order and one after another; the two tracks at the same time. A plan takes
    two seconds, and each look at the clock a hundredth."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    house = House(tmp_path, {key(p): 30 for p in range(4)}, Pool(), num_workers=2)
    house.timeline.close()
    (tmp_path / "timeline.json").unlink()
    for executor in house.worker.workers:
        own = executor.collect
        executor.collect = lambda ticket, own=own: (now.__setitem__(0, now[0] + 2), own(ticket))[1]
    with Timeline(tmp_path / "timeline.json", clock=clock) as timeline:
        house.backend = RolloutBackend(
            house.engine, house.worker, house.pool, text_by(Bytes()), lambda: "weights", timeline=timeline
        )
        house.backend.enter_rollout(0)
        house.run_round(PROMPTS[:4], 1)
        house.backend.end()
        assert timeline.open_spans() == []
    spans = spans_of(tmp_path)
    assert set(spans) == {"engine 0", "engine 1"}
    for worker, track in enumerate(("engine 0", "engine 1")):
        drawn, plans = spans[track], house.engine.engines[worker].counters.plans
        assert [span["args"]["index"] for span in drawn] == list(range(plans))
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(drawn))
    assert sum(span["dur"] for own in spans.values() for span in own) > 1.7e6 * now[0], "both at nearly every moment"
    house.close()


def test_weights_that_no_round_has_used_are_not_brought_again(houses: Any):
    """A run compiles its programs with the first ones, and then begins: they come once."""
    house = houses(LENGTHS, Pool())
    first = [("sync", "weights", 0), "allocate"]
    assert house.worker.calls == first
    house.backend.enter_rollout(0)
    assert house.worker.calls == first
    house.run_round(PROMPTS, 2)
    house.backend.end()
    house.backend.enter_rollout(0)
    assert house.worker.calls == [*first, *first], "a round has begun with them"
    house.backend.leave_rollout()
    house.backend.enter_rollout(0)
    assert house.worker.calls == [*first, *first, ("release", True), *first]


def test_memory_phases(houses: Any):
    house = houses(LENGTHS, Pool())
    house.run_round(PROMPTS, 2)
    house.backend.end()
    house.backend.leave_rollout()
    house.backend.leave_rollout()
    house.backend.enter_rollout(1)
    house.backend.enter_rollout(2)
    assert house.worker.calls == [
        ("sync", "weights", 0),
        "allocate",
        ("release", True),
        ("sync", "weights", 1),
        "allocate",
        ("sync", "weights", 2),
        "allocate",  # of what has no pool
    ]
    round, _ = house.run_round(PROMPTS, 2, step=3)
    assert {v for g in round.groups() for s in g.samples for v in s.versions.tolist()} == {2}
