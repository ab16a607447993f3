"""What the reward pools share: the ways in which a sample fails, and a step's counts."""

from __future__ import annotations

import logging
from collections import Counter

from jaxrl.rewards.scorers import Scored
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import SampleKey

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # workers that may end around one sample, or while they start, before it is held to be the reason


def timed_out(limit_s: float) -> Scored:
    return "timeout", 0.0, {"error": f"no score within reward.timeout_s ({limit_s:g} s)"}, limit_s


def crashed(why: str) -> Scored:
    return "crash", 0.0, {"error": why}, 0.0


def verdict_of(time_s: float, key: SampleKey, scored: Scored) -> Verdict:
    """The verdict on a sample. A scorer says that a clock decided it with `cut_off` above 0 in its info, and that
    something outside the run did with `outside` true."""
    status, reward, info, duration_s = scored
    cut_off = info.get("cut_off", 0)
    outside = info.get("outside") is True or (type(cut_off) in (int, float) and cut_off > 0)
    return Verdict(time_s, key, reward, status, info, duration_s, outside)


class VerdictCounts:
    """Counts verdicts, and warns of failed ones: the 1st, 2nd, 4th, 8th, ... of each status."""

    def __init__(self) -> None:
        self._since_last = Counter[str]()
        self._seconds = 0.0
        self._restarts = 0
        self._ever = Counter[str]()

    def add(self, verdict: Verdict) -> Verdict:
        self._since_last[verdict.status] += 1
        self._seconds += verdict.duration_s
        if verdict.status != "ok":
            self._ever[verdict.status] += 1
            count = self._ever[verdict.status]
            if count & (count - 1) == 0:
                why = verdict.info.get("error", "")
                _log.warning("reward 0 for %s: %s, number %d: %s", verdict.key, verdict.status, count, why)
        return verdict

    def restarted(self, why: str) -> None:
        self._restarts += 1
        _log.warning("reward pool: %s", why)

    def take(self) -> dict[str, float]:
        n = self._since_last
        metrics = {
            "reward/num_scored": float(n.total()),
            "reward/errors": float(n["error"]),
            "reward/timeouts": float(n["timeout"]),
            "reward/crashes": float(n["crash"]),
            "reward/pool_restarts": float(self._restarts),
            "reward/seconds": self._seconds,
        }
        self._since_last, self._seconds, self._restarts = Counter(), 0.0, 0
        return metrics
