"""A host that forks its workers on this machine, and its state of each.

The trainer holds jax and many threads, and so never forks. This program loads the scorer's libraries once and forks the
workers (`jaxrl.rewards.pool_worker`). Each has its own socket, which carries JSON: what it sends is never unpickled.
Processes below a worker that has ended become the host's children, and it kills them.

Pebble's process pool (5.2.3) was tried instead. Its workers share one pipe, so eight bytes of garbage from one end the
answers of all. The parent unpickles what they send, and processes that a task has started live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import socket
import time
from typing import Any

from jaxrl.processes.messages import BadMessage, framed, read_json, read_message
from jaxrl.processes.process_tree import PATIENCE_S, adopt_orphans, kill, kill_descendants, kill_once
from jaxrl.rewards.pool_host import UNWANTED, Answer, Died, Host, StartFailed, Task, crashed, run
from jaxrl.rewards.pool_worker import MAX_MESSAGE_BYTES, NUMBER_BYTES, PoolSettings, become_worker, read_scored
from jaxrl.rewards.scorers import Scored

MAX_LOG_BYTES = 16 << 20
DROP_S = 1.0
"""How long a task that is not wanted any more may still take; starting a worker costs as much."""
_EXIT_S = 0.5  # for a worker whose socket has closed to be gone by itself


def timed_out(limit_s: float, option: str) -> Scored:
    return "timeout", 0.0, {"error": f"no score within {option} ({limit_s:g} s)"}, limit_s


class LocalWorker:
    """A fork of the host; implements `jaxrl.rewards.pool_host.Worker`. `living`: processes of the host's workers."""

    def __init__(self, host: Host, living: set[int], log: Log) -> None:
        self._settings, self._living, self._log = host.settings, living, log
        self._was_ready = host.was_ready
        self.num_done = 0

    async def start(self) -> None:
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
            raise Died(f"{self._settings.process} sent a verdict that it was not asked for")
        try:
            scored = read_scored(message)
        except BadMessage as bad:
            raise Died(f"{self._settings.process} sent {bad}") from None
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
            raise Died(f"{self._settings.process} sent {bad}") from None
        deadline = time.monotonic() + _EXIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    code = os.waitstatus_to_exitcode(status)
                    raise Died(f"{self._settings.process} ended with exit code {code}")
            await asyncio.sleep(0.001)
        raise Died(f"{self._settings.name} closed its process's connection to the pool")


class Log:
    """The log of what workers print and where they failed: appended to a file until that has `MAX_LOG_BYTES`; without a
    file it is dropped. Each traceback is written once. `sink`: the descriptor for what workers print."""

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
        kill_descendants()
        log.drain()


def main() -> None:
    run(serve_locally)
