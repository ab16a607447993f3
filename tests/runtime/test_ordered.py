"""The events of a round in one order: what other processes send, what is kept of it, and what ends a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from replay_worker import ReplayWorker

from jaxrl.runtime.hosts.notices import Counted, Decided, Failed, Item, LowWatermark, Notice, Scored, Stop
from jaxrl.runtime.ordered import OrderedEvents
from jaxrl.runtime.plans import PlanRunner
from jaxrl.runtime.round_end import Hosts, RoundCounts
from jaxrl.runtime.verdicts import Arrival
from jaxrl.scheduling.mechanism import RoundInfo, UnderWay
from jaxrl.scheduling.rounds.events import Interrupted, RoundStarted, SampleAborted, SampleFinished, Verdict
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.event_merger import AbortResult, Completion, SortKey, WorkerProgress
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.scheduling.tokens.synchronized import SynchronizedWorkers
from jaxrl.types import Prompt, RunFailed, SampleKey, SamplingParams

PROMPT = Prompt(0, 0, (1, 2, 3), "", "test")
PARAMS = SamplingParams(max_tokens=50, stop_token_ids=(1,))


def key(sample: int) -> SampleKey:
    return SampleKey(0, 0, sample)


class Pool:
    """Scores nothing by itself."""

    def __init__(self) -> None:
        self.submitted: list[SampleKey] = []
        self.ready: list[Verdict] = []

    @property
    def num_pending(self) -> int:
        return len(self.ready)

    def submit(self, prompt: Prompt, sample: Any, limits_s: tuple[float, ...] = ()) -> None:
        self.submitted.append(sample.key)

    def cancel(self, keys: Any) -> None: ...

    def completed(self) -> list[Verdict]:
        ready, self.ready = self.ready, []
        return ready

    def wait(self, timeout_s: float) -> list[Verdict]:
        return self.completed()

    def take_metrics(self) -> dict[str, float]:
        return {}


class Wire:
    """A stream whose other end is the test."""

    def __init__(self, process: int) -> None:
        self.process, self.num_processes = process, 2
        self.out: list[Notice | Item] = []
        self.coming: list[Any] = []

    def begin(self) -> None: ...

    def send(self, notice: Notice) -> None:
        self.out.append(notice)

    def publish(self, item: Item) -> None:
        self.out.append(item)

    def pump(self) -> None: ...

    def wait(self, timeout_s: float, process: int | None = None) -> None:
        raise AssertionError("nothing else comes")

    def notices(self) -> list[tuple[int, Notice]]:
        found, self.coming = self.coming, []
        return [(1, notice) for notice in found]

    def next_item(self) -> Item | None:
        return self.coming.pop(0) if self.coming else None

    def take_metrics(self) -> dict[str, float]:
        return {}


class Log:
    """A journal that keeps what was appended."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str, tuple[int, ...], Mapping[str, Any]]] = []

    def find(self, *_: Any) -> None: ...

    def append(self, *entry: Any) -> None:
        self.entries.append(entry)


class Host:
    """One of two processes, with a worker of one row; samples 0, 2, ... go to process 0."""

    def __init__(self, process: int) -> None:
        lengths = {key(i): 5 for i in range(8)}
        engine = Engine(ReplayWorker(lengths, num_slots=4), BatcherConfig(decode_steps=4))
        self.workers = SynchronizedWorkers({process: engine}, 1000, 2, ticks=lambda _, times: times.num_steps)
        self.pool, self.wire, self.log = Pool(), Wire(process), Log()
        log: Any = self.log
        never = lambda *_: pytest.fail("nothing is begun ahead, and nothing goes on")  # noqa: E731
        under_way = UnderWay(self.workers, lambda: 1.0, lambda: None, never, never)
        hosts = Hosts(self.wire, lambda samples, owners: None)
        parts = under_way, PlanRunner(self.workers), self.pool, lambda s: f"{len(s)} tokens"
        self.events = OrderedEvents(*parts, (), log, hosts)
        self.events.begin(RoundInfo(3), 7)
        assert isinstance(self.events.next(), RoundStarted)
        for i in range(4):
            under_way.launched(key(i), i)
            self.events.launch(Request(i, key(i), PROMPT.token_ids, PARAMS), None)

    def run(self) -> None:
        """As far as the worker of this process gets."""
        while (turn := self.workers.turn) is not None:
            if self.workers.makes_plan(turn):
                self.workers.prepare(turn)
            self.workers.step(turn)


def end(request_id: int, tick: int, length: int = 5) -> Completion:
    return Completion(request_id, SortKey(tick, 1, 0, 0, request_id // 2), length, "stop")


def test_process_0_delivers_what_all_have_and_publishes_it():
    host = Host(0)
    host.run()
    assert host.events.next() is None
    host.wire.coming = [WorkerProgress(1, 0, 1003, (end(1, 1003),))]
    event = host.events.next()
    assert isinstance(event, SampleFinished)
    sample = event.sample
    assert (sample.key, len(sample), sample.finish_reason, sample.text) == (key(1), 5, "stop", "")
    assert (sample.versions.tolist(), sample.token_ids.strides, sample.token_ids.tolist()) == ([7] * 5, (0,), [0] * 5)
    host.wire.coming = [WorkerProgress(1, 0, 1009, (end(3, 1009),))]
    own = host.events.next()
    assert isinstance(own, SampleFinished)
    assert (own.sample.key, own.sample.text, own.sample.token_ids.strides) == (key(0), "5 tokens", (4,))
    assert [type(item).__name__ for item in host.wire.out] == ["LowWatermark", "Completion", "Completion"]


def test_a_process_handles_what_is_published():
    host = Host(1)
    host.run()
    assert host.events.next() is None
    (progress,) = host.wire.out
    assert isinstance(progress, WorkerProgress)
    assert [(one.request_id, one.length) for one in progress.completions] == [(1, 5), (3, 5)]
    other = Completion(0, SortKey(1999, 0, 0, 0, 0), 9, "length")
    host.wire.coming = [LowWatermark(900), progress.completions[0], other]
    first, second = host.events.next(), host.events.next()
    assert isinstance(first, SampleFinished)
    assert isinstance(second, SampleFinished)
    assert (first.sample.key, first.sample.text) == (key(1), "5 tokens")
    assert (second.sample.key, len(second.sample), second.sample.finish_reason) == (key(0), 9, "length")
    assert host.workers.low_watermark == 1998
    host.events.abort([key(2), key(3)], keep=True)
    result = host.wire.out[-1]
    assert result == AbortResult(3, 5, "stop", 0), "it had ended by then"
    host.wire.coming = [AbortResult(2, 3, "abort", 4), result]
    aborted, kept = host.events.next(), host.events.next()
    assert isinstance(aborted, SampleAborted)
    assert isinstance(kept, SampleFinished)
    assert (aborted.sample.key, len(aborted.sample), aborted.dispatch) == (key(2), 3, 4)
    assert (kept.sample.key, kept.sample.text) == (key(3), "5 tokens")


def test_a_response_is_scored_where_it_was_drawn_and_a_clocks_verdict_is_journalled_before_it_is_delivered():
    host = Host(0)
    host.run()
    host.wire.coming = [WorkerProgress(1, 0, 1009, (end(1, 1003), end(3, 1009)))]
    for _ in range(4):
        event = host.events.next()
        assert isinstance(event, SampleFinished)
        host.events.score(PROMPT, event.sample)
    assert host.pool.submitted == [key(0), key(2)], "the others are scored in process 1"
    numbers = {host.events._scores[number][0]: number for number in range(4)}
    assert list(numbers) == [key(1), key(0), key(2), key(3)]
    late = Verdict(0.0, key(3), 0.0, "timeout", {"error": "no verdict after 3 s"})
    host.wire.coming = [Scored(numbers[key(3)], Arrival(late, (), True))]
    assert host.events.next() is None, "the verdict on the first is due"
    place = (0, 0, 0, 3, 0)
    assert host.log.entries == [
        (3, "verdict", place, {"status": "timeout", "reward": 0.0, "info": {"error": "no verdict after 3 s"}})
    ]
    host.wire.coming = [Scored(numbers[key(1)], Arrival(Verdict(0.0, key(1), 0.5)))]
    event = host.events.next()
    assert isinstance(event, Verdict)
    assert (event.key, event.reward, event.time_s) == (key(1), 0.5, 1.0)
    with pytest.raises(AssertionError, match="a rule launches at a verdict that it does not await"):
        host.events.launch(Request(9, key(4), PROMPT.token_ids, PARAMS), None)


def test_decisions_of_others_are_journalled_in_order():
    host = Host(0)
    host.wire.coming = [Decided(3, "layout", (0, 5, 1, 2), {"switch": None}), WorkerProgress(1, 0, 1001)]
    assert host.events.next() is None
    assert host.log.entries == [(3, "layout", (0, 5, 1, 2), {"switch": None})]


@pytest.mark.parametrize("why", ["", "worker 3 cannot go on"])
def test_a_stop_is_an_item_of_the_stream(why: str):
    leads, follows = Host(0), Host(1)
    follows.events.ask_stop(why)
    follows.events.ask_stop(why)
    assert [each for each in follows.wire.out if isinstance(each, Stop)] == [Stop(why)], "it asks once"
    assert follows.events.next() is None
    leads.wire.coming = [Stop(why)]
    with pytest.raises(Interrupted, match=f"^{why}$"):
        leads.events.next()
    assert leads.wire.out[-1] == Stop(why)
    follows.wire.coming = [Stop(why)]
    with pytest.raises(Interrupted, match=f"^{why}$"):
        follows.events.next()
    assert (leads.events.stop_agreed, follows.events.stop_agreed) == (True, True)


def test_a_failure_ends_all():
    leads, follows = Host(0), Host(1)
    leads.wire.coming = [Failed(1, "ValueError: no")]
    with pytest.raises(RunFailed, match="host 1: ValueError: no"):
        leads.events.next()
    follows.wire.coming = [leads.wire.out[-1]]
    with pytest.raises(RunFailed, match="host 1: ValueError: no"):
        follows.events.next()


def test_a_round_ends_with_what_all_have_counted_and_a_stop_that_came_meanwhile():
    leads, follows = Host(0), Host(1)
    for host in (leads, follows):
        host.events.cancel()
        host.events.begin(RoundInfo(3), 8)
    one, other = (RoundCounts([Counters(plans=n)], n, {"reward/busy_s": 0.5}, {"layouts": n}) for n in (1, 2))
    leads.wire.coming = [Stop(), Counted([other.written()])]
    leads.wire.wait = lambda *_: None  # type: ignore[method-assign]
    assert leads.events.end(one) == [one, other]
    assert leads.wire.out[-1] == Counted([one.written(), other.written()], stops=True)
    follows.wire.coming = [leads.wire.out[-1]]
    assert follows.events.end(other) == [one, other]
    assert (leads.events.stop_agreed, follows.events.stop_agreed) == (True, True)


def test_a_pool_that_loses_a_sample_is_found_out():
    host = Host(0)
    host.run()
    host.wire.coming = [WorkerProgress(1, 0, 1009, (end(1, 1003), end(3, 1009)))]
    for _ in range(4):
        event = host.events.next()
        assert isinstance(event, SampleFinished)
        if event.sample.key == key(0):
            host.events.score(PROMPT, event.sample)
    assert host.events.next() is None
    with pytest.raises(RuntimeError, match=r"step 3: the reward pool has lost SampleKey\(.*sample_index=0"):
        host.events.wait(0.1)
