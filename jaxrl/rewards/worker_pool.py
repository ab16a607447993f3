"""Worker processes on this machine, from the trainer's side: requests in, what scoring them came to out.

The chain is trainer, warden, keeper, worker (`jaxrl.rewards.{warden,keeper,worker}`). One thread here talks to all of
them; it never waits for one, parses nothing but verdicts, and hands the next request on while the trainer computes.

What may go wrong with a worker is its keeper's business. What may go wrong with the chain is dealt with here: a keeper
that is gone, or does not answer (a scorer may kill or stop it), is replaced, and its request given to another at most
`reward.max_retries` times; so is the warden. When no warden can be started, the requests at hand fail as crashes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import secrets
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from jaxrl.processes.messages import (
    HEADROOM_BYTES,
    MAX_ANSWER_BYTES,
    TASK_ID_BYTES,
    BadMessage,
    Channel,
    read_message,
    task_message,
    to_bytes,
)
from jaxrl.rewards.domain_limits import DomainLimits, FairQueue
from jaxrl.rewards.pool_base import MAX_ATTEMPTS, Ended, crashed
from jaxrl.rewards.scorers import Scored
from jaxrl.rewards.verdict_messages import read_scored
from jaxrl.rewards.warden import PID, environment, start_warden
from jaxrl.rewards.worker import WorkerSettings
from jaxrl.types import RunFailed

_log = logging.getLogger(__name__)

ASK_AFTER_S, ANSWER_S = 5.0, 15.0
"""A keeper that has been silent for so long is asked whether it lives, and has so long to answer."""
_SLACK_S = 30.0  # beyond reward.start_timeout_s, for an interpreter and its imports on a loaded machine
_PAUSE_S = 0.2  # between attempts to start a warden
_CLOSE_S = 7.0


@dataclass
class _Request:
    number: int
    payload: bytes
    domain: str
    limit_s: float
    losses: int = 0  # keepers that were lost with it


@dataclass
class _Line:
    """A keeper, and what it has."""

    pid: int
    channel: Channel
    heard_s: float
    request: _Request | None = None
    task_id: str = ""
    has_reported: bool = False  # whether its worker is ready, or will not be
    asked_s: float | None = None


class WorkerPool:
    """Processes that score; used from one thread besides its own.

    Args:
      env: variables that the workers get besides those that they always get.
      limits: how requests wait, and their time limits.

    Attributes:
      ended: (number, what scoring came to, time) of requests, in the order in which they ended.
      retries: why requests were scored again.
      restarts: why workers were started again that had not failed with a sample.
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
        self._chain = _Chain(settings, environment(env))
        self._lines: list[_Line] = []
        self._num_asked = 0  # keepers that the warden was asked for and has not handed over
        self._failed_starts = 0
        self._thread = threading.Thread(target=self._run, name="reward workers", daemon=True)
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
        """Returns when every worker has loaded the scorer.

        Raises:
          ValueError: the scorer cannot be loaded.
          RunFailed: processes cannot be started here.
        """
        with self._reported:
            self._reported.wait_for(lambda: self._problem is not None or self._num_ready >= self._num_workers)
            if self._problem is not None:
                raise self._problem

    def check(self) -> None:
        """Raises if the thread that talks to the workers has ended."""
        if not self._thread.is_alive() and not self._closing:
            with self._reported:
                raise self._problem or RunFailed("reward: the pool's own thread ended")

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
                self._keep_chain()
                self._tell_dropped()
                self._feed()
                self._listen()
        except BaseException as error:
            _log.exception("reward workers: the thread that talks to them ended")
            self._report(RunFailed(f"reward: the pool's own thread failed: {type(error).__name__}: {error}"))
        finally:
            for line in self._lines:
                line.channel.close()
            self._chain.close()

    def _report(self, problem: Exception | None = None) -> None:
        with self._reported:
            self._num_ready = sum(line.has_reported for line in self._lines)
            self._problem = self._problem or problem
            self._reported.notify_all()

    def _keep_chain(self) -> None:
        """Starts what is missing of the warden and the keepers."""
        if not self._chain.alive:
            try:
                self._chain.start()
            except OSError as error:
                self._chain_failed(f"no process can be started: {error}")
                return
            self._num_asked = 0
        while len(self._lines) + self._num_asked < self._num_workers:
            self._chain.command({"start": 1})
            self._num_asked += 1

    def _chain_failed(self, why: str) -> None:
        self._chain.end()
        self._failed_starts += 1
        time.sleep(_PAUSE_S)
        if self._failed_starts >= MAX_ATTEMPTS:
            self._report(RunFailed(f"reward: worker processes end while they start ({why})"))
            with self._lock:
                hopeless = self._waiting.take_all()
            for request in hopeless:
                self.ended.put((request.number, crashed(f"no worker process can be started ({why})"), self._clock()))

    def _feed(self) -> None:
        for line in self._lines:
            if line.request is None and line.has_reported:
                with self._lock:
                    request = self._waiting.pop()
                if request is None:
                    return
                line.request, line.task_id = request, secrets.token_hex(TASK_ID_BYTES // 2)
                line.channel.send(task_message(line.task_id, request.limit_s, request.payload))

    def _tell_dropped(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, set()
        for line in self._lines if dropped else ():
            if line.request is not None and line.request.number in dropped:
                line.channel.send(line.task_id.encode())

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        by_fd = {channel.fileno(): channel for channel in [line.channel for line in self._lines] + self._chain.channels}
        for fd, channel in by_fd.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if channel.wants_write else 0))
        ready = {by_fd.get(fd) for fd, _ in poll.poll(1000)}
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for channel in ready:
            if channel is not None and channel.wants_write:
                channel.flush()
        for line in list(self._lines):
            if line.channel in ready:
                self._hear(line)
            if line.channel.ended:
                self._lose(line)
            else:
                self._see_that_it_lives(line)
        if any(channel in ready for channel in self._chain.channels):
            self._meet_keepers()
        overdue = self._num_asked and time.monotonic() - self._chain.asked_s > self._settings.start_timeout_s + _SLACK_S
        if self._chain.alive and (self._chain.control.ended or overdue):
            self._chain_failed(self._chain.last_words())

    def _meet_keepers(self) -> None:
        for pid, sock in self._chain.new_keepers():
            self._num_asked -= 1
            self._lines.append(_Line(pid, Channel(sock, MAX_ANSWER_BYTES + HEADROOM_BYTES), time.monotonic()))

    def _hear(self, line: _Line) -> None:
        line.heard_s, line.asked_s = time.monotonic(), None
        try:
            for frame in line.channel.receive():
                self._understand(line, read_message(frame))
        except BadMessage as bad:
            _log.warning("reward pool: a keeper sent %s", bad)
            line.channel.ended = True

    def _understand(self, line: _Line, message: dict[str, object]) -> None:
        if "ready" in message:
            line.has_reported = True
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
        elif line.request is not None and message.get("task") == line.task_id:
            self._end(line.request, read_scored(message))
            line.request = None

    def _end(self, request: _Request, scored: Scored) -> None:
        with self._lock:
            self._waiting.done(request.domain)
        self.ended.put((request.number, scored, self._clock()))

    def _see_that_it_lives(self, line: _Line) -> None:
        now = time.monotonic()
        if line.asked_s is None and now - line.heard_s > ASK_AFTER_S:
            line.asked_s = now
            line.channel.send(b"")
        elif line.asked_s is not None and now - line.asked_s > ANSWER_S:
            self._chain.command({"end": line.pid})
            self._lose(line, is_silent=True)

    def _lose(self, line: _Line, *, is_silent: bool = False) -> None:
        """A keeper is gone. Its request is scored again, unless it may well be the reason."""
        line.channel.close()
        self._lines.remove(line)
        request = line.request
        if self._closing:
            return
        self.restarts.put("a worker's keeper ended or did not answer; started again")
        if request is None:
            return
        request.losses += 1
        why = "the keeper of the scorer's process ended or did not answer"
        if request.losses > self._settings.max_retries:
            self._end(request, crashed(why, request.losses, is_silent=is_silent))
        else:
            self.retries.put(why)
            with self._lock:
                self._waiting.put_back(request.domain, request)


class _Chain:
    """The warden's process, and the way to it."""

    def __init__(self, settings: WorkerSettings, env: Mapping[str, str]):
        self._settings, self._env = settings, env
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self.control: Channel
        self.asked_s = 0.0

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def channels(self) -> list[Channel]:
        return [self.control] if self.alive else []

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = start_warden(theirs, self._env, self._stderr)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.control = Channel(ours, 0)
        self.control.send(pickle.dumps(self._settings))

    def command(self, message: dict[str, int]) -> None:
        if self.alive:
            self.asked_s = time.monotonic()
            self.control.send(to_bytes(message))

    def new_keepers(self) -> list[tuple[int, socket.socket]]:
        found: list[tuple[int, socket.socket]] = []
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self.control.sock, PID.size, 1)
                if not data:
                    self.control.ended = True
                    break
                os.set_inheritable(fds[0], False)
                found.append((PID.unpack(data)[0], socket.socket(fileno=fds[0])))
        except BlockingIOError:
            pass
        except OSError:
            self.control.ended = True
        return found

    def last_words(self) -> str:
        """The last line that a warden which has ended, or hangs, wrote to stderr."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(size - 4096, 0))
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"

    def end(self) -> None:
        """Closes the warden's socket, on which it ends with all its processes; kills it if it does not."""
        if self._process is None:
            return
        self.control.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def close(self) -> None:
        self.end()
        self._stderr.close()
