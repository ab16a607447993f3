"""A pool's host: one process that has all workers of a pool on this machine.

The trainer holds jax and many threads, and so never forks. It starts this program (`jaxrl.rewards.pool`), which loads
the scorer's libraries once, forks the workers, passes each a task at a time, and keeps the time. It runs no code of the
user's and has one thread. With `reward.pool=ray` the same program runs over Ray actors (`jaxrl.rewards.ray_host`).

The worker that has a task and dies, hangs, or sends anything but its answer costs that task one of its `max_retries`,
and is replaced, with every process below it. One that ends or is stopped while it has nothing to do costs nothing. A
worker that runs out of memory after it has done other tasks may owe that to them, so the task is done again in a new
one: that counts as a death. Tasks are samples to score, so sentences say "sample".
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import os
import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from jaxrl.processes.messages import BadMessage, framed, read_json, read_message, receive_message
from jaxrl.processes.process_tree import PATIENCE_S, adopt_orphans, kill, kill_descendants, kill_once
from jaxrl.rewards.domain_limits import FairQueue
from jaxrl.rewards.pool_worker import MAX_MESSAGE_BYTES, NUMBER_BYTES, PoolSettings, become_worker, read_scored
from jaxrl.rewards.scorers import Scored
from jaxrl.types import RunFailed

MAX_ATTEMPTS = 3
"""Workers in a row that may end while they start."""
MAX_LOG_BYTES = 16 << 20
DROP_S = 1.0
"""How long a task that is not wanted any more may still take; starting a worker costs as much."""
UNWANTED = "its verdict is not wanted any more"
_EXIT_S = 0.5  # for a worker whose socket has closed to be gone by itself


def timed_out(limit_s: float, option: str) -> Scored:
    return "timeout", 0.0, {"error": f"no score within {option} ({limit_s:g} s)"}, limit_s


def crashed(why: str, times: int = 1, *, is_silent: bool = False) -> Scored:
    """`times`: how often it happened to the sample. `is_silent`: what scored it said nothing for too long."""
    timeouts = {"timeouts": {"watchdog": 1}} if is_silent else {}
    return "crash", 0.0, {"error": why if times == 1 else f"{why} ({times} times in a row)", **timeouts}, 0.0


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    domain: str
    limit_s: float  # 0: none
    option: str  # that sets the limit
    request: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    scored: Scored
    is_spent: bool = False  # whether the worker is to be replaced
    is_out_of_memory: bool = False


class Died(Exception):
    """A worker is gone, or nothing that it sends counts any more. `is_silent`: it has sent nothing for too long."""

    def __init__(self, text: str, *, is_silent: bool = False) -> None:
        super().__init__(text)
        self.is_silent = is_silent


class StartFailed(Exception):
    """`is_final`: another worker would fail as well. `scored`: what a sample has without a worker."""

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final
        self.scored: Scored = ("error", 0.0, {"error": text}, 0.0) if is_final else crashed(text)


class Worker(Protocol):
    """One worker, from its start to its end. `num_done`: tasks that it has answered."""

    num_done: int

    async def start(self) -> bool:
        """Whether it has loaded jax. Raises StartFailed."""
        ...

    async def ask(self, task: Task) -> Answer:
        """Raises Died."""
        ...

    def drop(self) -> None:
        """The answer that is being waited for is not wanted any more."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether it has ended or was stopped, while it has nothing to do."""
        ...

    async def end(self) -> None: ...


class Host:
    """Shares the tasks that come over a socket among workers, and answers each once.

    Messages are pickles. To the host: `("score", number, source, request)` and `("drop", number)`. From it: lists, in
    part empty, as a sign of life, of `("ready", has_jax)`, `("failed", error)`, `("began", number)`,
    `("ended", number, scored)` and `("retried" | "restarted", why)`; and `("fatal", why)`, the last.
    """

    def __init__(self, settings: PoolSettings, make: Callable[[Host], Worker], beat_s: float) -> None:
        self.settings, self._make, self._beat_s = settings, make, beat_s
        self._queue = FairQueue[Task](settings.limits, settings.num_workers)
        self._idle: deque[asyncio.Future[Task]] = deque()  # of workers that wait for a task
        self._running: dict[int, Worker] = {}
        self._tasks: set[int] = set()  # that have no answer yet
        self._dropped: set[int] = set()  # of these, what is not wanted any more
        self._outbox: list[tuple[Any, ...]] = []
        self.num_ready = 0  # workers
        self.was_ready = False  # whether one has ever been

    async def run(self, sock: socket.socket) -> None:
        """Returns when the other side has closed the socket."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        try:
            async with asyncio.TaskGroup() as group:
                own = [group.create_task(self._work()) for _ in range(self.settings.num_workers)]
                own.append(group.create_task(self._beat()))
                await self._read(reader)
                for each in own:
                    each.cancel()
        except* RunFailed as failed:
            self._writer.write(framed(pickle.dumps([*self._outbox, ("fatal", str(failed.exceptions[0]))])))
            await self._writer.drain()
        finally:
            self._writer.close()

    def say(self, *message: Any) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages:
            self._writer.write(framed(pickle.dumps(messages)))

    async def _beat(self) -> None:
        while True:
            self._writer.write(framed(pickle.dumps([])))
            await asyncio.sleep(self._beat_s)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (payload := await read_message(reader)) is not None:
            match pickle.loads(payload):
                case "score", number, source, request:
                    domain = self.settings.limits.domain(source)
                    limit = self.settings.limits.by_source[domain]
                    task = Task(number, domain, limit.timeout_s, limit.option, request)
                    self._tasks.add(number)
                    self._queue.put(domain, task)
                    self._feed()
                case _, number:
                    self._drop(number)

    def _drop(self, number: int) -> None:
        if number in self._tasks:
            self._dropped.add(number)
            if (worker := self._running.get(number)) is not None:
                worker.drop()

    def _feed(self) -> None:
        while self._idle and (task := self._queue.pop()) is not None:
            if task.number in self._dropped:
                self._end(task, crashed(UNWANTED))
            else:
                self._idle.popleft().set_result(task)

    def _end(self, task: Task, scored: Scored) -> None:
        self._queue.done(task.domain)
        self._tasks.discard(task.number)
        self._dropped.discard(task.number)
        self.say("ended", task.number, scored)

    # -- one worker after another --------------------------------------------------------------------------------------

    async def _work(self) -> None:
        worker = await self._started()
        while True:
            waiting = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            self._feed()
            task = await waiting
            if not isinstance(worker, StartFailed) and worker.is_gone:
                self.say("restarted", "a worker without a sample had ended or was stopped; started again")
                await self._end_worker(worker)
                worker = await self._started()
            elif isinstance(worker, StartFailed):
                worker = await self._started()
            worker = await self._score(worker, task)

    async def _score(self, worker: Worker | StartFailed, task: Task) -> Worker | StartFailed:
        """Answers a task; returns the worker for the next one."""
        self.say("began", task.number)
        self._flush()  # before its scorer can end this process
        scored, next_worker = await self._answered(worker, task)
        self._end(task, scored)
        self._feed()
        return next_worker or await self._started()

    async def _answered(self, worker: Worker | StartFailed, task: Task) -> tuple[Scored, Worker | StartFailed | None]:
        """The result, and the worker if it lives."""
        for deaths in itertools.count(1):
            if isinstance(worker, StartFailed):
                return worker.scored, worker
            if task.number in self._dropped:
                return crashed(UNWANTED), worker
            is_last = deaths > self.settings.max_retries
            try:
                answer = await self._ask(worker, task, is_last)
            except Died as died:
                await self._end_worker(worker)
                if is_last or task.number in self._dropped:
                    return crashed(str(died), deaths, is_silent=died.is_silent), None
                self.say("retried", str(died))
                worker = await self._started()
                continue
            if answer.is_spent or answer.is_out_of_memory:
                await self._end_worker(worker)
                return answer.scored, None
            return answer.scored, worker
        raise AssertionError

    async def _ask(self, worker: Worker, task: Task, is_last: bool) -> Answer:
        self._running[task.number] = worker
        try:
            answer = await worker.ask(task)
        finally:
            del self._running[task.number]
        if answer.is_out_of_memory and worker.num_done > 1 and not is_last:
            raise Died(f"{process_of(self.settings)} ran out of memory, in which earlier samples had left something")
        return answer

    async def _end_worker(self, worker: Worker) -> None:
        self.num_ready -= 1
        await worker.end()

    async def _started(self) -> Worker | StartFailed:
        """A worker that has loaded the scorer, or why there is none."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            worker = self._make(self)
            try:
                has_jax = await worker.start()
            except StartFailed as found:
                await worker.end()
                if found.is_final or attempt == MAX_ATTEMPTS:
                    self.say("failed", str(found))
                    return found
            else:
                self.num_ready += 1
                self.was_ready = True
                self.say("ready", has_jax)
                return worker
        raise AssertionError


class LocalWorker:
    """A fork of the host (`jaxrl.rewards.pool_worker`). `living`: processes of the host's workers; `output`: the
    descriptor for what it prints; `log`: for tracebacks."""

    def __init__(self, host: Host, living: set[int], log: Log) -> None:
        self._settings, self._living, self._log = host.settings, living, log
        self._was_ready = host.was_ready
        self.num_done = 0

    async def start(self) -> bool:
        ours, theirs = socket.socketpair()
        host, self._pid = os.getpid(), os.fork()
        if self._pid == 0:
            become_worker(host, theirs, self._log.sink, self._settings)
        self._living.add(self._pid)
        theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        settings, limit_s = self._settings, self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                message = await self._receive()
        except TimeoutError:
            text = f"{settings.loads} did not end within reward.start_timeout_s ({limit_s:g} s)"
            raise StartFailed(text, is_final=not self._was_ready) from None
        except Died as died:
            raise StartFailed(f"{settings.loads} failed: {died}") from None
        if "ready" not in message:
            raise StartFailed(str(message.get("error"))[:2000], is_final=True)
        return message.get("has_jax") is True

    async def ask(self, task: Task) -> Answer:
        self._dropped = False
        try:
            async with asyncio.timeout(task.limit_s or None) as self._time:
                with contextlib.suppress(OSError):  # it is gone, as its answer will tell
                    self._writer.write(framed(task.number.to_bytes(NUMBER_BYTES) + task.request))
                    await self._writer.drain()
                message = await self._receive()
        except TimeoutError:
            late = crashed(UNWANTED) if self._dropped else timed_out(task.limit_s, task.option)
            return Answer(late, is_spent=True)
        if message.get("task") != task.number:
            raise Died(f"{process_of(self._settings)} sent a verdict that it was not asked for")
        if "exit_code" in message:
            raise Died(self._ended(message["exit_code"]))
        try:
            scored = read_scored(message)
        except BadMessage as bad:
            raise Died(f"{process_of(self._settings)} sent {bad}") from None
        if "traceback" in message:
            self._log.write_once(str(message.get("place")), str(message["traceback"]))
        self.num_done += 1
        return Answer(scored, message.get("is_spent") is True, message.get("is_out_of_memory") is True)

    def drop(self) -> None:
        self._dropped = True
        when, now_s = self._time.when(), asyncio.get_running_loop().time()
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._time.reschedule(now_s + DROP_S if when is None else min(when, now_s + DROP_S))

    @property
    def is_gone(self) -> bool:
        return os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED)[0] != 0

    async def end(self) -> None:
        """Kills it, and what was below it, which is the host's own from then on."""
        self._living.discard(self._pid)
        kill(self._pid, group=True)
        self._writer.close()
        deadline = time.monotonic() + PATIENCE_S
        while kill_once(self._living) and time.monotonic() < deadline:
            await asyncio.sleep(0.0005)

    async def _receive(self) -> dict[str, Any]:
        """Its next message. Raises Died where it sends none."""
        try:
            payload = await read_message(self._reader, MAX_MESSAGE_BYTES)
            if payload is not None:
                return read_json(payload)
        except BadMessage as bad:
            raise Died(f"{process_of(self._settings)} sent {bad}") from None
        deadline = time.monotonic() + _EXIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    raise Died(self._ended(os.waitstatus_to_exitcode(status)))
            await asyncio.sleep(0.001)
        name = process_of(self._settings).removesuffix("'s process")
        raise Died(f"{name} closed its process's connection to the pool")

    def _ended(self, code: Any) -> str:
        return f"{process_of(self._settings)} ended with exit code {code}"


def process_of(settings: PoolSettings) -> str:
    """What errors call a worker's process."""
    name = "the scorer" if settings.section == "reward" else f"the {settings.section}"
    return f"{name}'s process"


class Log:
    """What workers print and where they failed: appended to a file until that has `MAX_LOG_BYTES`; without a file it is
    dropped. Each traceback is written once. `sink`: the descriptor for what workers print."""

    def __init__(self, path: str) -> None:
        self._path, self._seen = path, set[str]()
        self._file = -1
        if not path:
            self.sink = os.open(os.devnull, os.O_WRONLY)
            return
        self._source, self.sink = os.pipe()
        os.set_blocking(self._source, False)
        asyncio.get_running_loop().add_reader(self._source, self.drain)

    def drain(self) -> None:
        """Writes what workers have printed."""
        if self._path:
            with contextlib.suppress(BlockingIOError):
                self._write(os.read(self._source, 1 << 16))

    def write_once(self, place: str, text: str) -> None:
        if self._path and place not in self._seen:
            self._seen.add(place)
            self.drain()  # what it printed before
            self._write(text.encode("utf-8", "backslashreplace"))

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk costs what is printed, and nothing else
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            room = MAX_LOG_BYTES - os.fstat(self._file).st_size
            if room > 0:
                over = b"\n(the log is full: what reward workers print is dropped from here on)\n"
                os.write(self._file, data if len(data) < room else data[:room] + over)


async def serve_locally(sock: socket.socket, settings: PoolSettings, beat_s: float) -> None:
    adopt_orphans()
    for module in settings.preload:
        with contextlib.suppress(Exception):  # a worker finds the same, and can report it
            importlib.import_module(module)
    gc.freeze()  # a collection would write to the pages that workers share
    living, log = set[int](), Log(settings.log)
    try:
        await Host(settings, lambda host: LocalWorker(host, living, log), beat_s).run(sock)
    finally:
        kill_descendants(())
        log.drain()


def run(serve: Callable[[socket.socket, PoolSettings, float], Coroutine[Any, Any, None]]) -> NoReturn:
    """The program of a host: gets its settings, and serves until the trainer closes the socket."""
    sock = socket.socket(fileno=int(sys.argv[2]))
    sock.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when it ends
    setup = receive_message(sock)
    if setup is not None:
        asyncio.run(serve(sock, *pickle.loads(setup)))
    os._exit(0)


def main() -> None:
    run(serve_locally)
