"""Launching: the command that starts a run's processes, watches them, and starts them again when one dies.

The launcher is this command itself, with `hosts.launcher` local or ray. It never loads jax. On each host it has an
agent (`jaxrl.processes.process_supervisor`), which starts the ordinary command with `hosts.launcher=none`; a **world**
is one such start of all of them. What becomes of the run when a process ends is `restarts`' to say. At the first death
all others are killed at once, and a new world begins, with new agents, another port, and the last checkpoint.

What processes find in their environment: `PROCESS_ID` and, where they are several, `COORDINATOR` (`environment`).

Process 0 owns the terminal: on this machine it writes to the launcher's own streams, so that it has its live view; from
another one its output is passed on as it comes. The others write to `hosts/<process>.log` in the run directory.

A signal to the launcher, or SIGTERM to an agent, is passed on to process 0 (`jaxrl.runtime.stop.WISH`), which stops the
run at a boundary. A second one to the launcher ends it at once, and with it everything.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.config.hosts import HostsSection
from jaxrl.processes.process_supervisor import Start, newest_checkpoint
from jaxrl.record.files import refuse_folder
from jaxrl.record.run_dir import RUN_FILE, cut_to, remove_empty, sizes_of
from jaxrl.runtime.hosts.environment import COORDINATOR, PROCESS_ID
from jaxrl.runtime.hosts.local_agents import Agents, Asked, Event, LocalAgents, Note, Output, Ready, Saved
from jaxrl.runtime.hosts.local_devices import environments
from jaxrl.runtime.hosts.restarts import Again, End, Ended, Lost, Over, Refused, Restarts, described, signal_of
from jaxrl.runtime.stop import WISH, WORDS, Stop

LOGS = "hosts"
"""The folder in the run directory that has the logs of all processes but 0."""
READY_S = 120.0
"""For agents to say that they are there, beyond the time in which they are placed."""
_LOOK_EVERY_S = 0.1
_SHOW_CURSOR = b"\x1b[?25h"  # a live view that was killed has hidden it
_SUMMARY = "jaxrl: "  # how the last line of a command that could not go on begins


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started on every host.

    Attributes:
      arguments: of Python, but for the process's number.
      run_dir: whose checkpoints count as progress, and which has the logs; None: the command has none.
      environments: what each process gets on this machine.
    """

    hosts: HostsSection
    arguments: tuple[str, ...]
    run_dir: Path | None
    environments: tuple[Mapping[str, str], ...]

    def start(self, process: int, coordinator: str, world: int) -> Start:
        """What is sent to agent `process` in world number `world`, from 0."""
        log = "" if self.run_dir is None or process == 0 else str(self.run_dir / LOGS / f"{process}.log")
        own = {PROCESS_ID: str(process)}
        if self.hosts.num > 1:  # one process alone needs no world, and computes faster without
            own[COORDINATOR] = coordinator
        given = self.environments[process]
        # after a death the lock may be held for a while, where it is on a file server
        lock = str(self.run_dir / ".lock") if world and process == 0 and self.run_dir is not None else ""
        relay = bool(process) and not log
        return Start([*self.arguments], {**given, **own}, os.getcwd(), log=log, relay=relay, lock=lock)


def launch(
    config: Config,
    arguments: Sequence[str],
    stop: Stop,
    *,
    writes: bool = True,
    program: Sequence[str] = ("-m", "jaxrl"),
) -> int:
    """Runs `jaxrl` with `arguments` on every host until it is done; returns the exit status.

    Args:
      arguments: a command and its own; options on top of its file stand last, and `hosts.launcher=none` is added.
      writes: whether the command writes to `trainer.run_dir`; what other hosts print is then kept there, else dropped.
      program: what Python runs; another one in tests.

    Raises:
      ValueError: there are not enough devices, or no cluster.
      RunFailed: hosts that were there are gone.
    """
    hosts = config.hosts
    assert hosts.launcher == "local"
    run_dir = refuse_folder(config.trainer.run_dir, "trainer.run_dir") if writes else None
    command = (*_safe_path(), *program, *arguments, "hosts.launcher=none")
    place = "" if run_dir is None else str(run_dir)
    what = Launch(hosts, command, run_dir, tuple(environments(hosts, os.environ)))
    return Launcher(what, lambda _: LocalAgents(hosts, place), stop).run()


def _safe_path() -> list[str]:
    """`-P` unless this process looks for modules in the working folder itself."""
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


class Launcher:
    """The launcher's loop.

    Args:
      agents: makes the agents of a world, given its number from 0.
    """

    def __init__(
        self,
        what: Launch,
        agents: Callable[[int], Agents],
        stop: Stop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._open, self._stop, self._clock = what, agents, stop, clock
        hosts = what.hosts
        self._restarts = Restarts(hosts.num, hosts.max_restarts, hosts.stall_timeout_s)
        self._restore = _restorer(what)

    def run(self) -> int:
        """Returns the exit status. Raises ValueError or RunFailed where the hosts are not to be had."""
        self._stop.save_first(lambda text: None)  # process 0 has the words for it
        world = 0
        while True:
            began_s = self._clock()
            agents = self._open(world)
            try:
                decision = _World(self._what, agents, self._restarts, self._stop, self._clock, world).run()
            finally:
                lived_s = self._clock() - began_s
                agents.close()
            match decision:
                case Over():
                    self._end(decision)
                    return decision.status
                case Again(cause, number):
                    self._show_end(cause)
                    kept = self._restarts.newest
                    source = "the beginning" if kept is None else f"the checkpoint of step {kept}"
                    say(
                        f"{described(cause)} after {lived_s:.0f} s; all are started again from {source} (restart "
                        f"{number} of {self._what.hosts.max_restarts} without a checkpoint in between)"
                    )
            world += 1

    def _end(self, over: Over) -> None:
        if over.cause is not None:
            self._show_end(over.cause)
        if over.sentence:
            say(over.sentence)
        if over.status == 2:
            self._restore()

    def _show_end(self, cause: End) -> None:
        """The last words of a process that the terminal has not seen."""
        _show_cursor()
        if isinstance(cause, Refused):
            say(described(cause))
        if not isinstance(cause, Ended) or cause.process == 0 or not cause.tail:
            return
        last = cause.tail[-1]
        if signal_of(cause.status) is None and last.startswith(_SUMMARY):
            say(f"host {cause.process}: {last.removeprefix(_SUMMARY)}")
            return
        for line in cause.tail:
            print(f"[host {cause.process}] {line}", file=sys.stderr)
        if signal_of(cause.status) is None:
            say(described(cause))


class _World:
    """One start of all processes, until all are to be ended."""

    def __init__(
        self,
        what: Launch,
        agents: Agents,
        restarts: Restarts,
        stop: Stop,
        clock: Callable[[], float],
        world: int,
    ) -> None:
        self._what, self._agents, self._restarts = what, agents, restarts
        self._stop, self._clock, self._world = stop, clock, world
        self._ready: dict[int, Ready] = {}
        self._asked = self._passed_on = False
        self._began_s = clock()

    def run(self) -> Again | Over:
        self._restarts.begin()
        while True:
            for event in self._agents.events(_LOOK_EVERY_S):
                self._take(event)
            if (self._stop() or self._asked) and not self._passed_on:
                number = self._stop.number or signal.SIGTERM
                if not self._is_started:
                    say(WORDS[number])
                    return Over(128 + number)
                self._passed_on = True
                self._restarts.ask(number)
                self._agents.signal(0, WISH)
            self._overdue()
            decision = self._restarts.decide(self._clock())
            if decision is not None:
                return decision

    def _overdue(self) -> None:
        """Agents that do not come are lost: whoever places them ends with a sentence before that."""
        if not self._is_started and self._clock() - self._began_s > self._what.hosts.stall_timeout_s + READY_S:
            for process in set(range(self._what.hosts.num)) - self._ready.keys():
                self._restarts.take(Lost(process, "its agent did not start"), self._clock())

    @property
    def _is_started(self) -> bool:
        return len(self._ready) == self._what.hosts.num

    def _take(self, event: Event) -> None:
        match event:
            case Ready():
                self._ready[event.process] = event
                if event.checkpoint is not None:
                    self._restarts.saved(event.checkpoint)
                if self._is_started:
                    self._start()
            case Saved(step):
                self._restarts.saved(step)
            case Asked():
                self._asked = True
            case Output(process, stream, data):
                if process == 0:
                    _write(stream, data)
            case Note(text):
                say(text)
            case Ended() | Lost() | Refused():
                run_dir = self._what.run_dir
                step = None if run_dir is None else newest_checkpoint(str(run_dir))
                if step is not None:  # an agent that is lost has not sent one that has just come
                    self._restarts.saved(step)
                self._restarts.take(event, self._clock())

    def _start(self) -> None:
        first = self._ready[0]
        address = f"[{first.address}]" if ":" in first.address else first.address
        for process in range(self._what.hosts.num):
            self._agents.start(process, self._what.start(process, f"{address}:{first.port}", self._world))


def _restorer(what: Launch) -> Callable[[], None]:
    """A function that leaves the run directory as it is now, for a run that is refused; one that has begun stays."""
    if what.run_dir is None:
        return lambda: None
    logs, record = what.run_dir / LOGS, what.run_dir / RUN_FILE
    made = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    sizes, written_ns = sizes_of([logs / f"{process}.log" for process in range(1, what.hosts.num)]), _written_ns(record)

    def restore() -> None:
        if _written_ns(record) == written_ns:
            with suppress(OSError):
                cut_to(sizes)
            remove_empty(made)

    return restore


def _written_ns(file: Path) -> int | None:
    """When a file was last written; None: there is none."""
    with suppress(OSError):
        return file.stat().st_mtime_ns
    return None


def say(text: str) -> None:
    print(f"jaxrl: {text}", file=sys.stderr, flush=True)


def _show_cursor() -> None:
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)


def _write(stream: int, data: bytes) -> None:
    """Passes output on as it is; what cannot be written (its reader has gone) is dropped."""
    view: Any = memoryview(data)
    with suppress(OSError):
        while view:
            view = view[os.write(stream, view) :]
