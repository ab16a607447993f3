"""Processes of one run as threads of which one runs at a time: who goes on next is drawn, so every order can be tried.

`Baton` is the switch. `SharedStore` is the store in memory: reading and writing are places where another process may go
on. `HostsInStep` is a simulated run on several hosts, each with its part of the workers and a clock of its own; plans
and verdicts of each take as many turns as are drawn.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sim_machine import SMALL
from simulated_runs import Metrics

from jaxrl.config import Config
from jaxrl.loop import Hooks
from jaxrl.record.state import dump_state, load_state
from jaxrl.runtime.hosts.event_stream import EventStream
from jaxrl.runtime.round_end import Hosts
from jaxrl.runtime.simulation import Simulation, build
from jaxrl.scheduling.rounds.events import Event, RoundStarted, SampleAborted, SampleFinished, Verdict
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100
from jaxrl.sim.workload import Workload
from jaxrl.types import Sample

MAX_TURNS = 2_000_000


class Stuck(Exception):
    """No process comes to an end."""


class Baton:
    """Lets one of several threads run at a time."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self._turn = threading.Condition()
        self._holder = -1
        self._alive = list(range(count))
        self._num_turns = 0
        self.failures: dict[int, BaseException] = {}
        self.arrived = Counter[str]()  # at each barrier

    def pass_on(self, process: int, times: int = 1) -> None:
        """Lets others go on, as often as is said; returns when it is this one's turn."""
        for _ in range(times):
            if self.failures:
                raise Stuck("another process has failed")
            self._num_turns += 1
            if self._num_turns > MAX_TURNS:
                raise Stuck(f"after {MAX_TURNS} turns")
            with self._turn:
                self._holder = self.rng.choice(self._alive)
                if self._holder != process:
                    self._turn.notify_all()
                    self._turn.wait_for(lambda: self._holder == process)

    def run(self, each: Sequence[Callable[[], None]]) -> None:
        """Runs all to their ends; raises what the first has raised that failed."""

        def alone(process: int) -> None:
            with self._turn:
                self._turn.wait_for(lambda: self._holder == process)
            try:
                each[process]()
            except BaseException as error:
                self.failures.setdefault(process, error)
            finally:
                with self._turn:
                    self._alive.remove(process)
                    self._holder = self.rng.choice(self._alive) if self._alive else -1
                    self._turn.notify_all()

        threads = [threading.Thread(target=alone, args=(process,)) for process in range(len(each))]
        for thread in threads:
            thread.start()
        with self._turn:
            self._holder = self.rng.choice(self._alive)
            self._turn.notify_all()
        for thread in threads:
            thread.join()
        if self.failures:
            raise next(iter(self.failures.values()))


@dataclass
class SharedStore:
    """A process's view of the store that all threads share."""

    process: int
    num_processes: int
    baton: Baton
    values: dict[str, bytes]
    most: list[int] = field(default_factory=lambda: [0])  # keys that were there at once

    def put(self, key: str, value: bytes) -> None:
        self._pause()
        assert key not in self.values, key
        self.values[key] = value
        self.most[0] = max(self.most[0], len(self.values))
        self._pause()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        for _ in range(self.baton.rng.randrange(1, 20) if timeout_s else 1):
            self.baton.pass_on(self.process)
            if key in self.values:
                return self.values[key]
        return None

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        self._pause()
        return sorted((key, value) for key, value in self.values.items() if key.startswith(f"{prefix}/"))

    def delete(self, key_or_prefix: str) -> None:
        for key in [key for key in self.values if key == key_or_prefix or key.startswith(f"{key_or_prefix}/")]:
            del self.values[key]

    def barrier(self, name: str, timeout_s: float) -> None:
        self.baton.arrived[name] += 1
        while self.baton.arrived[name] % self.num_processes:
            self.baton.pass_on(self.process)

    def _pause(self) -> None:
        self.baton.pass_on(self.process, self.baton.rng.randrange(3))


class MemoryExchange:
    """Tokens through memory: every process leaves its own, waits for all, and takes the others'."""

    def __init__(self, store: SharedStore, left: dict[tuple[int, int], list[Sample]]) -> None:
        self._store, self._left, self._count = store, left, 0

    def __call__(self, samples: Sequence[Sample], owners: Sequence[int]) -> None:
        count, self._count = self._count, self._count + 1
        own = self._store.process
        self._left[count, own] = [s for s, owner in zip(samples, owners, strict=True) if owner == own]
        self._store.barrier(f"exchange {count}", 60.0)
        theirs = {p: iter(self._left[count, p]) for p in range(self._store.num_processes)}
        for sample, owner in zip(samples, owners, strict=True):
            found = next(theirs[owner])
            if owner == own:
                continue
            assert (found.key, len(found)) == (sample.key, len(sample)), "another sample, or another length"
            assert found.versions.tolist() == sample.versions.tolist(), "the versions were known before"
            assert sample.token_ids.strides == (0,) or len(sample) < 2, "it had content"
            sample.token_ids, sample.versions = found.token_ids.copy(), found.versions.copy()
            sample.rollout_logprobs = found.rollout_logprobs.copy()
            sample.sampled_logprobs = found.sampled_logprobs.copy()


Summary = tuple[Any, ...]


def summary(event: Event) -> Summary:
    """What an event says, without times."""
    match event:
        case RoundStarted():
            return ("started",)
        case SampleFinished(sample=sample, dispatch=dispatch):
            return "finished", sample.key, len(sample), sample.finish_reason, sample.versions.tolist(), dispatch
        case SampleAborted(sample=sample, dispatch=dispatch):
            return "aborted", sample.key, len(sample), sample.versions.tolist(), dispatch
        case Verdict():
            return "verdict", event.key, event.reward, event.status


class Process:
    """One process of a run: what its round has received, and what its steps have brought."""

    def __init__(self) -> None:
        self.events: list[Summary] = []
        self.metrics: dict[int, Metrics] = {}
        self.groups: dict[int, list[Any]] = {}
        self.saved: dict[int, str] = {}
        self.finished: bool | None = None
        self.stop_after: int | None = None  # a stop is asked for here, after so many events
        self.simulation: Simulation | None = None

    def run(
        self,
        config: Config,
        workload: Workload,
        hosts: Hosts | None = None,
        slow: Callable[[Simulation], None] = lambda simulation: None,
        state: str | None = None,
    ) -> None:
        """Runs the loop to its end."""

        def stop() -> bool:
            return self.stop_after is not None and len(self.events) >= self.stop_after

        def agreed() -> bool:
            backend: Any = simulation.loop._backend
            return backend.stop_agreed if hosts is not None else stop()

        hooks = Hooks(lambda *_: None, self._step, lambda *_: None, self._save, stop)
        simulation = self.simulation = build(config, CostModel(SMALL, H100), workload, hooks, hosts=hosts)
        hooks.stop = agreed
        slow(simulation)
        loop: Any = simulation.loop
        wait = loop._backend.wait

        def listened() -> Event:
            event = wait()
            self.events.append(summary(event))
            return event

        loop._backend.wait = listened
        if state is not None:
            loop.load_host_state(load_state(state, "test"))
        self.finished = loop.run()

    def _step(self, step: int, measured: Metrics, groups: Any) -> None:
        self.metrics[step], self.groups[step] = measured, list(groups)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        self.saved[step] = dump_state(state)

    def logical(self) -> list[Summary]:
        """The events, but where verdicts stand among the others, which a clock decides and which decides nothing."""
        return [event for event in self.events if event[0] != "verdict"]

    def decided(self) -> Any:
        """All results but seconds."""
        metrics = {step: _without_times(values) for step, values in self.metrics.items()}
        trained = {
            step: [
                (s.key, s.token_ids.tolist(), s.versions.tolist(), s.sampled_logprobs.tolist(), s.reward, s.text)
                for group in groups
                for s in group.samples
            ]
            for step, groups in self.groups.items()
        }
        saved: dict[int, str] = {}
        for step, text in self.saved.items():
            state = load_state(text, "test")
            if state["ahead"] is not None:
                state["ahead"]["metrics"] = _without_times(state["ahead"]["metrics"])
            saved[step] = dump_state(state)
        return metrics, trained, saved


def _without_times(metrics: Metrics) -> Metrics:
    """Without seconds, and without the number of verdicts, which counts those that nobody waited for."""
    scoring = (f"reward/{name}" for name in ("busy_s", "hidden_s", "seconds", "num_scored", "timeouts"))
    times = ("timing_s/", "perf/", "hosts/", *scoring)
    return {name: value for name, value in metrics.items() if not name.startswith(times)}


class HostsInStep:
    """A simulated run on several hosts.

    Args:
      config: of the run; `rollout.num_workers` is of all hosts.
      seed: of who goes on when.
    """

    def __init__(self, config: Config, workload: Workload, num_processes: int, seed: int) -> None:
        self.config, self.workload = config, workload
        self.baton = Baton(num_processes, seed)
        self.stores = [SharedStore(p, num_processes, self.baton, {}) for p in range(num_processes)]
        for store in self.stores[1:]:
            store.values, store.most = self.stores[0].values, self.stores[0].most
        self.processes = [Process() for _ in range(num_processes)]
        self._left: dict[tuple[int, int], list[Sample]] = {}

    def run(self, state: str | None = None) -> HostsInStep:
        def one(process: int) -> None:
            store = self.stores[process]
            stream = EventStream(store, clock=lambda: 0.0)
            hosts = Hosts(stream, MemoryExchange(store, self._left))

            def slow(simulation: Simulation) -> None:
                self._slow_down(process, simulation)

            try:
                self.processes[process].run(self.config, self.workload, hosts, slow, state)
            except Stuck:
                raise
            except BaseException as error:
                self.baton.failures.setdefault(process, error)
                raise

        self.baton.run([lambda process=process: one(process) for process in range(len(self.processes))])
        return self

    def _slow_down(self, process: int, simulation: Simulation) -> None:
        """Plans and verdicts of a process take as many turns as its pace and chance say."""
        rng, baton = self.baton.rng, self.baton
        pace = rng.choice((1, 3, 12))
        for executor in simulation.executors.executors:
            collect = executor.collect

            def collected(ticket: Any, own: Callable[[Any], Any] = collect) -> Any:
                baton.pass_on(process, rng.randrange(pace + 1))
                return own(ticket)

            executor.collect = collected  # type: ignore[method-assign]
        backend: Any = simulation.loop._backend
        scoring = backend._events._scoring._scoring
        completed = scoring.completed
        eager = rng.choice((0.02, 0.3, 1.0))

        def come() -> list[Verdict]:
            if scoring.num_pending and scoring._coming and rng.random() < eager:
                scoring._clock.reach(scoring._coming[0][0])
            return completed()

        scoring.completed = come


def one_process(config: Config, workload: Workload, state: str | None = None) -> Process:
    """The same run in one process with all workers."""
    process = Process()
    process.run(config, workload, state=state)
    return process


def assert_same(run: HostsInStep, alone: Process) -> None:
    """Every process of a run has received and decided what one process with all workers has."""
    first = run.processes[0]
    for process in run.processes[1:]:
        assert process.events == first.events, "the stream is one"
    for process in run.processes:
        assert process.logical() == alone.logical()
        assert process.metrics.keys() == alone.metrics.keys()
        (metrics, *mine), (expected, *theirs) = process.decided(), alone.decided()
        for step, values in metrics.items():
            others = expected[step]
            differ = {n: (values.get(n), others.get(n)) for n in {*values, *others} if values.get(n) != others.get(n)}
            assert not differ, f"step {step}: {differ}"
        assert mine == theirs
        assert process.finished == alone.finished


def with_hosts(config: Config, num_processes: int) -> Config:
    """A configuration of several hosts."""
    return replace(config, hosts=replace(config.hosts, num=num_processes))
