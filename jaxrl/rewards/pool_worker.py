"""The process that runs a scorer: foreign code, on the model's text. Neither this module nor its imports use jax.

It leads its own session and process group and adopts all orphans below it. Its only descriptor is its socket, which
nothing that it starts inherits. After a request it kills every process that the scorer started for it; what
`Scorer.load` has started stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from jaxrl.processes.messages import BadMessage, receive_message, send_message, to_json
from jaxrl.processes.process_tree import adopt_orphans, close_all_but, descendants, die_with_parent, kill_descendants
from jaxrl.rewards.scorers import Scored, Scorer, describe, score_safely
from jaxrl.rewards.tracebacks import place_and_traceback
from jaxrl.schema.declared import MAX_FLOAT

GIB = 1 << 30
NUMBER_BYTES = 8
"""The bytes of a task's number, in front of its request."""
MAX_ANSWER_BYTES = 1 << 20
"""The longest answer, as JSON text: it may hold a scorer's long text, and no data."""
MAX_MESSAGE_BYTES = MAX_ANSWER_BYTES + (64 << 10)
"""An answer with a traceback and its envelope."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """The settings that host and workers of a pool share; it travels as a pickle.

    Attributes:
      scorer: a pickled `Scorer`. loads: its `loads`. preload: modules that are imported once, before workers fork.
      start_timeout_s: seconds that loading the scorer may take.
      max_retries: times that a request is scored again whose worker died.
      limits: by source, that of other sources under the empty name: seconds for one request (0: no limit), and the
        option that sets them.
      max_memory_gib: of one worker; 0: no limit.
      env: variables that workers get besides those that they always get. log: the file for what they print.
      section: of the options that say all this. on_ray: whether each worker is in a Ray actor; ray_address: of a
        cluster that this process itself uses, else Ray finds one.
    """

    scorer: bytes
    loads: str
    num_workers: int
    start_timeout_s: float
    max_retries: int
    limits: Mapping[str, tuple[float, str]]
    preload: tuple[str, ...] = ()
    max_memory_gib: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    section: str = "reward"
    on_ray: bool = False
    ray_address: str | None = None

    @property
    def name(self) -> str:
        """The name in errors of what runs in a worker."""
        return "the scorer" if self.section == "reward" else f"the {self.section}"

    @property
    def process(self) -> str:
        return f"{self.name}'s process"


def become_worker(host: int, sock: socket.socket, output: int, settings: PoolSettings) -> NoReturn:
    """The main function of the host's fork: loads the scorer, reports that, and scores until it is killed or its socket
    closes. `output`: the descriptor for what it prints."""
    try:
        asyncio._set_running_loop(None)  # the host's
        os.setsid()
        die_with_parent(host)
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for fd in (1, 2):
            os.dup2(output, fd)
        close_all_but({sock.fileno()})
        # lines are written as they end: a worker is killed without a last chance
        sys.stdout, sys.stderr = (
            open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115  (for as long as it lives)
            for fd in (1, 2)
        )
        _limit_memory(settings.max_memory_gib)
        sock.setblocking(True)
        _Worker(sock, settings).run()
    except BaseException:
        with contextlib.suppress(BaseException):
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
    def __init__(self, sock: socket.socket, settings: PoolSettings) -> None:
        self._sock, self._settings, self._pid = sock, settings, os.getpid()
        os.register_at_fork(after_in_child=self._let_go)

    def run(self) -> NoReturn:
        try:
            scorer: Scorer = pickle.loads(self._settings.scorer)
            scorer.load()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of the reward file's making, too
            is_users = isinstance(error, ValueError)
            problem = str(error) if is_users else f"{self._settings.loads} failed with {describe(error)}"
            self._send({"error": problem[:2000]})
            os._exit(0)
        self._send({"ready": True})
        kept = descendants(self._pid)
        while (message := receive_message(self._sock)) is not None:
            answer = self._score(scorer, int.from_bytes(message[:NUMBER_BYTES]), message[NUMBER_BYTES:])
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the scorer left behind
            kill_descendants(kept)
            self._send(answer)
        os._exit(0)

    def _score(self, scorer: Scorer, number: int, request: bytes) -> dict[str, Any]:
        scored, error = score_safely(scorer, request)
        if os.getpid() != self._pid:
            os._exit(0)  # a fork that the scorer made, which came back from it as well
        around: dict[str, Any] = {"task": number, "is_spent": getattr(scorer, "is_spent", False)}
        if isinstance(error, MemoryError):
            around["is_out_of_memory"] = True
            if self._settings.max_memory_gib:
                scored[2]["error"] += f" ({self._settings.section}.max_memory_gib is {self._settings.max_memory_gib:g})"
        elif error is not None:
            around["place"], around["traceback"] = place_and_traceback(error)
        return around | _sendable(scored)

    def _let_go(self) -> None:
        """In a fork: the socket is not its own."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def _send(self, message: dict[str, Any]) -> None:
        send_message(self._sock, to_json(message))


def _sendable(scored: Scored) -> dict[str, Any]:
    """The result as JSON; an error if the scorer's values cannot be written so, or are too many."""
    status, reward, info, duration_s = scored
    answer = {"status": status, "reward": reward, "info": info, "duration_s": duration_s}
    try:
        size = len(to_json(info))
        if size <= MAX_ANSWER_BYTES:
            return answer
        error = f"the scorer's info takes {size} bytes as JSON, above the {MAX_ANSWER_BYTES} that are recorded"
    except (ValueError, RecursionError) as refused:  # a whole number of 5,000 digits
        error = f"the scorer's info cannot be written as JSON: {describe(refused)}"
    return answer | {"status": "error", "reward": 0.0, "info": {"error": error}}


def read_scored(message: dict[str, Any]) -> Scored:
    """The result in an answer of a worker, with every value in its bounds: it runs foreign code. Raises BadMessage."""
    status, reward = message.get("status"), message.get("reward")
    info, duration_s = message.get("info"), message.get("duration_s")
    if status not in ("ok", "error"):
        raise BadMessage(f"a verdict with the status {status!r:.100}")
    if not _is_finite(reward) or not _is_finite(duration_s) or cast(float, duration_s) < 0:
        raise BadMessage(f"a verdict with the reward {reward!r:.100} after {duration_s!r:.100} s")
    if not isinstance(info, dict):
        raise BadMessage(f"a verdict with info of type {type(info).__name__}")
    try:  # neither infinite numbers (`1e999`) nor halves of surrogate pairs: no file of the run could hold them
        json.dumps(info, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a verdict with info that cannot be recorded ({error})"[:200]) from None
    return status, float(cast(float, reward)), info, float(cast(float, duration_s))


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_FLOAT
