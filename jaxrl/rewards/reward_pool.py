"""Rewards beside the rollout: samples go to worker processes while others still decode (RollPacker, section 4.3).

A scorer is foreign code that runs on the model's text: it may raise, return nonsense, hang, or end its process. Each of
these costs only the sample at hand (reward 0, a status, a counted warning). Nothing of the user's runs in the trainer,
not even the reward file's import, and no object that a worker made gets there: only JSON text, whose length and values
are checked. Workers have an environment of named variables, no terminal, and bounded memory.

Only the scoring itself is timed: a worker loads the scorer before its first task. `duration_s` is measured in the
worker; for a sample that timed out it is the limit, for a crashed one 0. Verdicts come in the order in which scoring
ended; a round wants them in the order in which samples completed, and the backend sorts them (docs/architecture.md).
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from jaxrl.config import Config
from jaxrl.config.domains import domains, is_staged, needs_workers
from jaxrl.rewards.domain_limits import DomainLimits
from jaxrl.rewards.pool import Pool
from jaxrl.rewards.pool_worker import PoolSettings
from jaxrl.rewards.reward_metrics import PoolMetrics, describe_sample
from jaxrl.rewards.scorers import Scored, Scorer, ScoreRequest
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey


def verdict_of(time_s: float, key: SampleKey, scored: Scored) -> Verdict:
    """The verdict on a sample. A scorer says that a clock decided it with `cut_off` above 0 in its info, and that
    something outside the run did with `outside` true."""
    status, reward, info, duration_s = scored
    cut_off = info.get("cut_off", 0)
    outside = info.get("outside") is True or (type(cut_off) in (int, float) and cut_off > 0)
    return Verdict(time_s, key, reward, status, info, duration_s, outside)


class RewardPool(Protocol):
    """Scores samples in the background. Used from one thread."""

    def warm(self) -> None:
        """Waits until the workers have loaded the scorer. Raises ValueError where it cannot be loaded, with a
        sentence that names the option, and the file and line if it is the user's; RunFailed: no workers can be
        started."""
        ...

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        """Queues a finished sample; returns at once. Exactly one verdict follows, unless it is cancelled.
        `limits_s`: as in `jaxrl.rewards.scorers.ScoreRequest`."""
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
    def num_pending(self) -> int: ...

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call: `reward/{num_scored,errors,timeouts,crashes,pool_restarts,retries,seconds}`."""
        ...

    def close(self) -> None: ...


class FutureVerdicts:
    """The half of a reward pool that is the same for all whose results come as futures. `where`: how warnings name a
    sample; `clock`: stamps the verdicts."""

    def __init__(self, where: Callable[[SampleKey], str], clock: Callable[[], float]) -> None:
        self.counts = PoolMetrics(where)
        self._clock = clock
        self._pending: dict[Future[Scored], SampleKey] = {}
        self._ended: queue.SimpleQueue[tuple[Future[Scored], float]] = queue.SimpleQueue()

    def follow(self, key: SampleKey, future: Future[Scored]) -> None:
        """The future's result becomes the verdict on a sample."""
        self._pending[future] = key
        future.add_done_callback(lambda ended: self._ended.put((ended, self._clock())))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        for future in [future for future, key in self._pending.items() if key in keys]:
            del self._pending[future]
            future.cancel()

    def completed(self) -> list[Verdict]:
        found: list[Verdict] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found += self._verdict(*self._ended.get_nowait())
        return found

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        verdicts = self.completed()
        while self._pending and not verdicts and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                verdicts = self._verdict(*self._ended.get(timeout=min(left, 1.0)))
            verdicts += self.completed()
        return verdicts

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        return self.counts.take()

    def _verdict(self, future: Future[Scored], time_s: float) -> list[Verdict]:
        """Empty if the sample was cancelled."""
        key = self._pending.pop(future, None)
        return [] if key is None else [self.counts.add(verdict_of(time_s, key, future.result()))]


class WorkerRewards(FutureVerdicts):
    """Scores samples in the worker processes of a `Pool`, which begin to start when this is made."""

    def __init__(
        self,
        settings: PoolSettings,
        clock: Callable[[], float] = time.monotonic,
        where: Callable[[SampleKey], str] = describe_sample,
    ) -> None:
        super().__init__(where, clock)
        self._pool = Pool(settings)

    def warm(self) -> None:
        self._pool.wait_ready()

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        request = pickle.dumps(ScoreRequest.of(prompt, sample, limits_s))
        self.follow(sample.key, self._pool.submit(prompt.source, request))

    def completed(self) -> list[Verdict]:
        with contextlib.suppress(queue.Empty):
            while True:
                kind, why = self._pool.notes.get_nowait()
                (self.counts.retried if kind == "retried" else self.counts.restarted)(why)
        return super().completed()

    def close(self) -> None:
        self._pending.clear()
        self._pool.close()


def build_pool(
    config: Config,
    scorer: Scorer,
    log: Path | None = None,
    where: Callable[[SampleKey], str] = describe_sample,
) -> RewardPool:
    """What scores a run's samples: the pool that `reward.pool` asks for, or a router over it where domains or parts are
    configured, which pools for an endpoint or the run's devices join (`RewardRouter.join`). It begins to start its
    workers, and does not wait for them. Raises ValueError where `reward.env` names a variable that is not set, or ray
    is not installed.

    Args:
      scorer: of the worker processes (`jaxrl.rewards.domains.build_scorer`).
      log: the file for what the scorer prints and for tracebacks, of which some MiB are kept; none: it is dropped.
      where: how warnings name a sample whose reward failed.
    """
    reward = config.reward
    if not is_staged(reward):
        return _worker_pool(config, scorer, log, where)
    from jaxrl.rewards.router import RewardRouter

    pool = _worker_pool(config, scorer, log, where) if needs_workers(reward) else None
    return RewardRouter(domains(reward), pool, parts=reward.parts, max_retries=reward.max_retries)


def _worker_pool(config: Config, scorer: Scorer, log: Path | None, where: Callable[[SampleKey], str]) -> RewardPool:
    reward, on_ray = config.reward, config.reward.pool == "ray"
    settings = PoolSettings(
        scorer=pickle.dumps(scorer),
        loads=scorer.loads,
        preload=scorer.preload,
        num_workers=reward.num_workers,
        start_timeout_s=reward.start_timeout_s,
        max_retries=reward.max_retries,
        limits=DomainLimits.of(domains(reward)),
        max_memory_gib=reward.max_memory_gib,
        fresh_process=reward.fresh_process,
        env=named_variables("reward.env", reward.env),
        log=str(log.resolve()) if log is not None else "",
        on_ray=on_ray,
        ray_address=_address_in_use() if on_ray else None,
    )
    return WorkerRewards(settings, where=where)


def _address_in_use() -> str | None:
    """Of the Ray cluster that this process uses itself; None where it uses none."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None


def named_variables(option: str, names: Sequence[str]) -> dict[str, str]:
    """The variables that `option` names, with their values. Raises ValueError where one is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(f"{option}: the environment has no variable {missing[0]!r}")
    return {name: os.environ[name] for name in names}
