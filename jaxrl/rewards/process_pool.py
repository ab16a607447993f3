"""The reward pool of this machine: samples to worker processes (`jaxrl.rewards.worker_pool`), verdicts back."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Collection, Mapping

from jaxrl.rewards.domain_limits import DomainLimits
from jaxrl.rewards.pool_base import describe_sample, taken, verdict_of, wait_for
from jaxrl.rewards.reward_metrics import PoolMetrics
from jaxrl.rewards.scorers import Scored, ScoreRequest
from jaxrl.rewards.worker import WorkerSettings
from jaxrl.rewards.worker_pool import WorkerPool
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey


class ProcessRewardPool:
    """Worker processes on this machine, which begin to start when the pool is made. `env`: variables that they get
    besides those that they always get."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        num_workers: int,
        env: Mapping[str, str],
        limits: DomainLimits,
        clock: Callable[[], float] = time.monotonic,
        where: Callable[[SampleKey], str] = describe_sample,
    ):
        self._counts = PoolMetrics(where)
        self._numbers = itertools.count()
        self._limits = limits
        self._pending: dict[int, tuple[SampleKey, str]] = {}  # with the source
        self._workers = WorkerPool(settings, num_workers=num_workers, env=env, limits=limits, clock=clock)

    def warm(self) -> None:
        self._workers.wait_ready()

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        number = next(self._numbers)
        self._pending[number] = sample.key, prompt.source
        self._workers.submit(number, pickle.dumps(ScoreRequest.of(prompt, sample, limits_s)), prompt.source)

    def cancel(self, keys: Collection[SampleKey]) -> None:
        gone = {number for number, (key, _) in self._pending.items() if key in keys}
        for number in gone:
            del self._pending[number]
        self._workers.drop(gone)

    def completed(self) -> list[Verdict]:
        for why in taken(self._workers.restarts):
            self._counts.restarted(why)
        for why in taken(self._workers.retries):
            self._counts.retried(why)
        return [verdict for each in taken(self._workers.ended) for verdict in self._verdict(*each)]

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        return wait_for(self, self._workers.ended, self._verdict, self._workers.check, timeout_s)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        return self._counts.take()

    def close(self) -> None:
        self._pending = {}
        self._workers.close()

    def _verdict(self, number: int, scored: Scored, time_s: float) -> list[Verdict]:
        """Empty if the sample was cancelled."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return []
        key, source = pending
        return [self._counts.add(verdict_of(time_s, key, self._limits.named(source, scored)))]
