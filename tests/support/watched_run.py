"""The real command, over processes that tell where they are and go wrong as planned: `python watched_run.py train ...`.

As the command it is `jaxrl`, but for what it starts on each host: this program again. There it is `jaxrl` with a
barrier that keeps the process's place in a file, which outlives a SIGKILL, and that looks into a plan.
`JAXRL_WATCHED_RUN` in the environment names the folder of both: `places/<process>`, and `plan.json` with a list of
`Fault`s as objects. `traces/<process>` has all places of all starts, with their times.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

FOLDER, KEEPS = "JAXRL_WATCHED_RUN", "JAXRL_WATCHED_KEEPS"
PLACE_BYTES = 200
COMPILING = "compiling"


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong.

    Attributes:
      process: in which process.
      at: in the first place whose name contains this, or while it compiles.
      do: `sleep S`, `raise`, `exit S`, `signal NAME`, or `skip`: it leaves the next exchange of tokens out.
    """

    process: int
    at: str
    do: str


class Places:
    """Where a process is, behind its number: a few bytes in a file that others read."""

    def __init__(self, file: Path) -> None:
        with file.open("wb") as made:
            made.write(b" " * PLACE_BYTES)
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), PLACE_BYTES)
        trace = file.parents[1] / "traces" / file.name
        trace.parent.mkdir(exist_ok=True)
        self._trace = trace.open("ab", buffering=0)

    def tell(self, place: str) -> None:
        self._trace.write(f"{time.time():.6f} {os.getpid()} {place}\n".encode())
        self._map[:] = f"{os.getpid()} {place}".encode()[:PLACE_BYTES].ljust(PLACE_BYTES)


class Watcher:
    """Hears of every move of this process."""

    def __init__(self, folder: Path, process: int) -> None:
        self._folder, self._process = folder, process
        (folder / "places").mkdir(exist_ok=True)
        self._places = Places(folder / "places" / str(process))
        plan = folder / "plan.json"
        faults = [Fault(**each) for each in json.loads(plan.read_text())] if plan.exists() else []
        self._faults = [each for each in faults if each.process == process]
        self._place = ""
        self.skips = False

    def move(self, place: str) -> None:
        self._place = place
        self._places.tell(place)
        for fault in self._faults:
            if fault.at in place:
                self._faults.remove(fault)
                self._go_wrong(fault.do)
                return

    def compile(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        """Hears of the ends of lowering and of compiling."""
        if event.endswith("/jaxpr_to_mlir_module_duration"):
            before = self._place
            self.move(f"{COMPILING} in {before}")
            self._place = before
        elif event.endswith("/backend_compile_duration"):
            self._places.tell(self._place)

    def _go_wrong(self, what: str) -> None:
        (self._folder / "wrong").write_text(f"{time.time()} {self._process} {self._place} {what}")
        match what.split():
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["raise"]:
                from jaxrl.types import RunFailed

                raise RunFailed("it was told so")
            case ["exit", status]:
                sys.exit(int(status))
            case ["signal", name]:
                os.kill(os.getpid(), signal.Signals[name])
            case ["skip"]:
                self.skips = True


def process(folder: Path, number: int) -> None:
    """This process is one of a run's: jax hears of it, and the run's barrier and exchange are watched."""
    watcher = Watcher(folder, number)
    watcher.move("importing")
    import jax

    from jaxrl.runtime.hosts import process_group, world
    from jaxrl.runtime.hosts.liveness import PhaseBarrier
    from jaxrl.runtime.hosts.liveness.heartbeats import Kind
    from jaxrl.runtime.hosts.tokens import Exchanged, TokenExchange

    class WatchedBarrier(PhaseBarrier):
        def _move(self, name: str, kind: Kind) -> None:
            super()._move(name, kind)
            watcher.move(f"{kind} {name}")

    class SkippedExchange(TokenExchange):
        def exchange(self, samples: Any, owners: Any) -> Exchanged:
            if watcher.skips:
                watcher.skips = False
                return Exchanged()
            return super().exchange(samples, owners)

    if KEEPS in os.environ:
        keep_programs()
    jax.monitoring.register_event_duration_secs_listener(watcher.compile)
    world.PhaseBarrier = WatchedBarrier  # type: ignore[misc]
    process_group.TokenExchange = SkippedExchange  # type: ignore[misc]
    watcher.move("connecting")


def keep_programs() -> None:
    """This process keeps compiled programs like process 0. jax lets only that one write its cache; on CPUs the others'
    programs have other keys, so what they write disturbs nobody. Tests that start a hundred worlds have no time for
    more."""
    from jax._src import compiler, distributed

    write, state = compiler._cache_write, distributed.global_state

    def written(*arguments: Any) -> None:
        own, state.process_id = state.process_id, 0
        try:
            write(*arguments)
        finally:
            state.process_id = own

    compiler._cache_write = written


def command() -> None:
    """This process is the command: what it starts is this program."""
    from jaxrl.runtime.hosts import launch

    launch.launch = partial(launch.launch, program=[str(Path(__file__).resolve())])


def main() -> int:
    from jaxrl.runtime.stop import Stop

    stop = Stop()
    stop.watch()
    folder = Path(os.environ[FOLDER])
    number = os.environ.get("JAXRL_PROCESS_ID")
    if number is None:
        command()
    else:
        process(folder, int(number))
    from jaxrl.cli import main as run

    return run(sys.argv[1:], stop)


if __name__ == "__main__":
    sys.exit(main())
