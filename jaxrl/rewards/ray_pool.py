"""The reward pool on ray actors."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import queue
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxrl.rewards.frames import BadFrame, message_of, read_message, read_scored, to_bytes
from jaxrl.rewards.lanes import LaneQueue, Lanes
from jaxrl.rewards.scorers import Scored, ScoreRequest
from jaxrl.rewards.tasks import MAX_ATTEMPTS, VerdictCounts, crashed, verdict_of
from jaxrl.rewards.worker import WorkerSettings
from jaxrl.rewards.workers import Workers
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey

SLACK_S = 60.0
"""Beyond a scorer's own limits, for ray to start an actor, or to carry a request and a verdict."""
GET_S = 30.0
"""For a value that ray says is there."""
_LOOK_EVERY_S = 1.0  # whether an actor's workers can still answer


class RayHost:
    """What one ray actor does: it has one worker process, and runs nothing of the user's itself."""

    def __init__(self, settings: bytes, env: dict[str, str], lanes: bytes):
        self._workers = Workers(
            pickle.loads(settings), num_workers=1, env=env, lanes=pickle.loads(lanes), clock=time.monotonic
        )
        self._numbers = itertools.count()

    def start(self) -> bytes:
        try:
            self._workers.wait_ready()
        except (ValueError, RunFailed) as error:
            return to_bytes({"error": str(error), "users": isinstance(error, ValueError)})
        return to_bytes({"error": ""})

    def score(self, request: bytes, source: str) -> bytes:
        """Scores one request; one at a time, while `drop` may be called beside it."""
        number = next(self._numbers)
        self._scoring = number
        self._workers.submit(number, request, source)
        while True:
            try:
                ended, scored, _ = self._workers.ended.get(timeout=_LOOK_EVERY_S)
                if ended == number:
                    break
            except queue.Empty:
                self._workers.check()
        retries: list[str] = []
        with contextlib.suppress(queue.Empty):
            while True:
                retries.append(self._workers.retries.get_nowait())
        return to_bytes({**message_of(scored, ""), "retries": retries})

    def drop(self) -> None:
        """Ends the scoring under way if it does not end by itself at once; `score` returns then, whatever it says."""
        self._workers.drop({self._scoring})


@dataclass(slots=True)
class _Task:
    key: SampleKey
    source: str
    lane: str
    limit_s: float  # with which a worker may be replaced, and so load the scorer, before each scoring
    request: bytes
    losses: int = 0  # actors that were lost with it
    cancelled: bool = False


@dataclass(slots=True)
class _Running:
    task: _Task
    actor: Any
    since_s: float


class RayRewardPool:
    """Worker processes anywhere in a ray cluster (`pip install jaxrl[ray]`), one CPU each.

    An actor has a worker process of its own below it (`jaxrl.rewards.workers`), which keeps the scorer's limits there,
    and what it returns is the JSON text of a verdict. So an actor that dies, or does not answer in time, was not ended
    by a scorer: its sample is scored again elsewhere, at most `reward.max_retries` times. When the cluster has lost
    every actor and gives no other, the run ends with `RunFailed`: nothing here waits without a limit.

    Samples are handed over inside `submit`, `completed` and `wait`, which a round calls all the time.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        num_workers: int,
        env: Mapping[str, str],
        lanes: Lanes,
        clock: Callable[[], float] = time.monotonic,
    ):
        try:
            import ray  # pyright: ignore[reportMissingImports]  (an optional extra)
        except ImportError as error:
            raise ValueError("reward.pool=ray needs ray, which is not installed: pip install 'jaxrl[ray]'") from error
        self._ray = ray
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            with _our_signals():
                ray.init(include_dashboard=False, log_to_driver=False)
        # two calls at once: one that scores, and one that says that it is not wanted any more
        actor_class = ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(RayHost)
        there = replace(settings, log="")  # a path of this machine
        self._new_actor = lambda: actor_class.remote(pickle.dumps(there), dict(env), pickle.dumps(lanes))
        self._start_limit_s = settings.start_timeout_s + SLACK_S
        self._settings, self._lanes = settings, lanes
        self._clock = clock
        self._counts = VerdictCounts()
        self._waiting = LaneQueue[_Task](lanes, num_workers)
        self._starting: dict[Any, tuple[Any, float]] = {}  # ref of start() -> actor, since when
        self._idle: list[Any] = []
        self._running: dict[Any, _Running] = {}  # by ref of score()
        self._lost_in_a_row = 0
        self._is_lost = False
        self._num_workers = num_workers
        self._num_cpus = ray.cluster_resources().get("CPU", 0)
        for _ in range(num_workers):
            self._start_actor()

    def warm(self) -> None:
        while self._starting:
            self._take_started(0.2)

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        lane = self._lanes.lane(prompt.source)
        once_s = (self._lanes.by_source[lane].timeout_s or math.inf) + self._settings.start_timeout_s
        limit_s = once_s * (1 + self._settings.max_retries) + SLACK_S
        request = pickle.dumps(ScoreRequest.of(prompt, sample, limits_s))
        self._waiting.put(lane, _Task(sample.key, prompt.source, lane, limit_s, request))
        self._hand_over()

    def cancel(self, keys: Collection[SampleKey]) -> None:
        self._waiting.keep(lambda task: task.key not in keys)
        for running in self._running.values():
            if running.task.key in keys and not running.task.cancelled:
                running.task.cancelled = True
                running.actor.drop.remote()

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
        return len(self._waiting) + sum(not running.task.cancelled for running in self._running.values())

    def take_metrics(self) -> dict[str, float]:
        return self._counts.take()

    def close(self) -> None:
        actors = [*self._idle, *(actor for actor, _ in self._starting.values())]
        if not self._is_lost:  # a call to a cluster that is gone blocks
            for actor in actors + [running.actor for running in self._running.values()]:
                self._kill(actor)
        self._idle, self._starting, self._running = [], {}, {}
        self._waiting.take_all()
        if self._owns_ray:
            self._ray.shutdown()

    def _start_actor(self) -> None:
        actor = self._new_actor()
        self._starting[actor.start.remote()] = actor, time.monotonic()

    def _take_started(self, timeout_s: float) -> None:
        for ref in self._finished(list(self._starting), timeout_s):
            actor, _ = self._starting.pop(ref)
            try:
                report = read_message(self._ray.get(ref, timeout=GET_S))
            except (*self._failures, BadFrame) as error:
                self._lost(actor, f"a ray actor failed while it started: {type(error).__name__}")
                continue
            if report.get("error"):
                raise (ValueError if report.get("users") else RunFailed)(f"{report['error']} (in a ray actor)")
            self._idle.append(actor)
        for ref, (actor, since_s) in list(self._starting.items()):
            if time.monotonic() - since_s > self._start_limit_s:
                del self._starting[ref]
                why = f"a ray actor was not ready after {self._start_limit_s:.0f} s"
                if not self._idle and not self._running:
                    raise self._given_up(
                        f"gives no worker: {why}; it began with {self._num_cpus:g} CPUs, of which reward.num_workers "
                        f"asks for {self._num_workers}"
                    )
                self._lost(actor, why)

    def _hand_over(self) -> None:
        while self._idle and (task := self._waiting.pop()) is not None:
            actor = self._idle.pop()
            ref = actor.score.remote(task.request, task.source)
            self._running[ref] = _Running(task, actor, time.monotonic())

    def _poll(self, timeout_s: float) -> list[Verdict]:
        self._take_started(0.0)
        self._hand_over()
        verdicts: list[Verdict] = []
        for ref in self._finished(list(self._running), timeout_s):
            running = self._running.pop(ref)
            try:
                message = read_message(self._ray.get(ref, timeout=GET_S))
                scored = read_scored(message)
            except (*self._failures, BadFrame) as error:
                verdicts += self._try_again(running, f"a ray actor failed: {type(error).__name__}")
                continue
            for why in message.get("retries", ()):
                self._counts.retried(why)
            self._lost_in_a_row = 0
            self._idle.append(running.actor)
            self._waiting.done(running.task.lane)
            verdicts += self._verdict(running.task, scored)
        for ref, running in list(self._running.items()):
            if time.monotonic() - running.since_s > running.task.limit_s:
                del self._running[ref]
                verdicts += self._try_again(running, f"a ray actor was silent for {running.task.limit_s:.0f} s")
        self._hand_over()
        return verdicts

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return self._ray.exceptions.RayError, self._ray.exceptions.GetTimeoutError

    def _try_again(self, running: _Running, why: str) -> list[Verdict]:
        self._lost(running.actor, why)
        task = running.task
        task.losses += 1
        if task.losses > self._settings.max_retries or task.cancelled:
            self._waiting.done(task.lane)
            return self._verdict(task, crashed(why, task.losses))
        self._counts.retried(why)
        self._waiting.put_back(task.lane, task)
        return []

    def _lost(self, actor: Any, why: str) -> None:
        """Another actor for one that is gone; the run ends when none has come to anything for too long."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MAX_ATTEMPTS * self._num_workers:
            raise self._given_up(f"is lost: {self._lost_in_a_row} actors in a row failed, the last one because {why}")
        self._counts.restarted(f"{why}; started again")
        self._kill(actor)
        self._start_actor()

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(*self._failures):  # of one that is gone
            self._ray.kill(actor)

    def _given_up(self, why: str) -> RunFailed:
        self._is_lost = True
        return RunFailed(f"reward: the ray cluster {why}")

    def _finished(self, refs: list[Any], timeout_s: float) -> list[Any]:
        if not refs:
            time.sleep(timeout_s)
            return []
        self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        return self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]

    def _verdict(self, task: _Task, scored: Scored) -> list[Verdict]:
        """The verdict of a task; none if it was cancelled."""
        if task.cancelled:
            return []
        return [self._counts.add(verdict_of(self._clock(), task.key, self._lanes.named(task.source, scored)))]


@contextlib.contextmanager
def _our_signals() -> Iterator[None]:
    """Puts the handlers of SIGINT and SIGTERM back that ray replaces: with them a run saves, and ends."""
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            # None: one in C, which Python cannot put back
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
