"""Rewards beside the rollout: samples go to worker processes while others still decode (RollPacker, section 4.3).

A scorer is foreign code that runs on the model's text: it may raise, return nonsense, hang, or end its process. Each of
these costs only the sample at hand (reward 0, a status, a counted warning).

Only the scoring itself is timed: a worker loads the scorer before its first task, and the clock starts when it takes a
task. `duration_s` is measured in the worker; for a sample that timed out it is the limit, for a crashed one 0.

Verdicts come in the order in which scoring ended; a round wants them in the order in which samples
completed, and the backend sorts them (docs/architecture.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

from jaxrl.config import Config
from jaxrl.rewards.process_pool import ProcessRewardPool
from jaxrl.rewards.ray_pool import RayRewardPool
from jaxrl.rewards.scorers import Scorer
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey


class RewardPool(Protocol):
    """Scores samples in the background. Used from one thread."""

    def warm(self) -> None:
        """Starts the workers and loads the scorer there; raises if it cannot be loaded."""
        ...

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        """Queues a finished sample; returns at once. Exactly one verdict follows, unless it is cancelled."""
        ...

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """No verdict follows on those of these samples that were submitted before. Their scoring may go on without
        being read: the worker is free again when it ends or times out."""
        ...

    def completed(self) -> list[Verdict]:
        """The verdicts that have come in since the last call; never waits."""
        ...

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        """Waits for at least one verdict; empty when nothing is pending or the time is up."""
        ...

    @property
    def num_pending(self) -> int:
        """Samples that were submitted and have not had their verdict handed out."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call: `reward/{num_scored,errors,timeouts,crashes,pool_restarts,seconds}`."""
        ...

    def close(self) -> None:
        """Ends the workers; pending samples get no verdict."""
        ...


def build_pool(config: Config, scorer: Scorer, clock: Callable[[], float] = time.monotonic) -> RewardPool:
    """The pool that `reward.pool` asks for; `clock` stamps its verdicts (the backend's own)."""
    pool = {"process": ProcessRewardPool, "ray": RayRewardPool}[config.reward.pool]
    return pool(scorer, num_workers=config.reward.num_workers, timeout_s=config.reward.timeout_s, clock=clock)
