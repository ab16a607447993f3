"""The end of a round over several processes: what each has counted, as metrics of all, and the tokens that must come.

Purpose: `RoundCounts` is what one process has counted in a round, `merged` makes metrics of the counts of all.
`MissingTokens` is what is exchanged: samples of this round that are trained on or carried.

Source: docs/architecture.md. Counts and seconds add up; `reward/busy_s` is the largest, because processes score at the
same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from jaxrl.runtime.hosts.event_stream import EventStream
from jaxrl.scheduling.rounds.batches import RoundResult
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.types import Sample, SampleKey

TextOf = Callable[[Sample], str]
"""Makes a response's text from its tokens."""

Exchange = Callable[[Sequence[Sample], Sequence[int]], object]
"""(samples with their right lengths, the process that has the content of each) -> fills in those of other processes."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The other processes of a run.

    Attributes:
      stream: the messages between them and this one.
      exchange: called at a round's end with samples, the same everywhere and in the same order, and the process that
        has drawn each: fills in, in place, what others have drawn.
    """

    stream: EventStream
    exchange: Exchange


_LARGEST = frozenset({"reward/busy_s"})


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """Of one process: the counts of its workers, programs compiled, what its scoring says.

    Attributes:
      sent: by its name, what each mechanism sends to all processes (`jaxrl.scheduling.mechanism.Mechanism.counts`).
    """

    workers: Sequence[Counters]
    recompiles: int
    scoring: Mapping[str, float]
    sent: Mapping[str, Any]

    @property
    def total(self) -> Counters:
        """Of all its workers."""
        return sum(self.workers, Counters())

    def written(self) -> dict[str, Any]:
        """As JSON values."""
        workers = [list(astuple(each)) for each in self.workers]
        return {
            "workers": workers,
            "recompiles": self.recompiles,
            "scoring": dict(self.scoring),
            "sent": dict(self.sent),
        }

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> RoundCounts:
        """The reverse."""
        workers = [Counters(*each) for each in written["workers"]]
        return cls(workers, *(written[name] for name in ("recompiles", "scoring", "sent")))


def work_metrics(done: Counters) -> dict[str, float]:
    """Metrics of what all workers have counted together."""
    return {
        "rollout/preemptions": done.preemptions,
        "rollout/bubble_ratio": done.bubble_ratio,
        "rollout/decode_steps": done.steps,
        "rollout/prefill_tokens": done.prefill_tokens,
        "rollout/shared_tokens": done.shared_tokens,
    }


def merged(counts: Sequence[RoundCounts]) -> dict[str, float]:
    """Metrics of what all processes have counted, but for their workers' counts."""
    scoring: dict[str, float] = {}
    for each in counts:
        for name, value in each.scoring.items():
            known = scoring.get(name, 0.0)
            scoring[name] = max(known, value) if name in _LARGEST else known + value
    return {"rollout/recompiles": sum(each.recompiles for each in counts)} | scoring


def samples_of(result: RoundResult, *, left_out: bool) -> list[Sample]:
    """The samples of a round that are looked at after it: trained on and carried, and with `left_out` also those of
    groups that were scored and left out of the batch."""
    groups = (*result.groups, *(result.filtered if left_out else ()))
    return [*(sample for group in groups for sample in group.samples), *result.carried]


class MissingTokens:
    """Samples whose content some process lacks.

    Args:
      found: samples that are needed, each with the process that has drawn it in this round; None: all have it already.

    Attributes:
      samples: one of each key, sorted by it, so that the order is the same everywhere. owners: of these.
    """

    def __init__(self, found: Sequence[tuple[Sample, int | None]]) -> None:
        self._all: dict[SampleKey, list[Sample]] = {}
        owner_of: dict[SampleKey, int] = {}
        for sample, owner in found:
            if owner is not None:
                self._all.setdefault(sample.key, []).append(sample)
                owner_of[sample.key] = owner
        keys = sorted(self._all)
        self.samples = [self._all[key][0] for key in keys]
        self.owners = [owner_of[key] for key in keys]

    def fill(self, process: int, text_of: TextOf) -> None:
        """The content has come: copies of a sample get it too, and responses of others that have ended their text."""
        for first, owner in zip(self.samples, self.owners, strict=True):
            if owner == process:
                continue
            text = text_of(first) if first.finish_reason in ("stop", "length") else ""
            for sample in self._all[first.key]:
                assert len(sample) == len(first), f"{first.key}: {len(sample)} and {len(first)} tokens"
                sample.token_ids, sample.versions = first.token_ids, first.versions
                sample.rollout_logprobs, sample.sampled_logprobs = first.rollout_logprobs, first.sampled_logprobs
                sample.text = text
