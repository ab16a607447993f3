"""A step's counts of verdicts: in all, and by the domain of the prompt.

Each verdict counts once, when the round receives it, replayed ones too: a step that runs again has the same counts.
Departure: the seconds of a verdict from the journal are not known any more, and are in no percentile.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxrl.config import Config
from jaxrl.config.domains import Domain, domains, is_staged
from jaxrl.mechanisms.dynamic_sampling import THE_REWARD
from jaxrl.scheduling.rounds.events import Verdict, named_values
from jaxrl.scheduling.rounds.shaping import RewardShaping
from jaxrl.types import SampleKey

_log = logging.getLogger(__name__)

TIMEOUTS = {
    "case": "a test case's adaptive limit",
    "case_max": "a test case's largest limit",
    "program": "a program's limit",
    "sample": "a sample's limit",
    "endpoint": "the endpoint's limit",
    "watchdog": "a worker that was silent",
}
"""What limits are there, as `timeouts` of a verdict's info counts them: how often each ended something."""
_COUNTED_AS = {"error": "errors", "timeout": "time-outs", "crash": "crashes"}  # in warnings
_COUNT_OF = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}


def describe_sample(key: SampleKey) -> str:
    text = f"epoch {key.epoch}, prompt {key.prompt_index}, sample {key.sample_index}"
    return f"{text}, attempt {key.attempt}" if key.attempt else text


class RewardMetrics:
    """Counts verdicts since `take` was last called; without `domains` nothing by domain. `keys`, `metric`: values that
    the reward of a training sample must have (`algorithm.gdpo_reward_keys`, `algorithm.filter_groups.metric`)."""

    def __init__(self, domains: Mapping[str, Domain] | None = None, keys: Sequence[str] = (), metric: str = "") -> None:
        self._keys, self._metric, self._failed = keys, metric, FailureWarnings()
        self._names = {source: source for source in domains or {} if source}
        self._seen: set[str] = set(self._names)  # others are shown once there is one
        if domains is not None:
            others = "default"
            while others in self._names:
                others += "_"
            self._names[""] = others
        self.clear()

    @classmethod
    def configured(cls, config: Config) -> RewardMetrics:
        """The metrics of a run: by domain where there are domains, parts, or other scorers than worker processes."""
        algorithm, chosen = config.algorithm, config.algorithm.filter_groups
        shaping = RewardShaping.configured(config)
        added = {} if shaping is None else shaping.shaped(Verdict(0.0, SampleKey(0, 0, 0), 0.0), 0).info
        keys = algorithm.gdpo_reward_keys if algorithm.adv_estimator == "gdpo" else []
        return cls(
            domains(config.reward) if is_staged(config.reward) else None,
            [key for key in keys if key not in added],
            chosen.metric if chosen.enable and not chosen.path and chosen.metric not in (*THE_REWARD, *added) else "",
        )

    def clear(self) -> None:
        self._whole, self._timeouts = Counter[str](), Counter[str]()
        self._status: dict[str, Counter[str]] = {source: Counter() for source in self._names}
        self._seconds: dict[str, list[float]] = {source: [] for source in self._names}
        self._own: list[float] = []
        self._parts: dict[str, list[float]] = {}

    def add(self, source: str, verdict: Verdict, *, is_training: bool = True) -> Verdict:
        """Counts a verdict on a sample of a prompt from `source`, and returns it as it counts."""
        if is_training and verdict.status == "ok" and (missing := self._missing(verdict)):
            verdict = replace(verdict, reward=0.0, status="error", info={**verdict.info, "error": missing})
            self._failed.add(verdict)
        self._whole[verdict.status] += 1
        self._timeouts += timeouts_of(verdict)
        if not self._names:
            return verdict
        domain = source if source in self._names else ""
        self._seen.add(domain)
        self._status[domain][verdict.status] += 1
        if not verdict.is_replayed:
            self._seconds[domain].append(verdict.duration_s)
        if verdict.status == "ok":
            self._own.append(verdict.unshaped.reward)
            for name, value in verdict.info.get("parts", {}).items():
                self._parts.setdefault(name, []).append(value)
        return verdict

    def _missing(self, verdict: Verdict) -> str:
        """Which value training asks for, and the scorer has not returned; empty: none."""
        values = named_values(verdict.info)
        numbers = [name for name, value in values.items() if isinstance(value, int | float)]
        for key in self._keys:
            if key not in numbers:
                has = ", ".join(numbers) or "none"
                return f"algorithm.gdpo_reward_keys names {key!r}, and the reward has these numbers: {has}"
        if self._metric and self._metric not in verdict.info:
            has = ", ".join(map(str, verdict.info)) or "nothing besides the reward"
            return f"algorithm.filter_groups.metric ({self._metric}): the scorer returned no such value, found {has}"
        return ""

    def take(self, pool: Mapping[str, float]) -> dict[str, float]:
        """The counts of `pool`, and `reward/timeouts/<kind>` (`TIMEOUTS`) and `reward/{num_scored,errors,
        timeouts,crashes}`. With domains also `reward/<domain>/` the same four and `{p50_s,p95_s,max_s}`, seconds of
        scoring; and, before any weight, `reward/part/<name>/mean` and `reward/own/mean`."""
        measured = {**pool, **_counts("reward", self._whole)}
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
        self.clear()
        return measured


class FailureWarnings:
    """Warns of failed samples: the 1st, 2nd, 4th, 8th, ... of each status."""

    def __init__(self, where: Callable[[SampleKey], str] = describe_sample) -> None:
        self._where = where
        self._ever = Counter[str]()

    def add(self, verdict: Verdict) -> Verdict:
        if verdict.status != "ok":
            self._ever[verdict.status] += 1
            count = self._ever[verdict.status]
            if count & (count - 1) == 0:
                so_far = f" ({count} {_COUNTED_AS[verdict.status]} so far)" if count > 1 else ""
                _log.warning("reward 0 for %s: %s%s", self._where(verdict.key), verdict.failure, so_far)
        return verdict


def _counts(prefix: str, status: Counter[str]) -> dict[str, float]:
    counted = {f"{prefix}/num_scored": float(status.total())}
    return counted | {f"{prefix}/{name}": float(status[each]) for each, name in _COUNT_OF.items()}


def timeouts_of(verdict: Verdict) -> Counter[str]:
    """The limits that ended a verdict, or part of it. A time-out without kinds is a sample's."""
    said = verdict.info.get("timeouts")
    found = Counter[str]()
    if isinstance(said, Mapping):
        found.update({kind: said[kind] for kind in TIMEOUTS if type(said.get(kind)) is int and said[kind] > 0})
    if not found and verdict.status == "timeout":
        found["sample"] = 1
    return found
