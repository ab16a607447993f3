"""Rewards beside the rollout: samples go to worker processes while others still decode (RollPacker, section 4.3).

A scorer is other people's code on the model's text: it may raise, answer nonsense, hang, or take its process down. Each
of these costs its own sample (reward 0, a status, a counted warning) and nothing else.

What the processes are. Never forks of the trainer: its jax threads do not survive one. On Linux they are forked off a
fork server, a clean process that has imported the scorer's libraries once, so that a replacement for a killed worker is
there in milliseconds; elsewhere they are spawned. They do not import jax (this file and what it imports do not; with
either start method Python runs the main module's top level in them, so a main module must not either: `warm` warns).

What is timed. The scoring itself: a worker loads the scorer before it takes its first task, and the clock starts when
it takes one. `duration_s` is measured in the worker; a sample that timed out has the limit, a crashed one 0.

On pebble, whose pool does the killing and replacing, four things are kept out of harm's way. Everything crosses the
pipes as bytes or plain values, because an object that cannot be unpickled there loses its task, or breaks the pool. The
worker's own handler of SIGTERM is taken back: in native code it would never run, and the whole pool would wait three
seconds for the kill. A worker that dies between tasks breaks the pool: it is rebuilt, and what was pending submitted
again. And pebble's own workers outlive a trainer that was killed while they hang: each watches its parent.

Verdicts come in the order in which scoring ended; a round wants them in the order in which samples completed (design
section 3), and sorts them itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

import pebble

from jaxrl.config import Config
from jaxrl.rewards.scorers import Scored, Scorer, ScoreRequest, describe, score_safely
from jaxrl.scheduling.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3  # pools that one sample may see break before it is held to be the reason
_WORKER_START_S = 120.0  # for imports, on a loaded machine


class RewardPool(Protocol):
    """Scores samples in the background. Used from one thread."""

    def warm(self) -> None:
        """Starts the workers and loads the scorer there; raises if it cannot be loaded."""
        ...

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        """Queues a finished sample; returns at once. Exactly one verdict follows, unless it is cancelled."""
        ...

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """No verdict follows on these samples, as far as they were submitted before. Their scoring may go on unheard:
        its worker is free when it ends or times out."""
        ...

    def completed(self) -> list[Verdict]:
        """The verdicts that have come in since the last call; never waits."""
        ...

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        """Waits for at least one verdict; empty when nothing is pending or the time is up."""
        ...

    @property
    def num_pending(self) -> int:
        """Samples submitted whose verdict has not been handed out."""
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


@dataclass(slots=True)
class _Task:
    key: SampleKey
    request: bytes
    attempts: int = 0
    cancelled: bool = False  # of a task that is with a ray actor


class _Counts:
    """Counts verdicts, and warns of the bad ones: the 1st, 2nd, 4th, 8th, ... of each status."""

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


class ProcessRewardPool:
    """Worker processes on this machine."""

    def __init__(
        self,
        scorer: Scorer,
        *,
        num_workers: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._scorer = pickle.dumps(scorer)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._clock = clock
        self._counts = _Counts()
        self._ids = itertools.count()
        self._pending: dict[int, _Task] = {}
        self._done: queue.SimpleQueue[tuple[int, Future[Scored], float]] = queue.SimpleQueue()
        self._context = _context(scorer.preload)
        self._pool = self._new_pool()

    def _new_pool(self) -> pebble.ProcessPool:
        return pebble.ProcessPool(
            max_workers=self._num_workers, initializer=_start_worker, initargs=(self._scorer,), context=self._context
        )

    def warm(self) -> None:
        futures = [self._pool.schedule(_look_around, args=(self._scorer,)) for _ in range(self._num_workers)]
        try:
            for error, has_jax in [future.result(timeout=_WORKER_START_S) for future in futures]:
                if error:
                    raise RuntimeError(f"reward: the scorer cannot be loaded in a worker process: {error}")
                if has_jax:
                    _log.warning(
                        "reward workers import jax, which costs start-up time and memory: the custom reward file does, "
                        "or the main module at its top level"
                    )
        except TimeoutError as error:
            raise RuntimeError(f"reward: no worker process was ready after {_WORKER_START_S:.0f} s") from error
        except (BrokenProcessPool, pebble.ProcessExpired) as error:
            raise RuntimeError("reward: worker processes die while they start") from error

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        task_id = next(self._ids)
        self._pending[task_id] = _Task(sample.key, pickle.dumps(ScoreRequest.of(prompt, sample)))
        if self._pool.active:
            self._schedule(task_id)
        else:
            self._rebuild()  # submits all that is pending

    def cancel(self, keys: Collection[SampleKey]) -> None:
        # pebble would kill the worker for it, and start another, also for tasks that wait in its pipe
        self._pending = {task_id: task for task_id, task in self._pending.items() if task.key not in keys}

    def completed(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        while not self._done.empty():
            verdicts.extend(self._settle(*self._done.get()))
        if self._pending and not self._pool.active:
            verdicts.extend(self._rebuild())
        return verdicts

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        verdicts = self.completed()
        while self._pending and not verdicts:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # in slices: a pool may break without a word about tasks that it had not begun
            with contextlib.suppress(queue.Empty):
                verdicts = self._settle(*self._done.get(timeout=min(left, 1.0)))
            verdicts += self.completed()
        return verdicts

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        return self._counts.take()

    def close(self) -> None:
        self._pending.clear()
        self._pool.stop()
        self._pool.join()

    def _schedule(self, task_id: int) -> None:
        task = self._pending[task_id]
        task.attempts += 1
        limit = self._timeout_s or None
        try:
            future = self._pool.schedule(_score, args=(self._scorer, task.request), timeout=limit)
        except RuntimeError:
            return  # it broke this very moment; `completed` sees that, and submits again
        future.add_done_callback(lambda future: self._done.put((task_id, future, self._clock())))

    def _settle(self, task_id: int, future: Future[Scored], time_s: float) -> list[Verdict]:
        """The verdict of one finished task: none if it has had one, or is to be tried again."""
        if task_id not in self._pending:
            return []
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            return []  # the pool is not active any more: `completed` submits again
        if error is None:
            scored = future.result()
        elif isinstance(error, TimeoutError):
            scored = _timed_out(self._timeout_s)
        elif isinstance(error, pebble.ProcessExpired):
            scored = _crashed(f"the scorer's process ended with exit code {error.exitcode}")
        else:
            raise error  # `_score` returns whatever happens: this is a bug of ours
        return [self._verdict(task_id, scored, time_s)]

    def _verdict(self, task_id: int, scored: Scored, time_s: float) -> Verdict:
        status, reward, info, duration_s = scored
        return self._counts.add(Verdict(time_s, self._pending.pop(task_id).key, reward, status, info, duration_s))

    def _rebuild(self) -> list[Verdict]:
        """A new pool for a broken one. A sample that has been there each time is held to be what breaks them."""
        self._pool.stop()
        self._pool.join()
        verdicts: list[Verdict] = []
        while not self._done.empty():  # results that came in before it broke
            verdicts.extend(self._settle(*self._done.get()))
        self._counts.restarted(f"a worker died between tasks; restarted, {len(self._pending)} samples submitted again")
        self._pool = self._new_pool()
        for task_id in list(self._pending):
            if self._pending[task_id].attempts < _MAX_ATTEMPTS:
                self._schedule(task_id)
            else:
                scored = _crashed(f"the reward pool broke {_MAX_ATTEMPTS} times with this sample in it")
                verdicts.append(self._verdict(task_id, scored, self._clock()))
        return verdicts


def _timed_out(limit_s: float) -> Scored:
    return "timeout", 0.0, {"error": f"no score within reward.timeout_s ({limit_s:g} s)"}, limit_s


def _crashed(why: str) -> Scored:
    return "crash", 0.0, {"error": why}, 0.0


def _context(preload: Sequence[str]) -> Any:
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))  # instead of the main module, which is the default
    return context


# ---------------------------------------------------------------- in the worker process


@functools.lru_cache(maxsize=1)
def _scorer(pickled: bytes) -> Scorer:
    scorer: Scorer = pickle.loads(pickled)
    scorer.load()
    return scorer


def _start_worker(pickled: bytes) -> None:
    """Runs in a new worker, before its first task. Never raises: that would take the pool down, while a scorer that
    cannot be loaded is said by `warm`, and by every score."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _look_around(pickled)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(0)


def _look_around(pickled: bytes) -> tuple[str, bool]:
    """(why the scorer cannot be loaded, or nothing; whether jax is here)."""
    try:
        _scorer(pickled)
    except (Exception, SystemExit) as error:
        return describe(error), "jax" in sys.modules
    return "", "jax" in sys.modules


def _score(pickled: bytes, request: bytes) -> Scored:
    return score_safely(functools.partial(_scorer, pickled), request)


# ---------------------------------------------------------------- ray


class _RayWorker:
    """What one ray actor does."""

    def __init__(self, pickled: bytes):
        self._pickled = pickled

    def start(self) -> tuple[str, bool]:
        return _look_around(self._pickled)

    def score(self, request: bytes) -> Scored:
        return _score(self._pickled, request)


class RayRewardPool:
    """Worker processes anywhere in a ray cluster (`pip install jaxrl[ray]`), one CPU each.

    One sample at a time is with an actor, so that the clock never counts a queue. It starts at hand-over and so holds
    the transfer; samples are handed over, and timeouts seen, inside `submit`, `completed` and `wait`, which a round
    calls all the time.
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
        self._counts = _Counts()
        self._waiting: deque[_Task] = deque()
        self._starting: dict[Any, Any] = {}  # ref of start() -> actor
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[_Task, Any, float]] = {}  # ref of score() -> task, actor, start time
        self._failed_starts = 0
        self._num_workers = num_workers
        for _ in range(num_workers):
            self._start_actor()

    def warm(self) -> None:
        deadline = time.monotonic() + _WORKER_START_S
        while self._starting:
            if time.monotonic() > deadline:
                cpus = self._ray.cluster_resources().get("CPU", 0)
                raise RuntimeError(
                    f"reward.num_workers ({self._num_workers}) actors of one CPU each were not ready after "
                    f"{_WORKER_START_S:.0f} s: the ray cluster has {cpus:g} CPUs"
                )
            self._take_started(0.2)

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        self._waiting.append(_Task(sample.key, pickle.dumps(ScoreRequest.of(prompt, sample))))
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
                if self._failed_starts >= _MAX_ATTEMPTS:
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
                scored = _crashed("the scorer's ray actor died")
                self._start_actor()
            verdicts += self._verdict(task, scored)
        for ref, (task, actor, start) in list(self._running.items()):
            if time.monotonic() - start > self._timeout_s:
                del self._running[ref]
                self._ray.kill(actor)
                self._start_actor()
                verdicts += self._verdict(task, _timed_out(self._timeout_s))
        self._hand_over()
        return verdicts

    def _finished(self, refs: list[Any], timeout_s: float) -> list[Any]:
        if not refs:
            time.sleep(timeout_s)
            return []
        self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        return self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]

    def _verdict(self, task: _Task, scored: Scored) -> list[Verdict]:
        """One, or none if nobody wants it any more."""
        status, reward, info, duration_s = scored
        if task.cancelled:
            return []
        return [self._counts.add(Verdict(self._clock(), task.key, reward, status, info, duration_s))]
