"""A step's counts of verdicts: in all, and by the domain of the prompt.

Purpose: `VerdictTally` counts each verdict once, when the round hears of it. That order is logical time, and verdicts
that the journal gives come in it like all others: a step that runs again has the same counts. What a pool does that no
verdict tells of (replaced workers, retries, seconds), it counts itself.

Departure: the seconds of a verdict from the journal are not known any more, and are in no percentile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from jaxrl.config import Config
from jaxrl.config.domains import Domain, domains, is_staged
from jaxrl.scheduling.rounds.events import Verdict

TIMEOUTS = {
    "case": "a test case's adaptive limit",
    "case_max": "a test case's largest limit",
    "program": "a program's limit",
    "sample": "a sample's limit",
    "endpoint": "the endpoint's limit",
    "watchdog": "a worker that was silent",
}
"""What limits are there, as `timeouts` of a verdict's info counts them: how often each ended something. `case`: of
`reward.code`, below `max_timeout_s`; `case_max`: `max_timeout_s` itself; `program`: `reward.code.max_failing_s`;
`sample`: `reward.timeout_s`, that of a domain or of math; `endpoint`: `reward.judge.request_timeout_s`; `watchdog`: a
worker's keeper, or an actor, said nothing."""
_COUNT_OF = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}


class VerdictTally:
    """Counts verdicts since `take` was last called.

    Args:
      domains: by source, that of other sources under the empty name; none: nothing is counted by domain.
    """

    def __init__(self, domains: Mapping[str, Domain] | None = None) -> None:
        self._names = {source: source for source in domains or {} if source}
        self._seen: set[str] = set(self._names)  # others are shown once there is one
        if domains is not None:
            others = "default"
            while others in self._names:
                others += "_"
            self._names[""] = others
        self._clear()

    @classmethod
    def configured(cls, config: Config) -> VerdictTally:
        """That of a run: by domain where there are domains, parts, or other scorers than worker processes."""
        return cls(domains(config.reward) if is_staged(config.reward) else None)

    def _clear(self) -> None:
        self._whole, self._replayed, self._timeouts = Counter[str](), Counter[str](), Counter[str]()
        self._status: dict[str, Counter[str]] = {source: Counter() for source in self._names}
        self._seconds: dict[str, list[float]] = {source: [] for source in self._names}
        self._own: list[float] = []
        self._parts: dict[str, list[float]] = {}

    def add(self, source: str, verdict: Verdict) -> None:
        """Counts a verdict on a sample of a prompt from `source`."""
        self._whole[verdict.status] += 1
        self._timeouts += timeouts_of(verdict)
        self._replayed[verdict.status] += verdict.is_replayed
        if not self._names:
            return
        domain = source if source in self._names else ""
        self._seen.add(domain)
        self._status[domain][verdict.status] += 1
        if not verdict.is_replayed:
            self._seconds[domain].append(verdict.duration_s)
        if verdict.status == "ok":
            self._own.append(verdict.unshaped.reward)
            for name, value in verdict.info.get("parts", {}).items():
                self._parts.setdefault(name, []).append(value)

    def clear(self) -> None:
        """The round is dropped: what it has counted is not."""
        self._clear()

    def take(self, pool: Mapping[str, float]) -> dict[str, float]:
        """What `pool` has counted, and besides `reward/timeouts/<kind>` (`TIMEOUTS`). Of `reward/{num_scored,errors,
        timeouts,crashes}` a pool's own stay, with what the journal gave in its place: it has also scored what was not
        wanted any more. With domains they are counted here, where a sample has one verdict, and so are
        `reward/<domain>/` the same four and `{p50_s,p95_s,max_s}`, the seconds of scoring; `reward/part/<name>/mean`
        and `reward/own/mean`, of parts and of the scorers' own rewards, before any weight."""
        if self._names:
            measured = {**pool, **_counts("reward", self._whole)}
        else:
            added = _counts("reward", self._replayed)
            measured = {**pool, **{name: pool.get(name, 0.0) + count for name, count in added.items()}}
        measured |= {f"reward/timeouts/{kind}": float(self._timeouts[kind]) for kind in TIMEOUTS}
        for source in sorted(self._seen):
            prefix = f"reward/{self._names[source]}"
            measured |= _counts(prefix, self._status[source])
            if seconds := self._seconds[source]:
                p50, p95 = np.percentile(seconds, (50, 95), method="inverted_cdf")
                measured |= {f"{prefix}/p50_s": float(p50), f"{prefix}/p95_s": float(p95)}
                measured[f"{prefix}/max_s"] = max(seconds)
        measured |= {f"reward/part/{name}/mean": float(np.mean(values)) for name, values in self._parts.items()}
        if self._own:
            measured["reward/own/mean"] = float(np.mean(self._own))
        self._clear()
        return measured


def _counts(prefix: str, status: Counter[str]) -> dict[str, float]:
    counted = {f"{prefix}/num_scored": float(status.total())}
    return counted | {f"{prefix}/{name}": float(status[each]) for each, name in _COUNT_OF.items()}


def timeouts_of(verdict: Verdict) -> Counter[str]:
    """What limits ended a verdict, or part of it. A time-out that says nothing of kinds is a sample's."""
    said = verdict.info.get("timeouts")
    found = Counter[str]()
    if isinstance(said, Mapping):
        found.update({kind: said[kind] for kind in TIMEOUTS if type(said.get(kind)) is int and said[kind] > 0})
    if not found and verdict.status == "timeout":
        found["sample"] = 1
    return found
