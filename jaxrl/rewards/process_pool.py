"""The reward pool of this machine: worker processes, each in a pebble pool of its own.

The processes are never forks of the trainer: its jax threads do not survive a fork. On Linux a fork server forks them:
a clean process that has imported the scorer's libraries once, so a killed worker is replaced in milliseconds. Elsewhere
they are spawned. They do not import jax: `jaxrl.rewards.worker` and its imports do not, and as Python runs the main
module's top level in them, that must not either (`warm` warns).

pebble kills and replaces workers. Five precautions are taken with it. (1) Only bytes and plain values cross the pipes:
an object that cannot be unpickled loses its task, or breaks the pool. (2) The worker's handler of SIGTERM is reset: it
would never run inside native code, and the whole pool would wait three seconds for the kill. (3) Each worker watches
its parent: pebble's workers outlive a trainer that was killed while they hang. (4) A pool holds one worker and one task
at a time: pebble blames a death on the first task that it believes to be with the dead worker. With several tasks in
the pipe and a result not read yet, that may be a task that ended well, and the guilty one would wait for its timeout.
(5) No worker reports exit code 0, which pebble takes for an orderly end: its sample would wait for its timeout, or for
ever.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import pebble

from jaxrl.rewards.scorers import Scored, Scorer, ScoreRequest, describe
from jaxrl.rewards.tasks import MAX_ATTEMPTS, WORKER_START_S, Task, VerdictCounts, crashed, timed_out
from jaxrl.rewards.worker import EXIT_ZERO, look_around, score, start_worker, worker_context
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

_log = logging.getLogger(__name__)


class _Handed(NamedTuple):
    """A task that a worker has."""

    worker: int
    pool: pebble.ProcessPool  # the worker's at that time
    task_id: int
    future: Future[Scored] | None  # none: the pool had broken before it took the task
    since_s: float

    @property
    def broken(self) -> bool:
        return self.future is None or isinstance(self.future.exception(), BrokenProcessPool)

    @property
    def lost(self) -> bool:
        """Whether the future will never end: the pool broke before it had noted the task, or the worker hangs while it
        starts."""
        if self.future is None or self.future.done():
            return False
        hangs = not self.future.running() and time.monotonic() - self.since_s > WORKER_START_S
        return hangs or not self.pool.active


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
        self._timeout_s = timeout_s
        self._clock = clock
        self._counts = VerdictCounts()
        self._ids = itertools.count()
        self._context = worker_context(scorer.preload)
        self._pools = [self._new_pool() for _ in range(num_workers)]
        self._ended: queue.SimpleQueue[tuple[_Handed, float]] = queue.SimpleQueue()
        # The pebble thread that ends a task hands on the next one, so these four are under the lock.
        self._lock = threading.Lock()
        self._pending: dict[int, Task] = {}
        self._queue: deque[int] = deque()  # pending tasks that no worker has
        self._idle = list(range(num_workers))
        self._handed: dict[int, _Handed] = {}  # by worker

    def _new_pool(self) -> pebble.ProcessPool:
        return pebble.ProcessPool(
            max_workers=1, initializer=start_worker, initargs=(self._scorer,), context=self._context
        )

    def warm(self) -> None:
        futures = [pool.schedule(look_around, args=(self._scorer,)) for pool in self._pools]
        try:
            for error, has_jax in [future.result(timeout=WORKER_START_S) for future in futures]:
                if error:
                    raise RuntimeError(f"reward: the scorer cannot be loaded in a worker process: {error}")
                if has_jax:
                    _log.warning(
                        "reward workers import jax, which costs start-up time and memory: the custom reward file does, "
                        "or the main module at its top level"
                    )
        except TimeoutError as error:
            raise RuntimeError(f"reward: no worker process was ready after {WORKER_START_S:.0f} s") from error
        except (BrokenProcessPool, pebble.ProcessExpired) as error:
            raise RuntimeError("reward: worker processes die while they start") from error

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        task, task_id = Task(sample.key, pickle.dumps(ScoreRequest.of(prompt, sample))), next(self._ids)
        with self._lock:
            self._pending[task_id] = task
            self._queue.append(task_id)
            worker = self._idle.pop() if self._idle else None
        if worker is not None:
            self._feed(worker)

    def cancel(self, keys: Collection[SampleKey]) -> None:
        # not pebble's own cancel, which would kill the worker and start another
        with self._lock:
            self._pending = {task_id: task for task_id, task in self._pending.items() if task.key not in keys}

    def completed(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        with contextlib.suppress(queue.Empty):
            while True:
                verdicts += self._settle(*self._ended.get_nowait())
        with self._lock:
            lost = [handed for handed in self._handed.values() if handed.lost]
            for handed in lost:  # from here on, no other thread feeds these workers
                del self._handed[handed.worker]
        for handed in lost:
            verdicts += self._replace(handed, self._clock())
        return verdicts

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        verdicts = self.completed()
        while self._pending and not verdicts and (left := deadline - time.monotonic()) > 0:
            # in slices: a lost task gives no signal
            with contextlib.suppress(queue.Empty):
                verdicts = self._settle(*self._ended.get(timeout=min(left, 1.0)))
            verdicts += self.completed()
        return verdicts

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        return self._counts.take()

    def close(self) -> None:
        with self._lock:
            self._pending = {}
        for pool in self._pools:
            pool.stop()
        for pool in self._pools:
            pool.join()

    # -- tasks to workers, in any thread -----------------------------------------------------------------------------

    def _feed(self, worker: int) -> None:
        """Hands the next task to a worker that has none."""
        pool, limit = self._pools[worker], self._timeout_s or None
        with self._lock:
            self._handed.pop(worker, None)
            while self._queue and self._queue[0] not in self._pending:
                self._queue.popleft()
            if not self._queue:
                self._idle.append(worker)
                return
            task_id = self._queue.popleft()
            task = self._pending[task_id]
            task.attempts += 1
            try:
                future = pool.schedule(score, args=(self._scorer, task.request), timeout=limit)
            except (RuntimeError, OSError):  # its worker died while it had nothing to do, or none can be started
                self._ended.put((_Handed(worker, pool, task_id, None, time.monotonic()), self._clock()))
                return
            handed = self._handed[worker] = _Handed(worker, pool, task_id, future, time.monotonic())
        future.add_done_callback(lambda _: self._end(handed))

    def _end(self, handed: _Handed) -> None:
        self._ended.put((handed, self._clock()))
        if handed.broken:
            return
        with self._lock:
            if self._handed.get(handed.worker) is not handed:
                return  # taken for lost, and yet it ended: `completed` has the worker
        self._feed(handed.worker)

    # -- verdicts, in the trainer's thread ---------------------------------------------------------------------------

    def _settle(self, handed: _Handed, time_s: float) -> list[Verdict]:
        """The verdict of one task; none if it was cancelled, or is to be tried again."""
        if handed.broken:
            return self._replace(handed, time_s)
        if handed.task_id not in self._pending:
            return []
        assert handed.future is not None
        error = handed.future.exception()
        if error is None:
            scored = handed.future.result()
        elif isinstance(error, TimeoutError):
            scored = timed_out(self._timeout_s)
        elif isinstance(error, pebble.ProcessExpired):
            code = 0 if error.exitcode == EXIT_ZERO else error.exitcode
            scored = crashed(f"the scorer's process ended with exit code {code}")
        else:  # `score` catches what scoring raises; what a scorer left behind (an alarm) may strike outside it
            scored = "error", 0.0, {"error": describe(error)}, 0.0
        return [self._verdict(handed.task_id, scored, time_s)]

    def _verdict(self, task_id: int, scored: Scored, time_s: float) -> Verdict:
        status, reward, info, duration_s = scored
        with self._lock:
            task = self._pending.pop(task_id)
        return self._counts.add(Verdict(time_s, task.key, reward, status, info, duration_s))

    def _replace(self, handed: _Handed, time_s: float) -> list[Verdict]:
        """A new pool for a broken one. A sample that was there each time is taken to be the cause."""
        if self._pools[handed.worker] is not handed.pool:
            return []  # replaced already, when its task was taken for lost
        handed.pool.stop()
        handed.pool.join()
        self._counts.restarted("a worker ended before it could say what it was doing; started again")
        self._pools[handed.worker] = self._new_pool()
        verdicts: list[Verdict] = []
        task = self._pending.get(handed.task_id)
        if task is not None and task.attempts >= MAX_ATTEMPTS:
            scored = crashed(f"{MAX_ATTEMPTS} workers in a row ended when they were given this sample")
            verdicts = [self._verdict(handed.task_id, scored, time_s)]
        elif task is not None:
            with self._lock:
                self._queue.appendleft(handed.task_id)
        self._feed(handed.worker)
        return verdicts
