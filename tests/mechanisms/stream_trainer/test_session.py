"""Workers are freed in a round, the stream gets what is certain, and a step that runs again does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl.mechanisms.stream_trainer import FREED, StreamTrainer
from jaxrl.mechanisms.stream_trainer.scale_down import LeftRequest, WorkerLoad
from jaxrl.record.journal import Journal
from jaxrl.scheduling.layouts.relayout import SwitchFailed
from jaxrl.scheduling.layouts.request_migration import MigrationOutcome
from jaxrl.scheduling.mechanism import RoundEnd, RoundInfo, RoundState
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.types import Group, Prompt, Sample, SampleKey, StreamFailed, TrainBatch


class FakeStream:
    """Has room when it is told so."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.has_room, self.calls = log, True, 0
        self.fails_in = ""

    def fail(self, call: str) -> None:
        if call == self.fails_in:
            raise StreamFailed("INTERNAL: a device is gone")

    def open(self) -> None:
        self.fail("open")
        self.log.append("open")

    def give(self, groups: Sequence[Group], step: int) -> None:
        self.fail("give")
        self.log.append((step, [group.prompt.index for group in groups]))
        self.calls += 1

    def poll(self) -> bool:
        self.fail("poll")
        return self.has_room

    def finish(self) -> None:
        self.fail("finish")
        self.has_room = True

    def close(self) -> list[TrainBatch]:
        self.fail("close")
        self.log.append("close")
        return [TrainBatch.of([])] * self.calls

    def abandon(self) -> None:
        self.log.append("abandon")


def engine(load: WorkerLoad) -> Any:
    return SimpleNamespace(load=load, batcher=SimpleNamespace(capacity=SimpleNamespace(num_groups=1)))


class FakeWorkers:
    """Two workers of a dp group each; the second has less to move. `counters`: steps that they have made together."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.num_open, self.counters = log, 2, Counters()
        self.engines = [engine(WorkerLoad((LeftRequest(4, n, 20),), 1000, 8)) for n in (9, 3)]

    def close(self, worker: int, by: Any, leaving: Sequence[int]) -> MigrationOutcome:
        assert worker in leaving
        if by == "broken":
            raise SwitchFailed("tp 1 to 2: no memory for the KV", is_usable=True)
        self.log.append(("close worker", worker))
        self.num_open -= 1
        return MigrationOutcome(1, 1, 7 if by == "migrate" else 0)

    def open(self, worker: int) -> None:
        self.log.append(("open worker", worker))
        self.num_open += 1


class House:
    """A session over fakes; `log` is what happened, in order."""

    def __init__(self, journal: Journal | None = None, by: Any = "recompute", **options: Any) -> None:
        self.log: list[Any] = []
        self.seconds, self.drawn = 100.0, list[Any]()
        self.stream = FakeStream(self.log)
        self.workers: Any = FakeWorkers(self.log)
        self.session = StreamTrainer(
            StreamTrainer.Options(enable=True, **options),
            self.workers,
            {(0,): self.stream, (1,): self.stream},
            lambda freed: self.log.append(("release", tuple(freed))),
            0.5,
            journal,
            tracer=self,
            clock=lambda: self.seconds,
            by=by,
        )
        self.round = RoundState(self.workers, lambda: self.seconds, lambda: None, lambda *_: 0, lambda _: None)
        self.round.requests[SampleKey(0, 0, 0)] = 0
        self.session.attach(self.round)
        self.certain: Callable[[], Sequence[Group]] = tuple

    def complete(self, *span: Any) -> None:
        self.drawn.append(span)

    def counter(self, track: str, **values: float) -> None:
        raise AssertionError("nothing is counted")

    def plan(self, num_steps: int = 100) -> None:
        """A plan of so many steps ends, and the next one comes."""
        self.workers.counters += Counters(steps=num_steps)
        self.session.feed()
        self.session.before_plan(None)

    def begin(self, kind: str = "plain", update: int = 1, *, is_known: bool = True) -> None:
        """A round begins before an update. `is_known`: whether groups of that will be certain in it."""
        certain = (lambda: self.certain()) if is_known else None
        self.session.round_begins(RoundInfo(update, int(kind == "eval"), kind, update, certain))

    def offer(self, certain: Callable[[], Sequence[Group]]) -> None:
        """An event of the round has come; from now on these groups are certain."""
        self.certain = certain
        self.session.look()

    def end(self) -> dict[str, float]:
        return self.session.round_ends(RoundEnd([], None))

    def until_freed(self, kind: str = "plain", update: int = 1) -> None:
        self.begin(kind, update)
        self.free()

    def free(self) -> None:
        self.session.ended([5], 1, 10, is_stopping=False)
        self.session.ended([6], 2, 10, is_stopping=False)


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch):
    """The fake engines have one."""
    monkeypatch.setattr("jaxrl.mechanisms.stream_trainer.scale_down.load_of", lambda engine: engine.load)


def group(index: int, is_scored: bool = True) -> Group:
    """Of 20 tokens: its gradient is taken for 40 steps."""
    whole, real = np.zeros(19, np.int32), np.zeros(19, np.float32)
    sample = Sample(SampleKey(0, index, 0), whole, real, real, whole, "stop", reward=1.0 if is_scored else None)
    return Group(Prompt(0, index, (1,), "", ""), [sample])


def groups(*indices: int, unscored: Sequence[int] = ()) -> list[Group]:
    return [group(index, index not in unscored) for index in sorted((*indices, *unscored))]


FREED_FIRST = [("close worker", 1), ("release", (1,)), "open"]


def test_a_round_with_its_stream():
    house = House()
    session, stream = house.session, house.stream
    house.begin(update=3)
    house.offer(lambda: pytest.fail("asked for nothing"))  # no worker has been freed
    house.free()
    assert house.log == FREED_FIRST
    house.offer(partial(groups, 0, 2))
    session.feed()
    assert house.log == FREED_FIRST, "what is streamed is decided before a plan"
    house.plan(10)
    assert house.log[-1] == (3, [0, 2])
    stream.has_room = False
    house.offer(partial(groups, 0, 2, 4))
    house.offer(partial(groups, 0, 2, 4, 5))
    house.seconds += 4
    house.plan()
    assert len(house.log) == 4
    stream.has_room = True
    session.feed()  # gradients go on between plans
    assert house.log[-1] == (3, [4, 5])
    assert house.drawn == [("gradients 1", "part 1", 100.0, 104.0)]
    stream.has_room = False
    house.seconds += 2
    session.ended([7], 3, 10, is_stopping=False)
    session.ended([8], 5, 10, is_stopping=False)
    measured = house.end()
    assert measured["rollout/scale_down/freed"] == 1
    assert measured["rollout/scale_down/done_share"] == 0.2
    assert measured["rollout/scale_down/moved_tokens"] == 7
    assert measured["rollout/scale_down/hidden_s"] == 6
    house.seconds += 3  # what is left of the second call holds the update up
    assert len(session.close()) == 2
    assert house.log[-2:] == ["close", ("open worker", 1)]
    assert house.drawn[1:] == [("gradients 1", "part 2", 104.0, 109.0)]
    assert session.close() == [], "nothing is open"
    # the next round begins anew, with the lengths of this one
    assert session.state_dict()["lengths"]["plain"].tolist() == [5, 6, 7, 8]
    house.log.clear()
    house.until_freed(update=4)
    assert house.log == FREED_FIRST
    house.offer(partial(groups, 0))
    house.plan()
    assert house.log[-1] == (4, [0])


def test_no_more_prompts_begin_together_than_may():
    """What has begun when the round ends holds up the update. A prompt takes 40 steps, and a plan has a hundred."""
    seen = [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert run(House(max_prompts=2), seen) == [[0, 1], [2], [3, 4], [5]], "2 began at 180, 3 and 4 were there at 200"
    assert run(House(max_prompts=0), seen) == [[0, 1, 2], [3, 4], [5]]
    assert run(House(max_prompts=1), seen) == [[0], [1], [2], [3], [4], [5]]
    assert run(House(max_prompts=1), seen[:2]) == [[0], [1], [2]], "the third of them until 220"


@pytest.mark.parametrize(
    ("kind", "options", "frees"),
    [
        *((kind, {}, True) for kind in ("plain", "long", "partial")),
        *((kind, {}, False) for kind in ("short", "eval")),
        ("short", {"short_rounds": True}, True),
    ],
)
def test_in_which_rounds_workers_are_freed(kind: str, options: dict[str, Any], frees: bool):
    house = House(**options)
    house.until_freed(kind)
    assert (house.log == FREED_FIRST) == frees
    assert ("rollout/scale_down/freed" in house.end()) == (kind != "eval")


def test_looks_at_which_nothing_was_freed_are_counted():
    house = House()
    house.begin()
    engines: Any = house.session._workers.engines
    for num_done, kv_tokens, num_rows in ((2, 10, 8), (4, 1000, 1)):
        engines[:] = [engine(WorkerLoad((LeftRequest(4, 9, 20),), kv_tokens, num_rows))] * 2
        house.session.ended([5, 5], num_done, 10, is_stopping=False)
    measured = house.end()
    assert [measured[f"rollout/scale_down/{name}"] for name in ("freed", "refused_kv", "refused_rows")] == [0, 1, 1]


def test_nothing_is_freed_for_a_round_that_stops():
    house = House()
    house.begin("partial")
    house.session.ended([5, 5, 5], 3, 10, is_stopping=True)
    assert house.log == []
    house.end()
    assert house.session.state_dict()["lengths"]["partial"].tolist() == [5, 5, 5]


def test_a_round_that_is_dropped():
    house = House()
    house.until_freed()
    house.offer(partial(groups, 1))
    house.session.round_cancelled()
    assert house.log[-2:] == ["abandon", ("open worker", 1)]
    house.session.abandon()  # the loop says so too
    assert house.log.count("abandon") == 1
    assert house.session.state_dict()["lengths"] == {}
    house.until_freed()
    house.offer(partial(groups, 1))
    house.plan()
    assert house.log[-1] == (1, [1])


def run(house: House, seen: Sequence[Sequence[int]], *, late: Sequence[Sequence[int]] = (), busy: int = 0) -> list[Any]:
    """A round of step 5, a plan of 100 steps after each time that prompts are certain.

    Args:
      seen: that are certain by then. late: of these, that have no verdict yet.
      busy: plans, from the first on, after which the stream has no room.

    Returns:
      The parts that were given.
    """
    house.until_freed(update=5)
    for number, indices in enumerate(seen):
        house.stream.has_room = number >= busy
        unscored = late[number] if number < len(late) else ()
        house.offer(partial(groups, *(i for i in indices if i not in unscored), unscored=unscored))
        house.plan()
    house.offer(partial(groups, *{i for indices in seen for i in indices}))  # the last verdict
    house.end()
    house.session.close()
    return [entry[1] for entry in house.log if isinstance(entry, tuple) and entry[0] == 5]


@pytest.mark.parametrize(
    ("late", "busy"),
    [((), 1), ((), 9), ([[3], [3, 0], [0, 1]], 0), ([[3], [3, 1, 0], [1, 3, 0, 2]], 9)],
    ids=["busy once", "busy throughout", "late verdicts", "all at the end"],
)
def test_no_clock_decides_the_parts(late: Sequence[Sequence[int]], busy: int):
    seen = [[3], [0, 1, 3], [0, 1, 2, 3]]
    expected = run(House(), seen)
    assert expected == [[3], [0, 1], [2]]
    assert run(House(), seen, late=late, busy=busy) == expected


def test_when_workers_are_freed_is_in_the_journal(tmp_path: Path):
    """Where layouts switch by a clock, the order of ends may differ: the decision stands."""
    file = tmp_path / "journal.jsonl"
    journal = Journal(file, 4)
    house = House(journal)
    house.begin(update=5)
    house.session.ended([5, 5, 5], 3, 10, is_stopping=False)
    assert house.log == FREED_FIRST
    decision = journal.find(5, FREED, ())
    assert decision is not None
    assert (decision["decision"]["num_done"], decision["decision"]["freed"]) == (3, [1])
    journal.close()  # killed here
    again = Journal(file, 4)
    house = House(again)
    house.begin(update=5)
    for num_done in (2, 3, 4):
        assert house.log == ([] if num_done < 4 else FREED_FIRST), num_done
        house.session.ended([5], num_done, 10, is_stopping=False)
    assert house.log == FREED_FIRST
    assert house.end()["rollout/scale_down/freed"] == 1
    again.close()


def test_nothing_is_freed_where_nothing_will_be_offered():
    house = House()
    house.begin(is_known=False)
    house.free()
    assert house.log == []
    house.end()
    assert house.session.close() == []
    house.until_freed(update=2)
    assert house.log == FREED_FIRST


@pytest.mark.parametrize(("by", "copied"), [("recompute", 0), ("migrate", 7)])
def test_how_requests_move_is_up_to_the_builder(by: str, copied: int):
    house = House(by=by)
    house.until_freed()
    assert house.end()["rollout/scale_down/copied_tokens"] == copied


@pytest.mark.parametrize(("counts", "done"), [("samples", 3), ("prompts", 1)])
def test_what_is_counted_may_be_prompts(counts: str, done: int):
    house = House(counts=counts)
    house.begin()
    for index in range(4):
        for number in range(2):
            house.round.launched(SampleKey(0, index, number), 2 * index + number)
    ended = [Sample.empty(SampleKey(0, index, number)) for index, number in ((0, 0), (2, 1), (0, 1))]
    for sample in ended:
        house.round.ended(sample.key)
        house.round.num_finished += 1
    house.session.on_finished(ended, is_stopping=False)
    (decision,) = house.session.decisions
    assert (decision.num_done, decision.num_all) == (done, 8 if counts == "samples" else 4)


def test_the_streamed_share_is_of_the_updates_batch():
    house = House()
    house.stream.close = lambda: [TrainBatch.of(groups(1))]  # type: ignore[method-assign]
    house.until_freed()
    house.end()
    entered: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    assert len(house.session.update_begins(groups(0, 1, 2, 3), phase)) == 1
    assert entered == ["stream"]
    assert house.session.update_ends() == {"actor/streamed_share": 0.25}


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("call", ["open", "give", "poll", "finish", "close"])
def test_a_failure_of_the_stream_ends_the_round(call: str):
    house = House()
    house.stream.fails_in = call

    def play() -> None:
        house.until_freed(update=7)
        house.offer(partial(groups, 1))
        house.plan()
        house.end()
        house.session.close()

    with pytest.raises(Interrupted) as caught:
        play()
    assert str(caught.value) == (
        "step 7: gradients beside the rollout have failed on the devices of workers 1 (INTERNAL: a device is gone): "
        "run again, with trainer.stream.enable off or a lower actor.ppo_max_token_len_per_gpu if the memory was full"
    )
    house.session.round_cancelled()
    assert house.log[-2:] == ["abandon", ("open worker", 1)]
    house.stream.fails_in = ""
    house.log.clear()
    if call in ("finish", "close"):  # the round had ended
        house.session.rule.cancel()
    house.until_freed(update=7)
    house.offer(partial(groups, 1))
    house.plan()
    assert house.log == [*FREED_FIRST, (7, [1])]


def test_kv_that_cannot_be_copied_ends_the_round():
    house = House(by="broken")
    with pytest.raises(Interrupted, match=r"^step 7: tp 1 to 2: no memory for the KV$"):
        house.until_freed(update=7)
    assert house.log == [], "the worker is still open"
    house.session.round_cancelled()
    assert house.log == []
