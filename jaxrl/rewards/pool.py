"""A pool of worker processes: requests to a scorer in, futures of their results out.

`Pool` starts one process, the host (`jaxrl.rewards.pool_host`), which has all workers, here or in Ray actors, and talks
to it over one socket. What may go wrong with a worker is the host's business. A host that ends or sends nothing for too
long is started again and gets all requests again that have no result. The request in flight that is to blame shows when
they are scored again one at a time, each `max_retries` times at most.

Workers get an environment of named variables, no terminal, and nothing of this process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import pickle
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from jaxrl.processes.messages import receive_message, send_message
from jaxrl.processes.process_tree import kill_marked
from jaxrl.rewards.pool_host import MAX_ATTEMPTS, crashed
from jaxrl.rewards.pool_worker import PoolSettings
from jaxrl.rewards.scorers import Scored
from jaxrl.types import RunFailed

_log = logging.getLogger(__name__)

BEAT_S, SILENT_S = 5.0, 20.0
"""How often a host gives a sign of life, and after how long without one it is replaced."""
SILENT_ON_RAY_S = 150.0
"""Longer than Ray may be busy with one call."""
PAUSES_S, PAUSES_ON_RAY_S = (0.2, 0.2), (0.0, 15.0, 45.0)
"""Before a host is started again, by how often one ended in a row."""
_SLACK_S = 60.0  # beyond start_timeout_s, for an interpreter and its imports on a loaded machine
_CLOSE_S, _CLOSE_ON_RAY_S = 7.0, 15.0
_MARK = "JAXRL_POOL"
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"
_TAIL_BYTES = 4096
_NAMES = frozenset(
    name
    for line in (
        "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP XDG_CACHE_HOME SSL_CERT_FILE SSL_CERT_DIR",
        "PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX VIRTUAL_ENV",
        "CONDA_PREFIX LD_LIBRARY_PATH DYLD_LIBRARY_PATH CUDA_VISIBLE_DEVICES TOKENIZERS_PARALLELISM",
        "OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS NUMEXPR_NUM_THREADS RAYON_NUM_THREADS",
    )
    for name in line.split()
)
"""Variables that workers always get, besides `LC_*`; no others, as many hold keys and tokens."""


@dataclass(slots=True)
class _Request:
    source: str
    payload: bytes
    future: Future[Scored]
    has_begun: bool = False
    losses: int = 0  # hosts that were lost with it


class Pool:
    """Processes that score; they begin to start when the pool is made. Used from any thread.

    Raises ValueError where Ray is asked for and not installed.
    """

    def __init__(self, settings: PoolSettings) -> None:
        if settings.on_ray and importlib.util.find_spec("ray") is None:
            raise ValueError("reward.pool=ray needs ray, which is not installed: pip install 'jaxrl[ray]'")
        self._settings = settings
        self._notes: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._num_retried = 0
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._suspects: deque[int] = deque()  # under way when a host was lost: scored alone, one after another
        self._sock: socket.socket | None = None
        self._lock = threading.RLock()  # of these, and of writing to the socket
        self._reported = threading.Condition()
        self._num_ready = self._losses = 0
        self._has_spoken = False  # whether the present host has
        self._problem: Exception | None = None  # for `wait_ready`
        self._failed: RunFailed | None = None  # nothing is scored any more
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{settings.section} pool", daemon=True)
        self._thread.start()

    def submit(self, payload: bytes, source: str = "") -> Future[Scored]:
        """Queues a pickled request, and returns at once. `source`: of its prompt, for the domain in which it waits and
        the time that it may take. To cancel the future frees the worker. RunFailed as an exception of the future: no
        process can be started."""
        future: Future[Scored] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._failed is not None:
                future.set_exception(self._failed)
                return future
            self._requests[number] = _Request(source, payload, future)
            if not self._suspects:
                self._send("score", number, source, payload)
        future.add_done_callback(partial(self._drop_cancelled, number))
        return future

    def wait_ready(self) -> None:
        """Returns when every worker has loaded the scorer. Raises ValueError where it cannot be loaded; RunFailed:
        processes cannot be started here."""
        with self._reported:
            self._reported.wait_for(lambda: self._problem is not None or self._num_ready >= self._settings.num_workers)
            if self._problem is not None:
                raise self._problem

    def take_notes(self) -> list[tuple[str, str]]:
        """Why samples were scored again ("retried") and processes started again ("restarted") since the last call."""
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for request in self._requests.values():
            request.future.cancel()

    def _drop_cancelled(self, number: int, future: Future[Scored]) -> None:
        if future.cancelled() and not self._closing.is_set():
            with self._lock:
                self._send("drop", number)

    def _send(self, *message: Any) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):  # the thread finds that the host is gone, and sends all again
                send_message(self._sock, pickle.dumps(message))

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    why, is_silent = self._with_host()
                except OSError as error:
                    why, is_silent = f"no process can be started: {error}", False
                if not self._closing.is_set():
                    self._lost(why, is_silent)
        except RunFailed as failed:
            self._fail(failed)
        except BaseException as error:
            _log.exception("%s: the pool's own thread ended", self._settings.section)
            self._fail(RunFailed(f"{self._settings.section}: the pool's own thread failed: {error!r}"))

    def _with_host(self) -> tuple[str, bool]:
        """Starts a host, and reads what it sends until it ends; why it did, and whether it was silent."""
        on_ray, mark, is_silent = self._settings.on_ray, secrets.token_hex(16), False
        env = None if on_ray else _environment({**self._settings.env, _MARK: mark})
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as stderr, ours, theirs:
            process = _started("ray_host" if on_ray else "local_host", theirs.fileno(), stderr, env)
            theirs.close()
            try:
                with self._lock, contextlib.suppress(OSError):
                    send_message(ours, pickle.dumps((self._settings, BEAT_S)))
                    self._sock, self._num_ready, self._has_spoken = ours, 0, False
                    self._send_waiting()
                is_silent = self._listen(ours)
            finally:
                if is_silent:
                    process.kill()  # who waits for it to read has the lock
                with self._lock:
                    self._sock = None
                ours.close()  # on which it ends, with all that is below it; it may still import, and not look
                patience_s = _CLOSE_ON_RAY_S if on_ray else _CLOSE_S
                try:
                    process.wait(patience_s if self._has_spoken else 0.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                if process.returncode and not on_ray:
                    kill_marked(f"{_MARK}={mark}")
            return "it sent nothing for too long" if is_silent else f"it ended ({_last_line(stderr)[-500:]})", is_silent

    def _listen(self, sock: socket.socket) -> bool:
        """Reads until the host ends (False), or is silent for too long (True)."""
        sock.settimeout(min(self._settings.start_timeout_s + _SLACK_S, 1e6))
        while not self._closing.is_set():
            try:
                payload = receive_message(sock)
            except TimeoutError:
                return True
            except OSError:
                return False
            if payload is None:
                return False
            self._has_spoken = True
            sock.settimeout(SILENT_ON_RAY_S if self._settings.on_ray else SILENT_S)
            self._handle(*pickle.loads(payload))
        return False

    def _handle(self, kind: str, *values: Any) -> None:
        match kind, *values:
            case ("alive",):
                pass
            case "began", number:
                with self._lock:
                    self._requests[number].has_begun = True
            case "ended", number, scored:
                self._ended(number, scored)
            case ("ready",):
                self._report()
            case "failed", error:
                self._report(ValueError(error))
            case "fatal", error:
                raise RunFailed(error)
            case _, why:
                self._note(kind, why[:500])

    def _note(self, kind: str, why: str) -> None:
        """Counts it, and warns; of what is scored again the 1st, 2nd, 4th, 8th, ... time."""
        self._notes.put((kind, why))
        if kind == "restarted":
            _log.warning("%s pool: %s", self._settings.section, why)
            return
        self._num_retried += 1
        if self._num_retried & (self._num_retried - 1) == 0:
            count = self._num_retried
            _log.warning("%s pool: a sample is scored again, number %d: %s", self._settings.section, count, why)

    def _report(self, problem: Exception | None = None) -> None:
        with self._reported:
            self._num_ready += 1
            self._problem = self._problem or problem
            self._reported.notify_all()

    def _ended(self, number: int, scored: Scored) -> None:
        with self._lock:
            self._losses = 0
            request = self._requests.pop(number)
            if self._suspects:
                self._send_waiting()
        if request.future.set_running_or_notify_cancel():
            request.future.set_result(scored)

    def _send_waiting(self) -> None:
        """Sends a new host the next suspect alone, or else all requests."""
        for number in [number for number, each in self._requests.items() if each.future.cancelled()]:
            del self._requests[number]
        while self._suspects and self._suspects[0] not in self._requests:
            self._suspects.popleft()
        for number in [self._suspects[0]] if self._suspects else self._requests:
            request = self._requests[number]
            self._send("score", number, request.source, request.payload)

    def _lost(self, why: str, is_silent: bool) -> None:
        """A host is gone. Raises RunFailed where hosts end without work."""
        settings, has_begun = self._settings, self._blame(is_silent)
        self._losses = 0 if has_begun else self._losses + 1
        if self._losses >= MAX_ATTEMPTS:
            what = "the ray cluster is lost" if settings.on_ray else "no worker process can be started"
            raise RunFailed(
                f"{settings.section}: {what}: the host ended {self._losses} times in a row, the last time because {why}"
            )
        self._note("restarted", f"the workers' host is started again: {why}")
        pauses = PAUSES_ON_RAY_S if settings.on_ray else PAUSES_S
        self._closing.wait(pauses[max(self._losses - 1, 0)])

    def _blame(self, is_silent: bool) -> bool:
        """A request in flight may be the reason for a loss: it is scored alone, or fails after too many losses. Whether
        there was anything."""
        over: list[_Request] = []
        with self._lock:
            begun = {number: request for number, request in self._requests.items() if request.has_begun}
            for number, request in begun.items():
                request.has_begun = False
                request.losses += 1
                if request.losses > self._settings.max_retries:
                    over.append(self._requests.pop(number))
                elif number not in self._suspects:
                    self._suspects.append(number)
        why = f"the host of {self._settings.process} ended or did not answer"
        for request in over:
            if request.future.set_running_or_notify_cancel():
                request.future.set_result(crashed(why, request.losses, is_silent=is_silent))
        return bool(begun)

    def _fail(self, failed: RunFailed) -> None:
        with self._lock:
            requests, self._requests = [*self._requests.values()], {}
            self._failed = failed
        self._report(failed)
        for request in requests:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(failed)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if n in _NAMES or n.startswith("LC_")} | dict(more)


def _started(host: str, fd: int, stderr: IO[bytes], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    """Starts a host in a new interpreter, since threads of jax or Ray do not survive a fork, and in a new session, as a
    terminal's Ctrl-C is not for it. `fd`: a descriptor that it gets, under the same number."""
    # -P: before the path is set, nothing comes from the working folder, such as a json.py of the user's
    path = [os.getcwd() if entry == "" else entry for entry in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT.format(f"jaxrl.rewards.{host}"), json.dumps(path), str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=env,
        pass_fds=[fd],
        start_new_session=True,
    )


def _last_line(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(size - _TAIL_BYTES, 0))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
