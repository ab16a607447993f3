"""Rewards beside the rollout: samples go to worker processes while others still decode (RollPacker, section 4.3).

A scorer is foreign code that runs on the model's text: it may raise, return nonsense, hang, or end its process. Each of
these costs only the sample at hand (reward 0, a status, a counted warning).

Nothing of the user's runs in the trainer, not even the reward file's import, and no object that a worker made gets
there: only JSON text, whose length and values are checked. Workers have an environment of named variables, no terminal,
and bounded memory. They end with the pool, and what a sample starts ends with the sample.

Only the scoring itself is timed: a worker loads the scorer before its first task, and the clock starts when it is
handed a task. `duration_s` is measured in the worker; for a sample that timed out it is the limit, for a crashed one 0.

Verdicts come in the order in which scoring ended; a round wants them in the order in which samples
completed, and the backend sorts them (docs/architecture.md).
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from jaxrl.config import Config
from jaxrl.rewards.process_pool import ProcessRewardPool
from jaxrl.rewards.ray_pool import RayRewardPool
from jaxrl.rewards.scorers import Scorer
from jaxrl.rewards.worker import WorkerSettings
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey


class RewardPool(Protocol):
    """Scores samples in the background. Used from one thread."""

    def warm(self) -> None:
        """Waits until the workers have loaded the scorer.

        Raises:
          ValueError: it cannot be loaded; a sentence that names the option, and the file and line if it is the user's.
          RunFailed: no workers can be started.
        """
        ...

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        """Queues a finished sample; returns at once. Exactly one verdict follows, unless it is cancelled.

        `limits_s`: as in `jaxrl.rewards.scorers.ScoreRequest`.
        """
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


def build_pool(
    config: Config, scorer: Scorer, clock: Callable[[], float] = time.monotonic, log: Path | None = None
) -> RewardPool:
    """The pool that `reward.pool` asks for. It begins to start its workers, and does not wait for them.

    Args:
      clock: stamps its verdicts (the backend's own).
      log: the file for what the scorer prints, of which some MiB are kept; none: it is dropped.

    Raises:
      ValueError: `reward.env` names a variable that is not set, or ray is not installed.
    """
    reward = config.reward
    settings = WorkerSettings(
        pickle.dumps(scorer),
        scorer.loads,
        scorer.preload,
        0.0 if reward.kind == "code" else reward.timeout_s,  # its test cases have limits, which its sandbox keeps
        reward.start_timeout_s,
        reward.max_memory_gib,
        reward.fresh_process,
        str(log.resolve()) if log is not None else "",
    )
    pool = {"process": ProcessRewardPool, "ray": RayRewardPool}[reward.pool]
    return pool(settings, num_workers=reward.num_workers, env=_named(reward.env), clock=clock)


def _named(names: Sequence[str]) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(f"reward.env: the environment has no variable {missing[0]!r}")
    return {name: os.environ[name] for name in names}
