"""A barrier with a watchdog: all processes enter a global phase together, and when one fails, all end with the same
sentence.

A collective that one process does not enter hangs without a word, and one that another process enters with another
program computes nonsense or aborts. So before each global phase (weight sync, token exchange, update, checkpoint,
compilation) every process comes to the barrier (sentences and metrics call it the gate). It has a timeout, and process
0 opens it only for those that have handled the same stream and dispatched the same programs of all hosts as itself
(`PhaseBarrier.note`: a running digest of each kind), and that are about to enter the same phase.

What else ends a run of several hosts:

- An exception (`PhaseBarrier.failing`): its host publishes a sentence, an exit status and the phase, and every process
  ends with them (`failure_propagation`).
- Silence: process 0 misses those that have not sent where they are for `hosts.heartbeat_s`, and the others miss
  process 0 (`heartbeats`). jax's own heartbeats are set to miss a process `GRACE_S` later: they abort without a
  sentence. It is a thread of Python that tells, so a process in which native code keeps the interpreter's lock for so
  long counts as silent too.
- A stall: a phase, or a wait for others, of more than `hosts.stall_timeout_s` without a `beat`. A process that has
  skipped a program and waits at the next barrier is found at its next heartbeat.

SIGTERM and Ctrl-C are wishes while a run can save: process 0 turns one of any host into a stop at a boundary that all
agree on (`PhaseBarrier.stop_at`). Before that, and the second time, a signal ends its process at once, and all others
with it.

All threads are daemons and none is waited for without a limit, so none of them keeps a process alive.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NoReturn

from jaxrl.runtime.hosts.key_value_store import KeyTaken, KeyValueStore, MissingHosts, StoreFailed
from jaxrl.runtime.hosts.liveness.failure_propagation import End, FailurePropagation, within
from jaxrl.runtime.hosts.liveness.heartbeats import Heartbeats, Kind, Location, grouped, listed, named
from jaxrl.runtime.stop import end as end_process

STREAM = "stream"
"""The kind of digest whose entries are batches of the stream of events."""
GRACE_S = 5.0
"""jax's heartbeats miss a process so much later than ours: what aborts without a sentence comes second."""
_HEARTBEAT_S = 1.0
_HEARTBEATS_PER_S = 512  # that process 0 receives at the most
_LOOK_S = 0.2
_SUSPENDED_LOOKS = 10  # between two looks: this process was suspended, and could not hear the others
_LATER_S = 3.0  # the clock of a wait leaves the sentence to what waits, which knows who is missing
_ASK_S = 1.0  # for reading where all are, before a sentence about it


class PhaseBarrier:
    """What keeps the processes of a run together. With one process it waits for nothing and has no threads.

    Args:
      store: of this process.
      host: the name of its machine.
      heartbeat_s: as `hosts.heartbeat_s`. stall_timeout_s: as `hosts.stall_timeout_s`.
      wish: whether this process was asked to stop (`jaxrl.runtime.stop.Stop`).
      end: ends this process.
      later_s: how much longer than `stall_timeout_s` the clock of a wait lasts.
    """

    def __init__(
        self,
        store: KeyValueStore,
        host: str,
        heartbeat_s: float,
        stall_timeout_s: float,
        wish: Callable[[], bool] = lambda: False,
        end: End = end_process,
        later_s: float = _LATER_S,
    ) -> None:
        self.store, self.host = store, host
        self.heartbeat_s, self.stall_timeout_s = heartbeat_s, stall_timeout_s
        self._wish, self._later_s = wish, later_s
        self._location, self._beat_s = Location("the start", "local", 0, host), time.monotonic()
        self._passed = 0  # barriers
        self._digests: dict[str, tuple[int, Any]] = {}
        self._wished = self._stops = False
        self._boundaries: list[str] = []
        self._closed = threading.Event()
        self._heartbeats = Heartbeats(store, heartbeat_s)
        self._period_s = max(
            min(_HEARTBEAT_S, heartbeat_s / 4, stall_timeout_s / 4), store.num_processes / _HEARTBEATS_PER_S
        )
        self._failures = FailurePropagation(store, end, self._lost)
        watches = (self._exchange_heartbeats, self._watch) if store.num_processes > 1 else ()
        self._threads = [threading.Thread(target=each, name=f"hosts{each.__name__}", daemon=True) for each in watches]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------ where this process is

    def enter(self, phase: str) -> float:
        """Waits until all processes are about to enter `phase`; returns the seconds that it waited.

        Ends the run on all hosts if a process does not come in time, or has handled another stream, dispatched other
        programs or is about to enter another phase than process 0.
        """
        began_s = time.monotonic()
        if self.store.num_processes > 1:
            self._move(f"the gate before {phase}", "gate")
            try:
                self._pass(f"gate/{self._passed + 1}", phase)
            except MissingHosts as missing:
                self._end_without(missing, f"the gate before {phase}")
        self._passed += 1
        self._move(phase, "global")
        return time.monotonic() - began_s

    def _pass(self, key: str, phase: str) -> None:
        """Process 0 writes what a process must have done to pass; whoever finds another thing does not come."""
        store, mine = self.store, self._digest(phase)
        if store.process == 0:
            store.put(key, mine)
        else:
            theirs = store.get(key, self.stall_timeout_s)
            if theirs is None:
                raise MissingHosts(key, (0,), self.stall_timeout_s)
            if theirs != mine:
                self._failures.end_all(self._difference(json.loads(mine), json.loads(theirs)))
        store.barrier(key, self.stall_timeout_s)
        if store.process == 0:  # all are here, so all have read what was written for them before
            for old in (f"gate/{self._passed}", *self._boundaries):
                store.delete(old)
            self._boundaries.clear()

    def leave(self) -> None:
        """The global phase is over for this process; it goes on by itself."""
        self.at(f"the work after {self._location.name}")

    @contextmanager
    def phase(self, name: str) -> Iterator[float]:
        """`enter` and `leave` around a block; gives the seconds waited."""
        yield self.enter(name)
        self.leave()

    def at(self, location: str) -> None:
        """This process works at `location` by itself: no clock runs."""
        self._move(location, "local")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, this process waits for other hosts; `beat` says that something came."""
        before = self._location
        self._move(what, "waiting")
        yield
        self._move(before.name, before.kind)

    @property
    def waits(self) -> bool:
        """Whether this process waits for others now, at a barrier or elsewhere."""
        return self._location.kind in ("gate", "waiting")

    def beat(self) -> None:
        """The phase, or the wait, has made progress. Costs less than 1 µs."""
        self._beat_s = time.monotonic()

    def note(self, kind: str, entry: bytes | str) -> None:
        """Adds to a digest, in the main thread: a batch of the stream (`STREAM`), as it is handled, or the name of a
        program of all hosts (`PROGRAM`), as it is dispatched."""
        count, digest = self._digests.get(kind) or (0, blake2b(digest_size=16))
        data = entry.encode() if isinstance(entry, str) else entry
        digest.update(len(data).to_bytes(8))
        digest.update(data)
        self._digests[kind] = count + 1, digest

    def _move(self, name: str, kind: Kind) -> None:
        self._beat_s = time.monotonic()
        self._location = Location(name, kind, self._passed, self.host)

    def _here(self) -> Location:
        """The location with its counts, from any thread: no entry is added at a barrier, so both fit together."""
        while True:
            location = self._location
            counts = {kind: count for kind, (count, _) in tuple(self._digests.items())}
            if location is self._location:
                return replace(location, counts=counts)

    def _digest(self, phase: str) -> bytes:
        kinds = {kind: [count, digest.hexdigest()] for kind, (count, digest) in sorted(self._digests.items())}
        return json.dumps({"phase": phase, "kinds": kinds}).encode()

    def _difference(self, mine: dict[str, Any], theirs: dict[str, Any]) -> str:
        """A sentence about this process and process 0, which have written different things at a barrier."""
        first = self._fresh().get(0)
        us, them = named(self.store.process, self._location), named(0, first)
        if mine["phase"] != theirs["phase"]:
            return (
                f"{us} and {them} are not in step: at gate {self._passed + 1} one is about to enter {mine['phase']}, "
                f"the other {theirs['phase']}"
            )
        said = []
        for kind in sorted(mine["kinds"] | theirs["kinds"]):
            (here, a), (there, b) = mine["kinds"].get(kind, (0, "")), theirs["kinds"].get(kind, (0, ""))
            if here != there:
                said.append(f"{here} and {there} entries of the {kind}")
            elif a != b:
                said.append(f"{here} entries of the {kind} each, with different contents")
        return f"{us} and {them} are not in step before {mine['phase']}: {', '.join(said)}"

    # ------------------------------------------------------------ stopping together

    @property
    def stop_asked(self) -> bool:
        """Whether this process knows that a host was asked to stop; process 0 receives all within a heartbeat."""
        return self._stops or self._wished or self._wish()

    def stop_at(self, boundary: str) -> bool:
        """Whether the run stops at `boundary`: what process 0 says, the same on every host. A name is used once."""
        store = self.store
        if store.num_processes == 1 or self._stops:
            return self._stops or self._wish()
        key = f"stop/{boundary}"
        if store.process == 0:
            self._stops = self.stop_asked or bool(store.folder("wish"))
            store.put(key, b"1" if self._stops else b"0")
            self._boundaries.append(key)
            return self._stops
        self._post_wish()
        with self.waiting(f"process 0 at {boundary}"):
            said = store.get(key, self.stall_timeout_s)
            if said is None:
                self._end_without(MissingHosts(boundary, (0,), self.stall_timeout_s), boundary)
        self._stops = said == b"1"
        return self._stops

    def _post_wish(self) -> None:
        if self._wish() and not self._wished:
            self._wished = True
            with suppress(KeyTaken):  # by another thread
                self.store.put(f"wish/{self.store.process}", b"")

    # ------------------------------------------------------------ ending together

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An error inside ends the run on all hosts, with the sentence and the exit status that it has on the command
        line. A bug's traceback is shown by its own process. With one process errors just pass."""
        try:
            yield
        except BaseException as error:
            if self.store.num_processes == 1:
                raise
            if isinstance(error, MissingHosts):
                self._end_without(error, self._location.name)
            self._failures.end_all_for(error, self._who_failed())

    def fail(self, sentence: str, status: int = 1) -> NoReturn:
        """Ends the run on all hosts: this process failed, where it is, and why."""
        self._failures.end_all(f"{self._who_failed()}: {sentence}", status)

    def miss(self, process: int, seconds: float) -> NoReturn:
        """Ends the run on all hosts: another one has kept this one waiting for so long, where it is."""
        self._end_without(MissingHosts(self._location.name, (process,), round(seconds, 1)), self._location.name)

    def close(self) -> None:
        """Waits until all processes have come to the end, without an error. Afterwards nobody is watched."""
        if self.store.num_processes == 1:
            return
        self.enter("the end")
        self._closed.set()
        self._failures.close()
        for thread in self._threads:
            thread.join(self._period_s + _LOOK_S + _ASK_S)

    def _who_failed(self) -> str:
        return f"{named(self.store.process, self._location)} failed in {self._location.name}"

    def _end_without(self, missing: MissingHosts, where: str) -> NoReturn:
        """Ends the run because others did not come."""
        locations = self._fresh()
        there = [p for p, location in locations.items() if location.passed >= self._passed and location.kind == "gate"]
        unknown = [p for p in range(self.store.num_processes) if p not in (self.store.process, *there)]
        who = list(missing.processes) or unknown
        self._failures.end_all(
            f"waited {missing.timeout_s:g} s at {where} (hosts.stall_timeout_s) for {listed(who, locations)}"
        )

    def _lost(self, why: str) -> str:
        """A sentence for a process that cannot read the store any more."""
        first = self._heartbeats.last_heard(0)
        return f"the run has lost {listed([0], {0: first} if first else {})}; {why}"

    def _fresh(self) -> dict[int, Location]:
        """Where all are, this process as it knows itself."""
        found = within(_ASK_S, self._heartbeats.fresh) or {}
        return found | {self.store.process: self._here()}

    # ------------------------------------------------------------ threads

    def _exchange_heartbeats(self) -> None:
        """Sends where this process is, receives where others are, and passes a wish to stop on."""
        while not self._closed.is_set():
            try:
                here = self._here()
                self._heartbeats.exchange(here)
                self._post_wish()
                if self.store.process == 0:
                    self._wished = self._wished or bool(self.store.folder("wish"))
                    if (skipped := self._heartbeats.skipped(here)) is not None:
                        self._failures.end_all(skipped)
            except StoreFailed:
                return  # what listens for failures hears it as well
            self._closed.wait(self._period_s)

    def _watch(self) -> None:
        """Looks at clocks alone, so that nothing holds it up."""
        looked_s = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > _SUSPENDED_LOOKS * _LOOK_S:
                self._heartbeats.forgive(looked_s - before_s)
                self._beat_s = min(self._beat_s + looked_s - before_s, looked_s)
            if silent := self._heartbeats.silent():
                locations = {p: location for p in silent if (location := self._heartbeats.last_heard(p)) is not None}
                said = f"silent for {self.heartbeat_s:g} s (hosts.heartbeat_s): {listed(silent, locations)}"
                self._failures.end_all(said, without=tuple(silent))
            location, still_s = self._location, looked_s - self._beat_s
            limit_s = self.stall_timeout_s + (0 if location.kind == "global" else self._later_s)
            if location.kind != "local" and still_s > limit_s:
                self._failures.end_all(
                    f"no progress for {still_s:.3g} s in {location.name} (hosts.stall_timeout_s): "
                    f"{grouped(self._fresh())}"
                )
