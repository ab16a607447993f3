"""The reward pool on Ray (`pip install jaxrl[ray]`), from the trainer's side.

`RayRewardPool` starts a process that uses ray (`jaxrl.rewards.ray_actors`), sends it samples and reads verdicts. A
process that ends, as ray makes it when the cluster's head is gone, or that says nothing for `SILENT_S`, is started
again after a pause, and gets all samples again that have no verdict. After `MAX_ATTEMPTS` of them in a row without a
verdict the run ends with `RunFailed`.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import pickle
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.processes.messages import BadMessage
from jaxrl.processes.ray_process import RayProcess
from jaxrl.processes.worker_supervisor import MAX_ATTEMPTS
from jaxrl.rewards.domain_limits import DomainLimits
from jaxrl.rewards.pool_base import describe_sample, verdict_of
from jaxrl.rewards.ray_actors import RaySetup
from jaxrl.rewards.reward_metrics import PoolMetrics
from jaxrl.rewards.scorers import ScoreRequest
from jaxrl.rewards.verdict_messages import read_scored
from jaxrl.rewards.worker import WorkerSettings
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey

PAUSES_S = (0.0, 15.0, 45.0)
"""Before it is started again, by how often it ended in a row."""


@dataclass(slots=True)
class _Task:
    key: SampleKey
    source: str
    request: bytes


class RayRewardPool:
    """Worker processes anywhere in a ray cluster, one CPU each. Arguments as of `ProcessRewardPool`."""

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
        if importlib.util.find_spec("ray") is None:
            raise ValueError("reward.pool=ray needs ray, which is not installed: pip install 'jaxrl[ray]'")
        self._setup = pickle.dumps(RaySetup(settings, limits, dict(env), num_workers, _address_in_use()))
        self._limits, self._clock = limits, clock
        self._counts = PoolMetrics(where)
        self._numbers = itertools.count()
        self._pending: dict[int, _Task] = {}
        self._is_ready = False
        self._losses = 0  # in a row
        self._again_s = 0.0  # when the process is started again, where there is none
        self._driver: RayProcess | None = RayProcess("jaxrl.rewards.ray_actors", self._setup)

    def warm(self) -> None:
        while not self._is_ready:
            self._look(0.5)

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        number = next(self._numbers)
        request = pickle.dumps(ScoreRequest.of(prompt, sample, limits_s))
        task = self._pending[number] = _Task(sample.key, prompt.source, request)
        if self._driver is not None:
            self._driver.send("score", number, task.source, task.request)

    def cancel(self, keys: Collection[SampleKey]) -> None:
        gone = {number for number, task in self._pending.items() if task.key in keys}
        for number in gone:
            del self._pending[number]
        if self._driver is not None and gone:
            self._driver.send("drop", gone)

    def completed(self) -> list[Verdict]:
        return self._look(0.0)

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        verdicts = self._look(0.0)
        while self._pending and not verdicts and (left := deadline - time.monotonic()) > 0:
            verdicts = self._look(min(left, 1.0))
        return verdicts

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        return self._counts.take()

    def close(self) -> None:
        self._pending = {}
        if self._driver is not None:
            self._driver.end()
        self._driver = None

    def _look(self, timeout_s: float) -> list[Verdict]:
        """The verdicts that have come; waits so long for a first message. Raises as `RayActors.poll`."""
        if self._driver is None:
            pause_s = self._again_s - time.monotonic()
            if pause_s > 0:
                time.sleep(min(pause_s, timeout_s))
                return []
            self._driver = RayProcess("jaxrl.rewards.ray_actors", self._setup)
            for number, task in self._pending.items():
                self._driver.send("score", number, task.source, task.request)
        driver, verdicts = self._driver, list[Verdict]()
        try:
            for message in driver.receive(timeout_s):
                verdicts += self._understand(message)
        except BadMessage as bad:
            self._lost(f"it sent {bad}")
        else:
            if driver.problem is not None:
                self._lost(driver.problem)
        return verdicts

    def _understand(self, message: dict[str, Any]) -> list[Verdict]:
        if "ready" in message:
            self._is_ready = True
        elif "fatal" in message:
            raise (ValueError if message.get("users") else RunFailed)(str(message["fatal"]))
        elif "retried" in message:
            self._counts.retried(str(message["retried"]))
        elif "restarted" in message:
            self._counts.restarted(str(message["restarted"]))
        elif (task := self._pending.pop(message.get("number", -1), None)) is not None:
            self._losses = 0
            scored = self._limits.named(task.source, read_scored(message))
            return [self._counts.add(verdict_of(self._clock(), task.key, scored))]
        return []

    def _lost(self, why: str) -> None:
        assert self._driver is not None
        self._driver.end()
        self._driver = None
        self._losses += 1
        if self._losses >= MAX_ATTEMPTS:
            raise RunFailed(
                f"reward: the ray cluster is lost: the process that uses it ended {self._losses} times in a row, the "
                f"last time because {why}"
            )
        self._again_s = time.monotonic() + PAUSES_S[self._losses - 1]
        self._counts.restarted(f"the process that uses ray is started again: {why}")


def _address_in_use() -> str | None:
    """Of the cluster that this process uses itself; None where it uses none."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None
