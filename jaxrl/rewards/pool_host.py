"""A pool's host: one process that has all workers of a pool, and shares tasks among them.

The trainer starts it (`jaxrl.rewards.pool`). It has one thread, a coroutine for each worker, and runs no code of the
user's. Workers are forks of it (`jaxrl.rewards.local_host`), or in Ray actors (`jaxrl.rewards.ray_host`).

The worker that has a task and dies, hangs, or sends anything but its answer costs that task one of its `max_retries`,
and is replaced, with every process below it. One that ends or is stopped while it has nothing to do costs nothing. A
worker that runs out of memory after it has done other tasks may owe that to them, so the task is done again in a new
one: that counts as a death. Tasks are samples to score, so sentences say "sample".
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from jaxrl.processes.messages import framed, read_message, receive_message
from jaxrl.rewards.pool_worker import PoolSettings
from jaxrl.rewards.scorers import Scored
from jaxrl.types import RunFailed

MAX_ATTEMPTS = 3
"""Workers in a row that may end while they start."""
UNWANTED = "its verdict is not wanted any more"


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

    async def start(self) -> None:
        """Returns when it has loaded the scorer. Raises StartFailed."""
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


class FairQueue:
    """Tasks that wait for workers: a queue for each domain, so that a slow domain leaves workers to the others.

    A domain may have all workers but one for each other domain in use. Of the domains in which something waits, and
    which have fewer samples being scored than that, the one with the fewest is next; of equals the one whose turn was
    longest ago. With one domain that is the order of arrival. A popped task counts as being scored until `done`.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._waiting: dict[str, deque[Task]] = {}  # of domains in use: those that have ever had something
        self._scored_now = Counter[str]()
        self._turns = Counter[str]()  # when each domain's last turn was

    def put(self, task: Task) -> None:
        self._waiting.setdefault(task.domain, deque()).append(task)

    def pop(self) -> Task | None:
        """The next that may be scored; None where nothing may."""
        most = max(self._num_workers - len(self._waiting) + 1, 1)
        ready = [domain for domain, waiting in self._waiting.items() if waiting and self._scored_now[domain] < most]
        if not ready:
            return None
        domain = min(ready, key=lambda each: (self._scored_now[each], self._turns[each]))
        self._turns[domain] = max(self._turns.values(), default=0) + 1
        self._scored_now[domain] += 1
        return self._waiting[domain].popleft()

    def done(self, domain: str) -> None:
        assert self._scored_now[domain] > 0, f"nothing of {domain!r} was being scored"
        self._scored_now[domain] -= 1


class Host:
    """Shares the tasks that come over a socket among workers, and answers each once.

    Messages are pickles. To the host: `("score", number, source, request)` and `("drop", number)`. From it:
    `("alive",)`, as a sign of life, `("ready",)`, `("failed", error)`, `("began", number)`,
    `("ended", number, scored)` and `("retried" | "restarted", why)`; and `("fatal", why)`, the last.
    """

    def __init__(self, settings: PoolSettings, make: Callable[[Host], Worker], beat_s: float) -> None:
        self.settings, self._make, self._beat_s = settings, make, beat_s
        self._queue = FairQueue(settings.num_workers)
        self._idle: deque[asyncio.Future[Task]] = deque()  # of workers that wait for a task
        self._running: dict[int, Worker] = {}
        self._tasks: set[int] = set()  # that have no answer yet
        self._dropped: set[int] = set()  # of these, what is not wanted any more
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
            self.say("fatal", str(failed.exceptions[0]))
            await self._writer.drain()
        finally:
            self._writer.close()

    def say(self, *message: Any) -> None:
        self._writer.write(framed(pickle.dumps(message)))

    async def _beat(self) -> None:
        while True:
            self.say("alive")
            await asyncio.sleep(self._beat_s)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (payload := await read_message(reader)) is not None:
            match pickle.loads(payload):
                case "score", number, source, request:
                    domain = source if source in self.settings.limits else ""
                    task = Task(number, domain, *self.settings.limits[domain], request)
                    self._tasks.add(number)
                    self._queue.put(task)
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
        worker: Worker | StartFailed | None = None
        while True:
            worker = worker or await self._started()
            waiting = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            self._feed()
            task = await waiting
            if isinstance(worker, StartFailed):
                worker = await self._started()
            elif worker.is_gone:
                self.say("restarted", "a worker without a sample had ended or was stopped; started again")
                await self._end_worker(worker)
                worker = await self._started()
            self.say("began", task.number)
            scored, worker = await self._answered(worker, task)
            self._end(task, scored)
            self._feed()

    async def _answered(self, worker: Worker | StartFailed, task: Task) -> tuple[Scored, Worker | StartFailed | None]:
        """The result, and the worker if it lives."""
        deaths = 0
        while not isinstance(worker, StartFailed):
            if task.number in self._dropped:
                return crashed(UNWANTED), worker
            try:
                answer = await self._ask(worker, task, is_last=deaths >= self.settings.max_retries)
            except Died as died:
                deaths += 1
                await self._end_worker(worker)
                if deaths > self.settings.max_retries or task.number in self._dropped:
                    return crashed(str(died), deaths, is_silent=died.is_silent), None
                self.say("retried", str(died))
                worker = await self._started()
                continue
            if answer.is_spent or answer.is_out_of_memory:
                await self._end_worker(worker)
                return answer.scored, None
            return answer.scored, worker
        return worker.scored, worker

    async def _ask(self, worker: Worker, task: Task, is_last: bool) -> Answer:
        self._running[task.number] = worker
        try:
            answer = await worker.ask(task)
        finally:
            del self._running[task.number]
        if answer.is_out_of_memory and worker.num_done > 1 and not is_last:
            raise Died(f"{self.settings.process} ran out of memory, in which earlier samples had left something")
        return answer

    async def _end_worker(self, worker: Worker) -> None:
        self.num_ready -= 1
        await worker.end()

    async def _started(self) -> Worker | StartFailed:
        """A worker that has loaded the scorer, or the reason for a failure."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            worker = self._make(self)
            try:
                await worker.start()
            except StartFailed as found:
                await worker.end()
                if found.is_final or attempt == MAX_ATTEMPTS:
                    self.say("failed", str(found))
                    return found
            else:
                self.num_ready += 1
                self.was_ready = True
                self.say("ready")
                return worker
        raise AssertionError


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
