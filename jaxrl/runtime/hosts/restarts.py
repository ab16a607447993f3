"""What becomes of a run when one of its processes ends: it goes on, starts again, or is over. Pure, without a clock.

A launcher (`jaxrl.runtime.hosts.launch`) tells `Restarts` what its agents report and asks it what to do. The rules:

- A process that did not choose its end (killed by a signal, or its host lost) is a **death**: all start again from the
  last checkpoint. `max_restarts` counts starts without a checkpoint in between.
- A process that ends with a status of ours has given an answer, which another start would only repeat: 1 it cannot go
  on, 2 it was refused, 130 and 143 it was stopped by a signal (`jaxrl.cli`). The run ends with that status.
- 0 from all is the end. A process that stays long after another has ended with 0 hangs.
- One death pulls others along, and not always later: jax aborts a process whose coordinator is gone (SIGABRT), or
  raises in it. So anything but a plain death is believed only when all have ended, or nothing worse was heard for a
  while (`SETTLE_S`). The first of the worst kind is the cause.
- Once the launcher was asked to stop, nothing starts again.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import IntEnum

from jaxrl.runtime.stop import WISH

SETTLE_S = 3.0
LAST_S = 15.0
"""Beyond `stall_timeout_s`, for the last process to end once another one has ended with 0."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has ended.

    Attributes:
      status: as of `subprocess`: below 0, the number of the signal that ended it.
      tail: the last lines that it printed, where they were not shown.
    """

    process: int
    status: int
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """What watched a process is gone, and the process with it; `why`: the half-sentence after `host 1:`."""

    process: int
    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A process could not be started, for a reason that a user can mend."""

    process: int
    sentence: str


End = Ended | Lost | Refused


@dataclass(frozen=True, slots=True)
class Again:
    """All are to be ended, and started again; `number`: of this start, without a checkpoint in between."""

    cause: End
    number: int


@dataclass(frozen=True, slots=True)
class Over:
    """The run is over.

    Attributes:
      status: the launcher's own exit status.
      cause: None where nothing went wrong.
      sentence: what is to be said beside the cause's own words; may be empty.
    """

    status: int
    cause: End | None = None
    sentence: str = ""


class Kind(IntEnum):
    """What an end was; the least is the cause of the others."""

    DEATH = 0
    STOPPED = 1
    REFUSED = 2
    FAILED = 3
    ABORTED = 4
    DONE = 5


def kind_of(end: End) -> Kind:
    if isinstance(end, Lost):
        return Kind.DEATH
    if isinstance(end, Refused):
        return Kind.REFUSED
    number = signal_of(end.status)
    if number is None:  # a status that is none of ours is nobody's answer
        return {0: Kind.DONE, 1: Kind.FAILED, 2: Kind.REFUSED}.get(end.status, Kind.DEATH)
    if number in (signal.SIGINT, signal.SIGTERM, WISH):  # the last one before Python has a handler for it
        return Kind.STOPPED
    return Kind.ABORTED if number == signal.SIGABRT else Kind.DEATH


def signal_of(status: int) -> signal.Signals | None:
    """The signal that a status tells of, in `subprocess`'s way (-9) or a shell's (137); None for other statuses."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number) if number in {each.value for each in signal.Signals} else None


def described(end: End) -> str:
    """`host 1 was ended by SIGKILL`."""
    match end:
        case Lost():
            return f"host {end.process}: {end.why}"
        case Refused():
            return f"host {end.process}: {end.sentence}"
        case Ended() if (number := signal_of(end.status)) is not None:
            return f"host {end.process} was ended by {number.name}"
    return f"host {end.process} ended with status {end.status}"


class Restarts:
    """The course of a run over its worlds; a world is `num` processes that started together.

    Args:
      num: processes.
      max_restarts, stall_timeout_s: of `HostsSection`.
    """

    def __init__(self, num: int, max_restarts: int, stall_timeout_s: float) -> None:
        self._num, self._max_restarts, self._last_s = num, max_restarts, stall_timeout_s + LAST_S
        self._newest: int | None = None  # checkpoint
        self._restarts = 0  # since it came
        self._asked: int | None = None
        self._ends: dict[int, tuple[End, float]] = {}

    @property
    def newest(self) -> int | None:
        """The step of the last checkpoint that was reported."""
        return self._newest

    def begin(self) -> None:
        """A new world: nobody has ended."""
        self._ends = {}

    def saved(self, step: int) -> None:
        """A checkpoint is complete."""
        if self._newest is None or step > self._newest:
            self._newest, self._restarts = step, 0

    def ask(self, number: int) -> None:
        """The launcher got a signal that asks it to stop."""
        self._asked = number

    def take(self, end: End, now_s: float) -> None:
        """Only a process's first end counts: what is said of it later follows from that."""
        self._ends.setdefault(end.process, (end, now_s))

    def decide(self, now_s: float) -> Again | Over | None:
        """What to do now; None: go on. Time alone may change the answer, so it is to be asked for often."""
        if not self._ends:
            return None
        wrong = [(kind_of(end), end.process, end) for end, _ in self._ends.values() if kind_of(end) != Kind.DONE]
        first_s = min(at_s for _, at_s in self._ends.values())
        if not wrong:
            return self._well(now_s - first_s)
        kind, _, cause = min(wrong, key=lambda each: each[:2])
        wrong_s = min(at_s for end, at_s in self._ends.values() if kind_of(end) != Kind.DONE)
        if kind is Kind.DEATH or len(self._ends) == self._num or now_s - wrong_s >= SETTLE_S:
            return self._badly(kind, cause)
        return None

    def _well(self, waited_s: float) -> Over | None:
        if len(self._ends) == self._num:
            return Over(0)
        if waited_s < self._last_s:
            return None
        left = ", ".join(str(process) for process in range(self._num) if process not in self._ends)
        return Over(
            1, None, f"host {left} has not ended {waited_s:.0f} s after others did: the run is complete or was stopped"
        )

    def _badly(self, kind: Kind, cause: End) -> Again | Over:
        if kind is Kind.STOPPED:
            assert isinstance(cause, Ended)
            number = self._asked or signal_of(cause.status)
            assert number is not None
            return Over(128 + number, cause)
        if kind is Kind.REFUSED:
            return Over(2, cause)
        if kind is Kind.FAILED:
            return Over(1, cause)
        if self._asked is not None:
            return Over(1, cause, f"{described(cause)} while the run was being stopped; {self.kept()}")
        if self._restarts >= self._max_restarts:
            limit = f"{self._restarts} restarts without a checkpoint in between (hosts.max_restarts)"
            return Over(1, cause, f"{described(cause)}, after {limit}; {self.kept()}")
        self._restarts += 1
        return Again(cause, self._restarts)

    def kept(self) -> str:
        if self._newest is None:
            return "there is no checkpoint yet"
        return f"the last checkpoint is step {self._newest}: run again to go on from it"
