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

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.config.domains import domains, is_staged, needs_workers
from jaxrl.rewards.domain_limits import DomainLimits
from jaxrl.rewards.pool_base import RewardPool, describe_sample
from jaxrl.rewards.process_pool import ProcessRewardPool
from jaxrl.rewards.scorers import Scorer
from jaxrl.rewards.worker import WorkerSettings
from jaxrl.types import SampleKey

__all__ = ["ProcessRewardPool", "RewardPool", "build_pool"]


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
    reward = config.reward
    settings = WorkerSettings(
        scorer=pickle.dumps(scorer),
        loads=scorer.loads,
        preload=scorer.preload,
        start_timeout_s=reward.start_timeout_s,
        max_retries=reward.max_retries,
        max_memory_gib=reward.max_memory_gib,
        fresh_process=reward.fresh_process,
        log=str(log.resolve()) if log is not None else "",
    )
    limits, env = DomainLimits.of(domains(reward)), named_variables("reward.env", reward.env)
    options: Any = {"num_workers": reward.num_workers, "env": env, "limits": limits, "where": where}
    if reward.pool == "process":
        return ProcessRewardPool(settings, **options)
    from jaxrl.rewards.ray_pool import RayRewardPool

    return RayRewardPool(settings, **options)


def named_variables(option: str, names: Sequence[str]) -> dict[str, str]:
    """The variables that `option` names, with their values. Raises ValueError where one is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(f"{option}: the environment has no variable {missing[0]!r}")
    return {name: os.environ[name] for name in names}
