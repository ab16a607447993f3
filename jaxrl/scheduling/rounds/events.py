"""Events and commands: the round-level interface (docs/architecture.md).

A round receives events and answers with commands; time is a field of the event, in seconds on the backend's own clock.
What enters a batch depends on logical time only. So an event that ends a sample carries its dispatch number, and
verdicts reach the round in the order in which their samples completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxrl.types import Prompt, Sample, SampleKey

PromptKey = tuple[int, int]
"""(epoch, index)"""

Outcome = Literal["trained", "filtered", "failed"]
"""How a prompt leaves the system."""


class Interrupted(Exception):
    """A round ends before it is done. Its text says why the run cannot continue; empty: a stop was asked for."""


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """The first event of every round."""

    time_s: float


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """A response ended by itself (stop or length), in dispatch `dispatch`."""

    time_s: float
    sample: Sample
    dispatch: int


VerdictStatus = Literal["ok", "error", "timeout", "crash"]
"""`timeout` and `crash` are always decided by the clock or the machine, the others only where `Verdict.outside` says
so."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A scorer's answer for one sample. A scorer that fails gives reward 0 and says why in `status` and `info`.

    Attributes:
      outside: a clock (a test case that was cut off), or something outside the run (an endpoint), decided it. The
        backend journals such verdicts, and those of time-outs and crashes.
      is_replayed: it comes from the journal.
    """

    time_s: float
    key: SampleKey
    reward: float
    status: VerdictStatus = "ok"
    info: Mapping[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0
    outside: bool = False
    is_replayed: bool = False

    @property
    def failure(self) -> str:
        return "" if self.status == "ok" else str(self.info.get("error") or self.status)

    @property
    def unshaped(self) -> Verdict:
        """With the scorer's own reward, without weights and parts (`reward.domains`, `reward.parts`)."""
        own = self.info.get("own_reward")
        return replace(self, reward=float(own)) if own is not None and self.status == "ok" else self


@dataclass(frozen=True, slots=True)
class SampleAborted:
    """A response ended because the round asked for it: its tokens so far, with `finish_reason` "abort"."""

    time_s: float
    sample: Sample
    dispatch: int


def named_values(info: Mapping[str, Any]) -> dict[str, Any]:
    """The scorer's other results, with the parts of the reward (`reward.parts`) by their names."""
    return {**info, **info.get("parts", {})}


Event = RoundStarted | SampleFinished | SampleAborted | Verdict


@dataclass(frozen=True, slots=True)
class Launch:
    """Start these responses of a prompt.

    Attributes:
      resumed: the samples of those `keys` that began in an earlier round; they resume from these token ids.
      finished: responses that ended by themselves in an earlier round and count in this one; they need no start.
      workers: the worker of each of `keys`; empty: each goes to the one that has least to do.
    """

    prompt: Prompt
    keys: tuple[SampleKey, ...]
    resumed: tuple[Sample, ...] = ()
    finished: tuple[Sample, ...] = ()
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """Send a finished sample to the reward pool; a `Verdict` follows."""

    prompt: Prompt
    sample: Sample


@dataclass(frozen=True, slots=True)
class Abort:
    """End these responses at once. Exactly one event follows for each.

    Without `keep` that is a `SampleAborted`: tokens of plans in flight may be missing from it, and a response counts as
    aborted even if it has ended and its `SampleFinished` has not reached the round. With `keep` the backend waits for
    plans in flight, and sends a `SampleFinished` for a response that has ended.
    """

    keys: tuple[SampleKey, ...]
    keep: bool = False


@dataclass(frozen=True, slots=True)
class CancelScore:
    """No verdict on these samples follows. A scorer that already runs may finish; its answer is dropped, unless the
    sample is sent again."""

    keys: tuple[SampleKey, ...]


@dataclass(frozen=True, slots=True)
class AwaitVerdict:
    """Dispatch no new plan before the round has the verdict on this sample, so that the plan in which its decision
    takes effect does not depend on a clock."""

    key: SampleKey


Command = Launch | Score | Abort | CancelScore | AwaitVerdict
