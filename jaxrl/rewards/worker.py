"""The process that runs the scorer: foreign code, on the model's text. Neither this module nor its imports use jax.

A supervisor (`jaxrl.processes.worker_supervisor`) forks it, hands it one sample at a time, and ends it. It leads a
session and a process group of its own, and has no descriptor but its own socket, which nothing that it starts inherits.

With `reward.fresh_process` it loads the scorer and scores each sample in a fork of it, so what a sample leaves behind
in the interpreter ends with the fork. Threads that a reward file starts while it is imported are not in the forks.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxrl.processes.fork_server import Supervise
from jaxrl.processes.messages import MAX_ANSWER_BYTES, TASK_ID_BYTES, read_task, receive_message, send_message, to_bytes
from jaxrl.processes.process_tree import close_all_but, die_with_parent
from jaxrl.processes.worker_supervisor import SupervisorSettings, WorkerSupervisor
from jaxrl.rewards.pool_base import crashed, timed_out
from jaxrl.rewards.scorers import OUT_OF_MEMORY, Scored, Scorer, describe, score_safely
from jaxrl.rewards.tracebacks import TracebackDeduper
from jaxrl.rewards.verdict_messages import read_scored, verdict_message

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(SupervisorSettings):
    """What fork server, supervisors and workers must know (implements `jaxrl.processes.fork_server.Service`).

    Attributes:
      preload: modules that are imported once, before workers are forked.
      max_memory_gib: of one worker; 0: no limit. section: of the options that say so.
    """

    scorer: bytes
    preload: tuple[str, ...]
    max_memory_gib: float = 0.0
    section: str = "reward"

    def prepare(self) -> Supervise:
        tracebacks = TracebackDeduper()
        return lambda pool, server, wakeup: WorkerSupervisor(
            pool, server, wakeup, _Scoring(tracebacks, self), self
        ).run()


class _Scoring:
    """The work of the processes: `jaxrl.processes.worker_supervisor.Work`."""

    start_option = "reward.start_timeout_s"

    def __init__(self, tracebacks: TracebackDeduper, settings: WorkerSettings):
        self._tracebacks, self._settings = tracebacks, settings
        self.name = "the scorer" if settings.section == "reward" else f"the {settings.section}"

    def run(self, supervisor: int, sock: socket.socket, taken: mmap.mmap, output: int) -> NoReturn:
        _become_worker(supervisor, sock, taken, self._tracebacks, output, self._settings)

    def checked(self, message: dict[str, Any]) -> dict[str, Any]:
        return verdict_message(read_scored(message))

    def failed(self, why: str) -> dict[str, Any]:
        return verdict_message(("error", 0.0, {"error": why}, 0.0))

    def crashed(self, why: str, times: int = 1) -> dict[str, Any]:
        return verdict_message(crashed(why, times))

    def timed_out(self, limit_s: float) -> dict[str, Any]:
        return verdict_message(timed_out(limit_s))


def _become_worker(
    supervisor: int,
    sock: socket.socket,
    taken: mmap.mmap,
    tracebacks: TracebackDeduper,
    output: int,
    settings: WorkerSettings,
) -> NoReturn:
    """What a supervisor's fork does: loads the scorer, says so, and scores until it is killed or its socket closes."""
    try:
        os.setsid()
        die_with_parent(supervisor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for fd in (1, 2):
            os.dup2(output, fd)
        close_all_but({sock.fileno()})
        # lines are written as they end: a worker is killed without a last chance
        sys.stdout, sys.stderr = (
            open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115  (for as long as it lives)
            for fd in (1, 2)
        )
        _limit_memory(settings.max_memory_gib)
        _Worker(sock, taken, tracebacks, settings).run()
    except BaseException:
        with contextlib.suppress(BaseException):
            import traceback

            traceback.print_exc()
    os._exit(1)


def _limit_memory(gib: float) -> None:
    """Bounds the private memory that the process may write, on Linux, and its address space elsewhere.

    Not the address space on Linux: libraries reserve much more of it than they use. A lower limit that is there already
    stays, and macOS takes none below what is mapped.
    """
    limits = {resource.RLIMIT_CORE: 0}
    if gib:
        limits[resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS] = round(gib * GIB)
    for kind, most in limits.items():
        there = resource.getrlimit(kind)[1]
        most = most if there == resource.RLIM_INFINITY else min(most, there)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))


class _Worker:
    def __init__(self, sock: socket.socket, taken: mmap.mmap, tracebacks: TracebackDeduper, settings: WorkerSettings):
        sock.setblocking(True)
        self._sock = sock
        self._taken, self._tracebacks = taken, tracebacks
        self._settings = settings
        self._pid = os.getpid()
        self._forking = False
        os.register_at_fork(after_in_child=self._let_go)

    def run(self) -> NoReturn:
        try:
            scorer: Scorer = pickle.loads(self._settings.scorer)
            scorer.load()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of the reward file's making, too
            users = isinstance(error, ValueError)
            problem = str(error) if users else f"{self._settings.loads} failed with {describe(error)}"
            self._say({"ready": False, "error": problem[:2000]})
            os._exit(0)
        self._say({"ready": True, "has_jax": "jax" in sys.modules})
        while (frame := receive_message(self._sock)) is not None:
            task_id, _, request = read_task(frame)
            self._taken[:TASK_ID_BYTES] = task_id.encode()
            if self._settings.fresh_process:
                self._score_in_fork(scorer, task_id, request)
            else:
                self._score(scorer, task_id, request)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the scorer left behind
        os._exit(0)

    def _score(self, scorer: Scorer, task_id: str, request: bytes) -> None:
        scored = score_safely(lambda: scorer, request, self._tracebacks)
        if os.getpid() != self._pid:
            os._exit(0)  # a fork that the scorer made, which came back from it as well
        out_of_memory = scored[0] == "error" and scored[2]["error"].startswith(OUT_OF_MEMORY)
        if out_of_memory and self._settings.max_memory_gib:
            option = f"{self._settings.section}.max_memory_gib"
            error = f"{scored[2]['error']} ({option} is {self._settings.max_memory_gib:g})"
            scored = "error", 0.0, {"error": error}, scored[3]
        message = _sendable(task_id, scored)
        # what fills the memory may be kept by the scorer, so this process scores nothing more
        is_last = out_of_memory or getattr(scorer, "is_spent", False)
        send_message(self._sock, to_bytes({**json.loads(message), "last": True}) if is_last else message)

    def _score_in_fork(self, scorer: Scorer, task_id: str, request: bytes) -> None:
        self._forking = True
        pid = os.fork()
        self._forking = False
        if pid == 0:
            try:
                die_with_parent(self._pid)
                self._pid = os.getpid()
                self._score(scorer, task_id, request)
                sys.stdout.flush()
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        self._say({"ended": task_id, "code": os.waitstatus_to_exitcode(status)})

    def _let_go(self) -> None:
        """In a fork: the socket is not its own."""
        if not self._forking:
            with contextlib.suppress(OSError):
                self._sock.close()

    def _say(self, message: dict[str, Any]) -> None:
        send_message(self._sock, to_bytes(message))


def _sendable(task_id: str, scored: Scored) -> bytes:
    """The verdict's JSON; that of an error if the scorer's values cannot be written so, or are too many."""
    duration_s = scored[3]
    try:
        payload = to_bytes({"task": task_id, **verdict_message(scored)})
        if len(payload) <= MAX_ANSWER_BYTES:
            return payload
        of_info = len(payload) - len(to_bytes({"task": task_id, **verdict_message((*scored[:2], {}, duration_s))}))
        error = f"the scorer's info takes {of_info} bytes as JSON, above the {MAX_ANSWER_BYTES} that are recorded"
    except (ValueError, RecursionError) as refused:  # a whole number of 5,000 digits
        error = f"the scorer's info cannot be written as JSON: {describe(refused)}"
    return to_bytes({"task": task_id, **verdict_message(("error", 0.0, {"error": error}, duration_s))})
