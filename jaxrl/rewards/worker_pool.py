"""Worker processes on this machine, from the trainer's side: requests in, what scoring them came to out.

Between the trainer and a worker stand a fork server and a supervisor (`jaxrl.processes`). One thread here talks to all
of them; it never waits for one, parses nothing but verdicts, and hands the next request on while the trainer computes.

What may go wrong with a worker is its supervisor's business. A supervisor that is gone, or does not answer (a scorer
may kill or stop it), is replaced, and its request given to another at most `reward.max_retries` times; so is the fork
server. When no server can be started, the requests at hand fail as crashes.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from jaxrl.processes.fork_server import ForkServer
from jaxrl.processes.messages import (
    HEADROOM_BYTES,
    MAX_ANSWER_BYTES,
    TASK_ID_BYTES,
    BadMessage,
    Channel,
    read_message,
    task_message,
)
from jaxrl.processes.worker_supervisor import MAX_ATTEMPTS
from jaxrl.rewards.domain_limits import DomainLimits, FairQueue
from jaxrl.rewards.pool_base import Ended, crashed
from jaxrl.rewards.scorers import Scored
from jaxrl.rewards.verdict_messages import read_scored
from jaxrl.rewards.worker import WorkerSettings
from jaxrl.types import RunFailed

_log = logging.getLogger(__name__)

ASK_AFTER_S, ANSWER_S = 5.0, 15.0
"""A supervisor that has been silent for so long is asked whether it lives, and has so long to answer."""
_SLACK_S = 30.0  # beyond reward.start_timeout_s, for an interpreter and its imports on a loaded machine
_PAUSE_S = 0.2  # between attempts to start a fork server


@dataclass
class _Request:
    number: int
    payload: bytes
    domain: str
    limit_s: float
    losses: int = 0  # supervisors that were lost with it


@dataclass
class _Supervisor:
    pid: int
    channel: Channel
    heard_s: float
    request: _Request | None = None
    task_id: str = ""
    has_reported: bool = False  # whether its worker is ready, or will not be
    asked_s: float | None = None


class WorkerPool:
    """Processes that score; used from one thread besides its own.

    Attributes:
      ended: (number, what scoring came to, time) of requests, in the order in which they ended.
      retries, restarts: why requests were scored again, and workers started again that had not failed with a sample.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        num_workers: int,
        env: Mapping[str, str],
        limits: DomainLimits,
        clock: Callable[[], float],
    ):
        self.ended: Ended = queue.SimpleQueue()
        self.restarts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.retries: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._settings, self._num_workers, self._clock = settings, num_workers, clock
        self._limits = limits
        self._waiting = FairQueue[_Request](limits, num_workers)
        self._dropped: set[int] = set()  # requests that a worker has and that are not wanted any more
        self._lock = threading.Lock()  # of _waiting and _dropped
        self._reported = threading.Condition()
        self._num_ready = 0
        self._problem: Exception | None = None
        self._closing = False
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._server = ForkServer(settings, env)
        self._supervisors: list[_Supervisor] = []
        self._num_asked = 0  # supervisors that the server was asked for and has not handed over
        self._failed_starts = 0
        self._thread = threading.Thread(target=self._run, name=f"{settings.section} workers", daemon=True)
        self._thread.start()

    def submit(self, number: int, payload: bytes, source: str) -> None:
        """Queues a request. `source`: of its prompt, for the domain in which it waits and the time that it may take."""
        domain = self._limits.domain(source)
        with self._lock:
            self._waiting.put(domain, _Request(number, payload, domain, self._limits.by_source[domain].timeout_s))
        self._wake()

    def drop(self, numbers: Collection[int]) -> None:
        """Forgets requests. One that a worker has is ended if it does not end by itself at once; something may still
        come of it."""
        with self._lock:
            self._waiting.keep(lambda request: request.number not in numbers)
            self._dropped.update(numbers)
        self._wake()

    def wait_ready(self) -> None:
        """Returns when every worker has loaded the scorer. Raises ValueError where it cannot be loaded; RunFailed:
        processes cannot be started here."""
        with self._reported:
            self._reported.wait_for(lambda: self._problem is not None or self._num_ready >= self._num_workers)
            if self._problem is not None:
                raise self._problem

    def check(self) -> None:
        if not self._thread.is_alive() and not self._closing:
            with self._reported:
                raise self._problem or RunFailed(f"{self._settings.section}: the pool's own thread ended")

    def close(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join()
        self._woken.close()
        self._waker.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"w")

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._start_missing()
                self._pass_on_dropped()
                self._feed()
                self._listen()
        except BaseException as error:
            section = self._settings.section
            _log.exception("%s workers: the thread that talks to them ended", section)
            self._report(RunFailed(f"{section}: the pool's own thread failed: {type(error).__name__}: {error}"))
        finally:
            for each in self._supervisors:
                each.channel.close()
            self._server.close()

    def _report(self, problem: Exception | None = None) -> None:
        with self._reported:
            self._num_ready = sum(each.has_reported for each in self._supervisors)
            self._problem = self._problem or problem
            self._reported.notify_all()

    def _start_missing(self) -> None:
        if not self._server.alive:
            try:
                self._server.start()
            except OSError as error:
                self._server_failed(f"no process can be started: {error}")
                return
            self._num_asked = 0
        while len(self._supervisors) + self._num_asked < self._num_workers:
            self._server.command({"start": 1})
            self._num_asked += 1

    def _server_failed(self, why: str) -> None:
        self._server.end()
        self._failed_starts += 1
        time.sleep(_PAUSE_S)
        if self._failed_starts >= MAX_ATTEMPTS:
            self._report(RunFailed(f"{self._settings.section}: worker processes end while they start ({why})"))
            with self._lock:
                hopeless = self._waiting.take_all()
            for request in hopeless:
                self.ended.put((request.number, crashed(f"no worker process can be started ({why})"), self._clock()))

    def _feed(self) -> None:
        for each in self._supervisors:
            if each.request is None and each.has_reported:
                with self._lock:
                    request = self._waiting.pop()
                if request is None:
                    return
                each.request, each.task_id = request, secrets.token_hex(TASK_ID_BYTES // 2)
                each.channel.send(task_message(each.task_id, request.limit_s, request.payload))

    def _pass_on_dropped(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, set()
        for each in self._supervisors if dropped else ():
            if each.request is not None and each.request.number in dropped:
                each.channel.send(each.task_id.encode())

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        by_fd = {
            channel.fileno(): channel
            for channel in [each.channel for each in self._supervisors] + self._server.channels
        }
        for fd, channel in by_fd.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if channel.wants_write else 0))
        ready = {by_fd.get(fd) for fd, _ in poll.poll(1000)}
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for channel in ready:
            if channel is not None and channel.wants_write:
                channel.flush()
        for each in list(self._supervisors):
            if each.channel in ready:
                self._receive(each)
            if each.channel.ended:
                self._lose(each)
            else:
                self._check_alive(each)
        if any(channel in ready for channel in self._server.channels):
            self._add_started()
        overdue = (
            self._num_asked and time.monotonic() - self._server.asked_s > self._settings.start_timeout_s + _SLACK_S
        )
        if self._server.alive and (self._server.control.ended or overdue):
            self._server_failed(self._server.last_words())

    def _add_started(self) -> None:
        for pid, sock in self._server.new_supervisors():
            self._num_asked -= 1
            self._supervisors.append(
                _Supervisor(pid, Channel(sock, MAX_ANSWER_BYTES + HEADROOM_BYTES), time.monotonic())
            )

    def _receive(self, supervisor: _Supervisor) -> None:
        supervisor.heard_s, supervisor.asked_s = time.monotonic(), None
        try:
            for payload in supervisor.channel.receive():
                self._handle(supervisor, read_message(payload))
        except BadMessage as bad:
            _log.warning("reward pool: a supervisor sent %s", bad)
            supervisor.channel.ended = True

    def _handle(self, supervisor: _Supervisor, message: dict[str, object]) -> None:
        if "ready" in message:
            supervisor.has_reported = True
            self._failed_starts = 0
            self._report(None if message["ready"] else ValueError(str(message.get("error"))))
            if message.get("has_jax"):
                _log.warning(
                    "reward workers import jax, which costs start-up time and memory: the custom reward file does"
                )
        elif "restarted" in message:
            self.restarts.put(str(message["restarted"])[:500])
        elif "retried" in message:
            self.retries.put(str(message["retried"])[:500])
        elif supervisor.request is not None and message.get("task") == supervisor.task_id:
            self._end(supervisor.request, read_scored(message))
            supervisor.request = None

    def _end(self, request: _Request, scored: Scored) -> None:
        with self._lock:
            self._waiting.done(request.domain)
        self.ended.put((request.number, scored, self._clock()))

    def _check_alive(self, supervisor: _Supervisor) -> None:
        now = time.monotonic()
        if supervisor.asked_s is None and now - supervisor.heard_s > ASK_AFTER_S:
            supervisor.asked_s = now
            supervisor.channel.send(b"")
        elif supervisor.asked_s is not None and now - supervisor.asked_s > ANSWER_S:
            self._server.command({"end": supervisor.pid})
            self._lose(supervisor, is_silent=True)

    def _lose(self, supervisor: _Supervisor, *, is_silent: bool = False) -> None:
        """A supervisor is gone. Its request is scored again, unless it may well be the reason."""
        supervisor.channel.close()
        self._supervisors.remove(supervisor)
        request = supervisor.request
        if self._closing:
            return
        self.restarts.put("a worker's supervisor ended or did not answer; started again")
        if request is None:
            return
        request.losses += 1
        why = "the supervisor of the scorer's process ended or did not answer"
        if request.losses > self._settings.max_retries:
            self._end(request, crashed(why, request.losses, is_silent=is_silent))
        else:
            self.retries.put(why)
            with self._lock:
                self._waiting.put_back(request.domain, request)
