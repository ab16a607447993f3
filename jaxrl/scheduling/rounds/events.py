"""What happened and what to do: the round-level seam (docs/architecture.md).

A round receives events and answers with commands; time is a field of the event, in seconds on the backend's own clock.
What enters a batch depends on logical time only, so an event that ends a sample carries its dispatch number, and
verdicts reach the round in the order in which their samples completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxrl.types import Prompt, Sample, SampleKey


class Interrupted(Exception):
    """A round ends before it is done. Without a text: a stop was asked for. With one: why the run cannot go on."""


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """The backend is ready; the first event of every round."""

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

    `outside`: a clock (a test case that was cut off), or something outside the run (an endpoint), decided it: asked
    again, it might come out otherwise. The backend journals such verdicts, and those of time-outs and crashes.
    `is_replayed`: the journal gave it.
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
        """Why there is no score; empty: there is one."""
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
    """What a scorer has returned beside the reward, with the parts of the reward (`reward.parts`) by their names."""
    return {**info, **info.get("parts", {})}


Event = RoundStarted | SampleFinished | SampleAborted | Verdict


@dataclass(frozen=True, slots=True)
class Launch:
    """Start these responses of a prompt.

    Attributes:
      prompt: the prompt.
      keys: the responses to start, or to go on with.
      resumed: the samples of those `keys` that began in an earlier round; they go on from these token ids.
      finished: responses that ended by themselves in an earlier round and count in this one; they need no start.
      workers: by the places of `keys`, the worker that each goes to; empty: the one that has least to do.
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
    aborted even if it has ended and the round has not been told (its `SampleFinished` is taken back). With `keep` the
    tokens matter: plans in flight are waited for, and a response that has ended is told as `SampleFinished`.
    """

    keys: tuple[SampleKey, ...]
    keep: bool = False


@dataclass(frozen=True, slots=True)
class CancelScore:
    """The verdicts on these samples are not wanted any more: none follows.

    A scorer that runs already may go on; what it says is dropped, unless the sample is sent for scoring again.
    """

    keys: tuple[SampleKey, ...]


@dataclass(frozen=True, slots=True)
class AwaitVerdict:
    """Dispatch no new plan before the verdict on this sample has been handed over.

    So the plan in which the round's decision takes effect does not depend on a clock.
    """

    key: SampleKey


@dataclass(frozen=True, slots=True)
class NextRoundPrefetch:
    """What the next round launches, whatever becomes of the present one, and the version of its weights, which are
    there: workers with nothing left to do may begin with it."""

    policy_version: int
    launches: tuple[Launch, ...]


Command = Launch | Score | Abort | CancelScore | AwaitVerdict
