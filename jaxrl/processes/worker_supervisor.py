"""The process between a pool and one worker: it forks the worker, hands it tasks, keeps the time, and ends it.

It runs no code of the user's, and has one thread. It passes on what is an answer to the task that the worker has;
anything else costs the worker its life, and that task. When a task has ended, every process that it started is killed
(what the worker started before its first task stays, until the worker ends). A worker that ended is replaced at once.

Which task is to blame for a death: the worker writes the task's id into shared memory when it takes it, before any
foreign code sees it. A worker that ended with that mark costs the task one of its `max_retries`; one that ended without
it costs an attempt, of which a task has `MAX_ATTEMPTS`. A worker that runs out of memory after it has done other tasks
may owe that to them, so the task is done again in a new one: that counts as a death.

A worker that is stopped (SIGSTOP) while it has nothing to do is replaced. With a task, its time limit counts; without a
limit it has `STOPPED_S` to go on. Tasks are samples to score, so sentences say "sample".
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import time
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from jaxrl.processes.messages import (
    HEADROOM_BYTES,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    TASK_ID_BYTES,
    BadMessage,
    Channel,
    read_message,
    read_task,
    to_bytes,
)
from jaxrl.processes.process_tree import adopt_orphans, descendants, kill, kill_descendants

MAX_ATTEMPTS = 3
"""Workers that may end while they start, or before they have begun with one task, before that is held to be the reason.
What dies with a task that it had begun with is `max_retries`' business."""
MAX_LOG_BYTES = 16 << 20
STOPPED_S = 10.0
DROP_S = 1.0
_EXIT_S = 0.5  # for a worker whose socket has closed to be gone by itself
_SLICE_S = 5.0  # the longest that a supervisor sleeps


@dataclass
class _Worker:
    pid: int
    channel: Channel
    deadline: float  # for getting ready, then for the task that it has
    is_ready: bool = False
    kept: frozenset[int] = frozenset()  # processes that it started before it was ready
    exit_code: int | None = None  # of one that has ended
    num_done: int = 0
    is_stopped: bool = False  # its deadline is then for going on, where there was none


@dataclass
class _Task:
    id: str
    limit_s: float  # 0: none
    payload: bytes
    attempts: int = 0  # workers that ended before they had begun with it
    deaths: int = 0  # of workers that had
    answer: dict[str, Any] | None = None  # one whose process has still to end
    is_last: bool = False  # whether the worker asked to be replaced after it


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """What a supervisor must know of its worker.

    Attributes:
      loads: what getting ready is, for errors. start_timeout_s: for that.
      max_retries: times that a task is done again whose worker died.
      fresh_process: whether each task has a process of its own, a fork of the worker.
      log: the file for what workers print; empty: it is dropped.
    """

    loads: str
    start_timeout_s: float
    max_retries: int
    fresh_process: bool = False
    log: str = ""


class Work(Protocol):
    """What workers do. Answers are JSON objects. `name`: of what runs in the worker, for errors: its process is
    `<name>'s process`; `start_option`: the option that sets `start_timeout_s`."""

    name: str
    start_option: str

    def run(self, supervisor: int, sock: socket.socket, taken: mmap.mmap, output: int) -> NoReturn:
        """The worker itself, in a fork of the supervisor, with which it ends: says `ready`, then answers each task
        that comes. `taken`: shared memory that gets the id of the task that it has begun with. `output`: the
        descriptor for what it prints."""
        ...

    def checked(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer in a worker's message. Raises BadMessage for anything else."""
        ...

    def failed(self, why: str) -> dict[str, Any]:
        """The answer to a task for which no worker gets ready."""
        ...

    def crashed(self, why: str, times: int = 1) -> dict[str, Any]:
        """To one whose workers have died, so many times."""
        ...

    def timed_out(self, limit_s: float) -> dict[str, Any]:
        """To one that took longer than it may."""
        ...


class WorkerSupervisor:
    """One worker's supervisor; `run` is all that its process does. `server`: a socket that closes with the fork server;
    `wakeup` can be read when a child has ended or stopped (`wake_by_children`)."""

    def __init__(
        self,
        pool: socket.socket,
        server: socket.socket,
        wakeup: socket.socket,
        work: Work,
        settings: SupervisorSettings,
    ):
        self._pool = Channel(pool, MAX_REQUEST_BYTES)
        self._server, self._wakeup, self._work, self._settings = server, wakeup, work, settings
        self._taken = mmap.mmap(-1, TASK_ID_BYTES)
        self._output = _Output(settings.log)
        self._worker: _Worker | None = None
        self._task: _Task | None = None
        self._is_dropped = False  # whether the answer to the task is not wanted any more
        self._failed_starts = 0  # in a row
        self._was_ready = False

    def run(self) -> NoReturn:
        """Returns when the pool or the fork server is gone, with no process left below."""
        adopt_orphans()
        self._start_worker()
        try:
            while not self._pool.ended:
                self._listen()
                self._keep_time()
        finally:
            self._end_worker()
            os._exit(0)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        worker, poll = self._worker, select.poll()
        channels = [self._pool] + ([worker.channel] if worker is not None else [])
        for channel in channels:
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.wants_write else 0))
        for other in (self._server, self._wakeup):
            poll.register(other, select.POLLIN)
        if self._output.source >= 0:
            poll.register(self._output.source, select.POLLIN)
        deadline = worker.deadline if worker is not None else math.inf
        wait_s = min(max(deadline - time.monotonic(), 0.0), _SLICE_S)
        ready = {fd for fd, _ in poll.poll(math.ceil(wait_s * 1000))}
        for channel in channels:
            if channel.wants_write:
                channel.flush()
        if self._output.source in ready:
            self._output.drain()
        if self._server.fileno() in ready:  # it says nothing: it has ended
            self._pool.close()
            return
        if self._wakeup.fileno() in ready:
            self._wakeup.recv(4096)
        self._reap()
        if (
            worker is not None
            and worker is self._worker
            and (worker.channel.fileno() in ready or worker.exit_code is not None)
        ):
            self._receive(worker)
        if self._pool.fileno() in ready:
            for payload in self._pool.receive():
                self._obey(payload)

    def _reap(self) -> None:
        """Notes which children have ended, stopped or gone on: the worker, and orphans of its making."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if pid == 0:
                    return
                worker = self._worker
                if worker is None or pid != worker.pid:
                    continue
                if os.WIFSTOPPED(status):
                    self._stopped(worker)
                elif os.WIFCONTINUED(status):
                    worker.deadline = math.inf if worker.is_stopped else worker.deadline
                    worker.is_stopped = False
                else:
                    worker.exit_code = os.waitstatus_to_exitcode(status)

    def _stopped(self, worker: _Worker) -> None:
        task = self._task
        if worker.is_ready and task is None:
            self._restart("a worker was stopped while it had nothing to do")
        elif worker.is_ready and task is not None and not self._has_taken(task):
            if not self._try_again(task):
                self._restart("a worker was stopped before it had taken its sample")
        elif not math.isfinite(worker.deadline):
            worker.deadline = time.monotonic() + STOPPED_S
            worker.is_stopped = True

    def _keep_time(self) -> None:
        worker = self._worker
        if worker is None or time.monotonic() < worker.deadline:
            return
        if not worker.is_ready:
            limit = f"{self._settings.start_timeout_s:g} s"
            error = f"{self._settings.loads} did not end within {self._work.start_option} ({limit})"
            self._not_started(error, final=not self._was_ready)
        elif self._is_dropped:
            self._settle(self._work.crashed("its verdict is not wanted any more"))
        elif not worker.is_stopped:
            assert self._task is not None, "a worker without a task has no time limit"
            self._settle(self._work.timed_out(self._task.limit_s))
        else:
            self._died(f"{self._work.name}'s process was stopped (SIGSTOP) for {STOPPED_S:g} s")

    # -- from the pool -------------------------------------------------------------------------------------------------

    def _obey(self, payload: bytes) -> None:
        if not payload:  # is this process alive?
            self._pool.send(to_bytes({"alive": True}))
            return
        if len(payload) == TASK_ID_BYTES:  # the answer to this task is not wanted any more
            self._drop(payload.decode())
            return
        assert self._task is None, "the pool hands over one task at a time"
        task_id, limit_s, _ = read_task(payload)
        self._task, self._is_dropped = _Task(task_id, limit_s, payload), False
        if self._worker is None:
            self._failed_starts = 0
            self._start_worker()
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        worker, task = self._worker, self._task
        if worker is not None and worker.is_ready and task is not None:
            self._taken[:] = bytes(TASK_ID_BYTES)
            worker.deadline = time.monotonic() + (task.limit_s or math.inf)
            worker.is_stopped = False
            worker.channel.send(task.payload)

    def _drop(self, task_id: str) -> None:
        """Ends a task that takes longer than `DROP_S` from here on; starting a worker costs as much."""
        worker, task = self._worker, self._task
        if worker is None or not worker.is_ready or task is None or task.id != task_id:
            return
        self._is_dropped = True
        worker.deadline = min(worker.deadline, time.monotonic() + DROP_S)

    # -- from the worker -----------------------------------------------------------------------------------------------

    def _receive(self, worker: _Worker) -> None:
        try:
            for payload in worker.channel.receive():
                self._handle(worker, read_message(payload))
                if self._worker is not worker:
                    return
        except BadMessage as bad:
            self._lose(f"{self._work.name}'s process sent {bad}")
            return
        if worker.channel.ended or worker.exit_code is not None:
            self._lose(self._last_words(worker))

    def _handle(self, worker: _Worker, message: dict[str, Any]) -> None:
        task = self._task
        if not worker.is_ready and message.get("ready") is True:
            worker.is_ready, worker.deadline = True, math.inf
            worker.kept = frozenset(descendants(os.getpid(), {worker.pid})) | frozenset(descendants(worker.pid))
            self._failed_starts, self._was_ready = 0, True
            self._pool.send(to_bytes({"ready": True, "has_jax": message.get("has_jax") is True}))
            self._hand_over()
        elif not worker.is_ready and message.get("ready") is False:
            self._not_started(str(message.get("error"))[:2000], final=True)
        elif task is not None and message.get("task") == task.id and task.answer is None:
            answer, task.is_last = self._work.checked(message), message.get("last") is True
            if task.is_last and self._may_owe_it_to_others(worker, task):
                self._died(
                    f"{self._work.name}'s process ran out of memory, in which earlier samples had left something"
                )
                return
            task.answer = answer
            if not self._settings.fresh_process:
                self._finish(task, answer)
        elif task is not None and message.get("ended") == task.id and self._settings.fresh_process:
            if task.answer is None:
                self._died(self._ended(message.get("code")))
            else:
                self._finish(task, task.answer)
        else:
            raise BadMessage("a verdict that it was not asked for")

    def _finish(self, task: _Task, answer: dict[str, Any]) -> None:
        """Passes an answer on; the worker lives, unless it asked to be replaced."""
        worker = self._worker
        assert worker is not None
        worker.deadline = math.inf
        worker.num_done += 1
        if task.is_last and not self._settings.fresh_process:
            self._end_worker()
        else:
            kill_descendants({worker.pid, *worker.kept}, below=(worker.pid,))
        self._task = None
        self._answer(task, answer)
        if self._worker is None:
            self._start_worker()

    def _last_words(self, worker: _Worker) -> str:
        deadline = time.monotonic() + _EXIT_S
        while worker.exit_code is None and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.001)
        if worker.exit_code is None:
            return f"{self._work.name} closed its process's connection to the pool"
        return self._ended(worker.exit_code)

    def _ended(self, code: Any) -> str:
        return f"{self._work.name}'s process ended with exit code {code}"

    # -- ends and beginnings of workers --------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        """The worker ended, or is not to be listened to any more."""
        worker, task = self._worker, self._task
        assert worker is not None
        if not worker.is_ready:
            self._not_started(f"{self._settings.loads} failed: {why}", final=False)
        elif task is None:
            self._restart(f"a worker without a sample was ended: {why}")
        elif task.answer is not None:  # of its own process; the worker died before it could say that it had ended
            self._settle(task.answer)
        elif self._has_taken(task):
            self._died(why)
        elif not self._try_again(task):
            self._restart(f"a worker ended before it had taken its sample: {why}")

    def _has_taken(self, task: _Task) -> bool:
        return self._taken[:] == task.id.encode()

    def _try_again(self, task: _Task) -> bool:
        """Counts an attempt; True if it was the last, and the task has its answer."""
        task.attempts += 1
        if task.attempts < MAX_ATTEMPTS:
            return False
        self._settle(self._work.crashed(f"{MAX_ATTEMPTS} workers in a row ended when they were given this sample"))
        return True

    def _may_owe_it_to_others(self, worker: _Worker, task: _Task) -> bool:
        """Whether a worker may have run out of memory for what it keeps of tasks before this one."""
        alone = self._settings.fresh_process or not worker.num_done
        return not alone and task.deaths < self._settings.max_retries

    def _died(self, why: str) -> None:
        """The worker is of no use any more, and its task may be the reason: it is done again in another, or has its
        answer."""
        task = self._task
        assert task is not None
        task.deaths += 1
        if task.deaths > self._settings.max_retries or self._is_dropped:
            self._settle(self._work.crashed(why, task.deaths))
            return
        self._pool.send(to_bytes({"retried": why}))
        self._end_worker()
        self._start_worker()

    def _settle(self, answer: dict[str, Any]) -> None:
        task, self._task = self._task, None
        assert task is not None
        self._end_worker()
        self._start_worker()
        self._answer(task, answer)

    def _answer(self, task: _Task, answer: dict[str, Any]) -> None:
        self._pool.send(to_bytes({"task": task.id, **answer}))

    def _restart(self, why: str) -> None:
        self._pool.send(to_bytes({"restarted": why}))
        self._end_worker()
        self._start_worker()

    def _not_started(self, error: str, *, final: bool) -> None:
        """The worker did not get ready. Unless that is `final`, another one tries, `MAX_ATTEMPTS` of them in a row."""
        self._end_worker()
        self._failed_starts += 1
        task = self._task
        if task is None:
            if final or self._failed_starts >= MAX_ATTEMPTS:
                self._pool.send(to_bytes({"ready": False, "error": error}))
            else:
                self._start_worker()
        elif final:
            self._task = None
            self._answer(task, self._work.failed(error))
        elif not self._try_again(task):
            self._start_worker()

    def _start_worker(self) -> None:
        ours, theirs = socket.socketpair()
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._work.run(supervisor, theirs, self._taken, self._output.sink)
        theirs.close()
        deadline = time.monotonic() + self._settings.start_timeout_s
        self._worker = _Worker(pid, Channel(ours, MAX_ANSWER_BYTES + HEADROOM_BYTES), deadline)

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            kill(worker.pid, group=True)
            worker.channel.close()
        kill_descendants(())
        self._reap()


class _Output:
    """What workers print: appended to the log until that has `MAX_LOG_BYTES`, dropped beyond and without a log."""

    def __init__(self, path: str):
        self._path = path
        self._log = -1
        if path:
            self.source, self.sink = os.pipe()
            os.set_blocking(self.source, False)
        else:
            self.source, self.sink = -1, os.open(os.devnull, os.O_WRONLY)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.source, 1 << 16)
            with contextlib.suppress(OSError):  # a full disk costs what is printed, and nothing else
                if self._log < 0:
                    self._log = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                room = MAX_LOG_BYTES - os.fstat(self._log).st_size
                if room > 0:
                    over = b"\n(the log is full: what reward workers print is dropped from here on)\n"
                    os.write(self._log, data if len(data) < room else data[:room] + over)
