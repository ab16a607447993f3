"""The reward pool on ray actors."""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from jaxrl.rewards.scorers import Scored, Scorer, ScoreRequest
from jaxrl.rewards.tasks import MAX_ATTEMPTS, WORKER_START_S, Task, VerdictCounts, crashed, timed_out
from jaxrl.rewards.worker import look_around, score
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey


class _RayWorker:
    """What one ray actor does."""

    def __init__(self, pickled: bytes):
        self._pickled = pickled

    def start(self) -> tuple[str, bool]:
        return look_around(self._pickled)

    def score(self, request: bytes) -> Scored:
        return score(self._pickled, request)


class RayRewardPool:
    """Worker processes anywhere in a ray cluster (`pip install jaxrl[ray]`), one CPU each.

    An actor has one sample at a time, so the clock never counts time in a queue. The clock starts at hand-over and so
    includes the transfer. Samples are handed over, and timeouts noticed, inside `submit`, `completed` and `wait`, which
    a round calls all the time.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        num_workers: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        try:
            import ray  # pyright: ignore[reportMissingImports]  (an optional extra)
        except ImportError as error:
            raise ValueError("reward.pool=ray needs ray, which is not installed: pip install 'jaxrl[ray]'") from error
        self._ray = ray
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(include_dashboard=False, log_to_driver=False)
        self._actor_class = ray.remote(num_cpus=1, max_restarts=0)(_RayWorker)
        self._scorer = pickle.dumps(scorer)
        self._timeout_s = timeout_s or math.inf
        self._clock = clock
        self._counts = VerdictCounts()
        self._waiting: deque[Task] = deque()
        self._starting: dict[Any, Any] = {}  # ref of start() -> actor
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[Task, Any, float]] = {}  # ref of score() -> task, actor, start time
        self._failed_starts = 0
        self._num_workers = num_workers
        for _ in range(num_workers):
            self._start_actor()

    def warm(self) -> None:
        deadline = time.monotonic() + WORKER_START_S
        while self._starting:
            if time.monotonic() > deadline:
                cpus = self._ray.cluster_resources().get("CPU", 0)
                raise RuntimeError(
                    f"reward.num_workers ({self._num_workers}) actors of one CPU each were not ready after "
                    f"{WORKER_START_S:.0f} s: the ray cluster has {cpus:g} CPUs"
                )
            self._take_started(0.2)

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        self._waiting.append(Task(sample.key, pickle.dumps(ScoreRequest.of(prompt, sample))))
        self._hand_over()

    def cancel(self, keys: Collection[SampleKey]) -> None:
        self._waiting = deque(task for task in self._waiting if task.key not in keys)
        for task, _, _ in self._running.values():
            task.cancelled |= task.key in keys

    def completed(self) -> list[Verdict]:
        return self._poll(0.0)

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not (verdicts := self._poll(0.05)):
            if not self.num_pending or time.monotonic() >= deadline:
                break
        return verdicts

    @property
    def num_pending(self) -> int:
        return len(self._waiting) + sum(not task.cancelled for task, _, _ in self._running.values())

    def take_metrics(self) -> dict[str, float]:
        return self._counts.take()

    def close(self) -> None:
        for actor in [*self._idle, *self._starting.values(), *(actor for _, actor, _ in self._running.values())]:
            self._ray.kill(actor)
        self._idle, self._starting, self._running = [], {}, {}
        self._waiting.clear()
        if self._owns_ray:
            self._ray.shutdown()

    def _start_actor(self) -> None:
        actor = self._actor_class.remote(self._scorer)
        self._starting[actor.start.remote()] = actor

    def _take_started(self, timeout_s: float) -> None:
        for ref in self._finished(list(self._starting), timeout_s):
            actor = self._starting.pop(ref)
            try:
                error, _ = self._ray.get(ref)
            except self._ray.exceptions.RayActorError as died:
                self._failed_starts += 1
                if self._failed_starts >= MAX_ATTEMPTS:
                    raise RuntimeError("reward: ray actors die while they start") from died
                self._start_actor()
                continue
            if error:
                raise RuntimeError(f"reward: the scorer cannot be loaded in a ray actor: {error}")
            self._failed_starts = 0
            self._idle.append(actor)

    def _hand_over(self) -> None:
        while self._waiting and self._idle:
            task, actor = self._waiting.popleft(), self._idle.pop()
            self._running[actor.score.remote(task.request)] = (task, actor, time.monotonic())

    def _poll(self, timeout_s: float) -> list[Verdict]:
        self._take_started(0.0)
        self._hand_over()
        verdicts: list[Verdict] = []
        for ref in self._finished(list(self._running), timeout_s):
            task, actor, _ = self._running.pop(ref)
            try:
                scored = self._ray.get(ref)
                self._idle.append(actor)
            except self._ray.exceptions.RayActorError:
                scored = crashed("the scorer's ray actor died")
                self._start_actor()
            verdicts += self._verdict(task, scored)
        for ref, (task, actor, start) in list(self._running.items()):
            if time.monotonic() - start > self._timeout_s:
                del self._running[ref]
                self._ray.kill(actor)
                self._start_actor()
                verdicts += self._verdict(task, timed_out(self._timeout_s))
        self._hand_over()
        return verdicts

    def _finished(self, refs: list[Any], timeout_s: float) -> list[Any]:
        if not refs:
            time.sleep(timeout_s)
            return []
        self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        return self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]

    def _verdict(self, task: Task, scored: Scored) -> list[Verdict]:
        """The verdict of a task; none if it was cancelled."""
        status, reward, info, duration_s = scored
        if task.cancelled:
            return []
        return [self._counts.add(Verdict(self._clock(), task.key, reward, status, info, duration_s))]
