"""What a run of several processes has of the others, as the parts of a run want it; a run of one process has nothing.

Purpose: `ProcessGroup` gives the stream, the exchange of tokens, the barriers of the loop's phases, the common stop and
the least memory to `jaxrl.commands.train`, from a world that is open. Each of them is there for a run of one process
too, and then waits for nobody, so that a run is built and goes on alike.

Source: docs/architecture.md (several processes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from jaxrl.config import Config
from jaxrl.record.journal import Tell
from jaxrl.record.metrics import UPDATE_PHASES
from jaxrl.runtime.devices import ProcessDevices
from jaxrl.runtime.hosts.broadcast import broadcast_from_any, broadcast_from_rank0
from jaxrl.runtime.hosts.consistency import check_consistency
from jaxrl.runtime.hosts.event_stream import EventStream
from jaxrl.runtime.hosts.liveness import PROGRAM, STREAM, PhaseBarrier
from jaxrl.runtime.hosts.tokens import TokenExchange
from jaxrl.runtime.hosts.world import World
from jaxrl.runtime.round_end import Hosts
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.events import Event, RoundStarted, Verdict
from jaxrl.train.steps import ALONE, Peers
from jaxrl.types import Sample

GLOBAL_PHASES = frozenset({"sync", "save", *UPDATE_PHASES} - {"adv"})
"""The loop's phases in which programs of all hosts run."""
_LATER_S = 10.0  # process 0 speaks first, which knows for whom it waits


class ProcessGroup:
    """The other processes of a run.

    Args:
      world: that is open; None: this process is alone.
      asked: whether this process was asked to stop.
      beat: tells this process's watchdog that it waits for others, and does not hang itself.

    Attributes:
      peers: how all compare a checkpoint together.
      stream: what happens in rounds, to and from the others; None: there are none.
    """

    def __init__(self, world: World | None, asked: Callable[[], bool], beat: Callable[[], None] = lambda: None) -> None:
        self._world = world if world is not None and world.num_processes > 1 else None
        self._asked = asked
        self.peers = ALONE
        self.stream: EventStream | None = None
        self._exchange: TokenExchange | None = None
        self._num_boundaries = 0
        self._metrics: dict[str, float] = {}
        if self._world is not None:
            barrier = self._world.barrier
            told = broadcast_from_rank0(barrier.store, beat), broadcast_from_any(barrier.store, beat)
            self.peers = Peers(self._world.process, self._world.num_processes, *told)
            later_s = 0.0 if self._world.process == 0 else _LATER_S
            limit_s = barrier.stall_timeout_s + later_s
            self.stream = EventStream(barrier.store, stalls_s=limit_s, stalled=self._stalled, waited=beat)

    @property
    def hosts(self) -> Hosts | None:
        """What the backend has of the others."""
        return None if self.stream is None else Hosts(self.stream, self.exchange)

    @property
    def tell(self) -> Tell | None:
        """Sends this process's decisions to process 0, for the journal; None: this is process 0."""
        return None if self.stream is None or self.stream.process == 0 else self.stream.decided

    # -- the start ---------------------------------------------------------------------------------------------------

    def compare(self, config: Config, devices: ProcessDevices) -> ProcessDevices:
        """Compares this process with the others, before anything compiles; `devices` with the least memory of all.

        Raises:
          Disagreement: on every process, with the same sentence.
        """
        if self._world is None:
            return devices
        least_bytes = check_consistency(self._world.barrier, config, devices.local_devices)
        self._exchange = TokenExchange(devices, meet=self.meet, dispatched=self.dispatched)
        return devices.with_least(least_bytes)

    # -- the run -----------------------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """All are about to run programs of all hosts, for `phase`."""
        if self._world is not None:
            self._count("hosts/gate_s", self._world.barrier.enter(phase))
            self._world.barrier.note(PROGRAM, phase)

    def meet(self, name: str) -> None:
        """All have compiled the program of a name, and are about to run it for the first time."""
        self.enter(f"the first run of {name}")

    def dispatched(self, name: str) -> None:
        """A program of all hosts is about to run: all run the same ones in the same order."""
        if self._world is not None:
            self._world.barrier.note(PROGRAM, name)

    def leave(self) -> None:
        """This process goes on by itself."""
        if self._world is not None:
            self._world.barrier.leave()

    def on_phase(self, step: int, name: str) -> None:
        """A phase of the loop has begun."""
        if self._world is None:
            return
        if name in GLOBAL_PHASES:
            self.enter(f"{name} of step {step}")
        else:
            self._world.barrier.at(f"{name} of step {step}")

    @property
    def mechanisms(self) -> list[Mechanism]:
        """What the backend calls for the others; none where this process is alone."""
        return [] if self._world is None else [EventDigest(self._world.barrier)]

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Inside, this process waits for what all do together."""
        return nullcontext() if self._world is None else self._world.barrier.waiting(what)

    def stops(self) -> bool:
        """Whether the run stops at this boundary; the same on every host."""
        if self._world is None:
            return self._asked()
        self._num_boundaries += 1
        return self._world.barrier.stop_at(f"boundary {self._num_boundaries}")

    def is_asked(self) -> bool:
        """Whether this process knows that the run was asked to stop."""
        return self._asked() if self._world is None else self._world.barrier.stop_asked

    def exchange(self, samples: Sequence[Sample], owners: Sequence[int]) -> None:
        """Brings the tokens of samples that other hosts have drawn."""
        if self._exchange is None:
            return
        self.enter("the exchange of tokens")
        moved = self._exchange.exchange(samples, owners)
        self.leave()
        self._count("hosts/exchange_s", moved.seconds)
        self._count("hosts/exchange_bytes", float(moved.num_bytes))

    def take_metrics(self) -> dict[str, float]:
        """Since the last call, of this host: seconds at barriers (`hosts/gate_s`) and in exchanges of tokens
        (`hosts/exchange_s`), and the bytes that these brought. (A round's metrics have those of the stream.)"""
        found, self._metrics = self._metrics, {}
        return found

    def _count(self, name: str, amount: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + amount

    def _stalled(self, process: int, seconds: float) -> None:
        assert self._world is not None
        self._world.barrier.miss(process, seconds)


class EventDigest(Mechanism):
    """Notes every event that the round is handed: all processes handle the same ones, or the barrier ends the run."""

    def __init__(self, barrier: PhaseBarrier) -> None:
        self._barrier = barrier

    def handed(self, event: Event) -> None:
        self._barrier.note(STREAM, _described(event))


def _described(event: Event) -> str:
    """An event in words that are the same on every host: without times, texts and tokens."""
    if isinstance(event, RoundStarted):
        return "round"
    if isinstance(event, Verdict):
        return f"verdict {event.key} {event.status} {event.reward!r}"
    return f"{type(event).__name__} {event.sample.key} {len(event.sample)} {event.sample.finish_reason}"
