"""The barrier, the heartbeats and the common end, with threads for processes. `test_world.py` has real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from stores import Ended, Hosts

from jaxrl.config import ConfigError
from jaxrl.runtime.hosts.key_value_store import Disagreement, MemoryStore
from jaxrl.runtime.hosts.liveness import PROGRAM, STREAM, PhaseBarrier
from jaxrl.runtime.hosts.liveness.heartbeats import Location, grouped, listed
from jaxrl.types import RunFailed


@pytest.fixture
def made() -> Iterator[list[Hosts]]:
    hosts: list[Hosts] = []
    yield hosts
    for each in hosts:
        each.close()


@pytest.fixture
def host_world(made: list[Hosts]):
    def make(**options: Any) -> Hosts:
        made.append(Hosts(**options))
        return made[-1]

    return make


def test_all_enter_together(host_world):
    hosts, came_s, entered_s = host_world(num=3), {}, {}

    def does(barrier: PhaseBarrier) -> float:
        me = barrier.store.process
        time.sleep(0.4 if me == 1 else 0)
        came_s[me] = time.monotonic()
        with barrier.phase("update") as waited_s:
            entered_s[me] = time.monotonic()
        return waited_s

    waited = hosts.run(does)
    assert min(entered_s.values()) >= max(came_s.values())
    for me in range(3):
        assert waited[me] == pytest.approx(entered_s[me] - came_s[me], abs=0.1)
    assert waited[0] > 0.3


def test_what_is_written_is_removed(host_world):
    """A long run leaves no more on the store than a short one."""
    hosts = host_world()

    def does(barrier: PhaseBarrier) -> None:
        for i in range(20):
            assert not barrier.stop_at(f"step {i}")
            barrier.enter("update")

    hosts.run(does)
    keys = [key for key in hosts.stores[0]._shared.values if key.startswith(("gate", "stop"))]
    assert keys == ["gate/20"]


UPDATES = ("update", "update")


@pytest.mark.parametrize(
    ("notes", "phases", "words"),
    [
        (
            ([(STREAM, "a"), (STREAM, "b")], [(STREAM, "a")]),
            UPDATES,
            "process 1 (host-b) and process 0 (host-a) are not in step before update: 1 and 2 entries of the stream",
        ),
        (
            ([(STREAM, "ab"), (STREAM, "c")], [(STREAM, "a"), (STREAM, "bc")]),
            UPDATES,
            "2 entries of the stream each, with different contents",
        ),
        (
            ([(PROGRAM, "sync"), (STREAM, "a")], [(STREAM, "b")]),
            UPDATES,
            "before update: 0 and 1 entries of the program, 1 entries of the stream each, with different contents",
        ),
        (
            ([], []),
            ("update", "checkpoint"),
            "process 1 (host-b) and process 0 (host-a) are not in step: at gate 1 one is about to enter checkpoint, "
            "the other update",
        ),
    ],
    ids=["shorter", "other-cuts", "two-kinds", "other-phase"],
)
def test_who_is_not_in_step_does_not_pass(host_world, notes, phases, words):
    hosts = host_world(num=2)
    passed: list[int] = []

    def does(barrier: PhaseBarrier) -> None:
        me = barrier.store.process
        enter_with(barrier, notes[me], phases[me])
        passed.append(me)

    hosts.run(does)
    end = hosts.all_ended()
    assert words in end.sentence
    assert (end.status, passed) == (1, [])


def enter_with(barrier: PhaseBarrier, notes: Sequence[tuple[str, str]], phase: str = "update") -> None:
    for kind, entry in notes:
        barrier.note(kind, entry)
    barrier.enter(phase)


def test_equal_notes_pass(host_world):
    hosts = host_world(num=3)
    for notes in ([(STREAM, "a"), (PROGRAM, "sync")], [(STREAM, "b")]):
        hosts.run(partial(enter_with, notes=notes))
    assert hosts.ends == {}


def test_who_does_not_come_is_named(host_world):
    hosts = host_world(num=4, stall_timeout_s=1.0)

    def does(barrier: PhaseBarrier) -> None:
        barrier.enter("weight sync")
        barrier.leave()
        barrier.at("rollout")
        if barrier.store.process in (1, 2):
            time.sleep(30)
        barrier.enter("update")

    began_s = time.monotonic()
    hosts.run(does)
    end = hosts.all_ended()
    assert end.sentence == (
        "waited 1 s at the gate before update (hosts.stall_timeout_s) for process 1 (host-b), last heard in rollout; "
        "process 2 (host-c), last heard in rollout"
    )
    assert end.status == 1
    assert 1.0 < max(each.at_s for each in hosts.ends.values()) - began_s < 8.0


def test_process_0_does_not_come(host_world):
    hosts = host_world(num=3, stall_timeout_s=0.5)
    hosts.run(
        [
            lambda barrier: time.sleep(20),
            lambda barrier: barrier.enter("update"),
            lambda barrier: barrier.enter("update"),
        ]
    )
    assert "for process 0 (host-a), last heard in the start" in hosts.all_ended().sentence


@pytest.mark.parametrize("skips", [0, 1])
def test_a_skipped_program_is_found_at_once(host_world, skips: int):
    """The others' collective would not end before the time of a stall."""
    hosts = host_world(num=2, stall_timeout_s=2.0)
    hosts.barriers[0].stall_timeout_s = hosts.barriers[1].stall_timeout_s = 30.0  # heartbeats come as often as with 2 s

    def does(barrier: PhaseBarrier) -> None:
        barrier.enter("update")
        barrier.note(PROGRAM, "forward")
        if barrier.store.process != skips:
            barrier.note(PROGRAM, "backward")
            time.sleep(20)  # in the collective
        barrier.leave()
        barrier.enter("checkpoint")

    began_s = time.monotonic()
    hosts.run(does)
    skipped, other = ("a", "b") if skips == 0 else ("b", "a")
    assert hosts.all_ended().sentence == (
        f"process {skips} (host-{skipped}) has skipped a program of all hosts: it is at the gate before checkpoint and "
        f"has dispatched 1, while process {1 - skips} (host-{other}) is in update and has dispatched 2"
    )
    assert time.monotonic() - began_s < 15


ERRORS: list[tuple[Callable[[], BaseException], str, int]] = [
    (lambda: ConfigError("rollout.n must be 1"), "process {} ({}) failed in update: rollout.n must be 1", 2),
    (lambda: RunFailed("no space\nleft"), "process {} ({}) failed in update: no space left", 1),
    (lambda: Disagreement("they differ"), "they differ", 2),
    (KeyboardInterrupt, "process {} ({}) failed in update: interrupted", 130),
    (lambda: SystemExit(3), "process {} ({}) failed in update: ended with status 3", 3),
    (lambda: KeyError("x"), "process {} ({}) failed in update: KeyError: 'x' (a bug; its traceback is in", 1),
]


def test_an_error_ends_all_alike(made: list[Hosts], capsys):
    """Every kind of error, of process 0 or of another one: a world for each, all at the same time."""

    def check(process: int, error: Callable[[], BaseException], said: str, status: int) -> None:
        hosts = Hosts(num=3)
        made.append(hosts)

        def does(barrier: PhaseBarrier) -> None:
            with barrier.failing():
                barrier.enter("update")
                if barrier.store.process == process:
                    raise error()
                barrier.enter("checkpoint")

        began_s = time.monotonic()
        hosts.run(does)
        end = hosts.all_ended()
        assert end.sentence.startswith(said.format(process, f"host-{'ab'[process]}"))
        assert end.status == status
        assert max(each.at_s for each in hosts.ends.values()) - began_s < 5
        late_s = hosts.ends[0].at_s - max(hosts.ends[1].at_s, hosts.ends[2].at_s)
        assert late_s > 0.1, "the board went before the others"

    cases = [(process, *case) for process in (0, 1) for case in ERRORS]
    with ThreadPoolExecutor(len(cases)) as threads:
        for done in [threads.submit(check, *case) for case in cases]:
            done.result()
    assert capsys.readouterr().err.count("Traceback") == 2, "of the bugs alone"


def test_the_first_failure_counts(host_world):
    hosts = host_world(num=4)

    def does(barrier: PhaseBarrier) -> None:
        barrier.at("rollout")
        barrier.fail(f"cause {barrier.store.process}")

    hosts.run(does)
    assert "failed in rollout: cause " in hosts.all_ended().sentence


def test_a_stop_is_for_all(host_world):
    """The wish of one host at any moment: the same boundary for all, and none before it."""
    hosts = host_world(num=3)
    answers: dict[int, list[bool]] = {0: [], 1: [], 2: []}

    def does(barrier: PhaseBarrier) -> None:
        me = barrier.store.process
        for step in range(40):
            if (me, step) == (2, 15):
                hosts.wishes.add(2)
            answers[me].append(barrier.stop_at(f"step {step}"))
            if answers[me][-1]:
                assert barrier.stop_at("once more")
                assert barrier.stop_asked
                return
            barrier.enter("update")
            time.sleep(0.001 * me)

    hosts.run(does)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][-1]
    assert 15 < len(answers[0]) < 40


def test_process_0_hears_of_a_wish_by_itself(host_world):
    hosts = host_world(num=2, stall_timeout_s=1.0)
    hosts.wishes.add(1)
    until_s = time.monotonic() + 20
    while not hosts.barriers[0].stop_asked:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_phase_that_hangs_ends(host_world):
    hosts = host_world(num=3, stall_timeout_s=0.6)

    def does(barrier: PhaseBarrier) -> None:
        barrier.enter("update")
        if barrier.store.process == 1:
            barrier.at("nowhere")
        time.sleep(20)

    hosts.run(does)
    said = hosts.all_ended().sentence
    assert said.startswith("no progress for 0.")
    assert (
        "in update (hosts.stall_timeout_s): process 1 (host-b) in nowhere; process 0 (host-a) and 1 more in up" in said
    )


def test_a_wait_that_is_too_long_ends(host_world):
    hosts = host_world(num=2, stall_timeout_s=0.3, later_s=0.2)

    def does(barrier: PhaseBarrier) -> None:
        barrier.at("rollout")
        if barrier.store.process == 1:
            with barrier.waiting("events"):
                time.sleep(20)
        time.sleep(20)

    hosts.run(does)
    assert "in events (hosts.stall_timeout_s): process 0 (host-a) in rollout" in hosts.all_ended().sentence


def test_progress_is_no_stall(host_world):
    hosts = host_world(num=2, stall_timeout_s=0.5)

    def does(barrier: PhaseBarrier) -> None:
        barrier.enter("update")
        for _ in range(7):
            time.sleep(0.1)
            barrier.beat()
        barrier.leave()
        time.sleep(0.7)  # at work by itself
        barrier.enter("checkpoint")

    assert hosts.run(does) == {0: None, 1: None}


class Freezing:
    """A store of a process that is suspended on demand: its calls do not return."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self.frozen = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            if self.frozen.is_set():
                time.sleep(60)
            return found(*arguments)

        return call


def ended(hosts: Hosts, process: int) -> Ended:
    """How another process has ended, once it has."""
    until_s = time.monotonic() + 20
    while process not in hosts.ends:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return hosts.ends[process]


def test_a_silent_process_is_named(host_world):
    hosts = host_world(num=3, heartbeat_s=1.0, wrap=Freezing)

    def does(barrier: PhaseBarrier) -> None:
        barrier.at("rollout")
        time.sleep(0.6)  # until it was heard there
        if barrier.store.process == 1:
            hosts.barriers[1]._closed.set()  # its threads stand still as well
            hosts.stores[1].frozen.set()
            hosts.ends[1] = ended(hosts, 0)
        time.sleep(20)

    hosts.run(does)
    assert hosts.all_ended().sentence == (
        "silent for 1 s (hosts.heartbeat_s): process 1 (host-b), last heard in rollout"
    )


def test_process_0_is_silent(host_world):
    """Its store goes with it: nobody can be told, and each says the same by itself."""
    hosts = host_world(num=3, heartbeat_s=1.0, wrap=Freezing)

    def does(barrier: PhaseBarrier) -> None:
        barrier.at("rollout")
        time.sleep(0.6)
        for store in hosts.stores:  # nobody gets an answer
            store.frozen.set()
        if barrier.store.process == 0:
            barrier._closed.set()
            hosts.ends[0] = ended(hosts, 1)
        time.sleep(20)

    hosts.run(does)
    assert hosts.all_ended().sentence == (
        "silent for 1 s (hosts.heartbeat_s): process 0 (host-a), last heard in rollout"
    )


def test_nothing_is_left_after_a_close(made):
    hosts = Hosts(num=2)
    mine = [thread for barrier in hosts.barriers for thread in (*barrier._threads, barrier._failures._listener)]
    assert all(thread.is_alive() and thread.daemon for thread in mine)
    hosts.run(PhaseBarrier.close)
    assert not any(thread.is_alive() for thread in mine)


def test_one_process_waits_for_nothing():
    wishes: list[bool] = []
    before = threading.active_count()
    barrier = PhaseBarrier(MemoryStore(), "here", 1.0, 1.0, lambda: bool(wishes))
    assert threading.active_count() == before
    barrier.note(STREAM, b"a")
    with barrier.phase("update") as waited_s:
        assert waited_s < 0.1
    assert not barrier.stop_at("step 1")
    wishes.append(True)
    assert barrier.stop_at("step 2")
    with pytest.raises(ConfigError, match="mine"), barrier.failing():
        raise ConfigError("mine")
    barrier.close()


def test_sentences_stay_short():
    places = {i: Location("update", "global", 1, f"host-{i}") for i in range(100)}
    assert listed(list(range(100)), places).endswith("process 3 (host-3), last heard in update; and 96 more")
    assert listed([7], {}) == "process 7, never heard"
    assert grouped(places | {50: Location("rollout", "local", 0, "slow")}) == (
        "process 50 (slow) in rollout; process 0 (host-0) and 98 more in update"
    )


def test_who_is_behind_is_named():
    """All are in the same phase, and one of them has not dispatched what the others wait in."""
    places = {i: Location("update", "global", 4, f"host-{i}", {"program": 9 - 2 * (i == 2)}) for i in range(4)}
    assert grouped(places) == "process 2 (host-2) in update, 2 programs behind; process 0 (host-0) and 2 more in update"
