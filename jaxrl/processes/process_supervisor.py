"""The supervisor of one process: starts it, watches it, and ends it with everything below it.

A launcher has one per host, as its agent; with Ray an actor stands between them (`SupervisorProcess` is their side of
it). Below stand a guard, the supervisor, and the process, each the parent of the next:

- the supervisor ends when its socket or the guard does, and kills what is below it first, whatever that has started and
  wherever it has moved (`jaxrl.processes.process_tree`);
- the guard ends when the supervisor does, and kills what was below that; where the launcher is gone and the supervisor
  does not end (it may be stopped), the guard kills it after `GUARD_S`;
- where both are killed at once, the kernel kills the process, and who started the guard kills the rest.

So each of them may be killed at any moment, the launcher too, and nothing is left. On other systems than Linux only the
process's group is killed.

SIGTERM to a guard is passed on to its supervisor, which reports it to the launcher, which stops the run at a boundary.

A supervisor reports what happens as it happens: it sleeps until its socket, an output or a child wakes it. It imports
nothing heavy, and nothing of the user's runs in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jaxrl.processes.messages import BadMessage, Channel, read_message, to_bytes
from jaxrl.processes.process_tree import adopt_orphans, die_with_parent, kill, kill_descendants, wake_by_children
from jaxrl.processes.python_child import start_python

MAX_MESSAGE_BYTES = 16 << 20  # both sides are trusted
TAIL_LINES, _TAIL_BYTES = 20, 8192
LOCK_S = 120.0
"""For the lock of a run whose process was killed to be dropped: a file server keeps a lost client's for a while."""
ALIVE_EVERY_S = 1.0
"""How often a supervisor says that it lives, and looks for a new checkpoint."""
GUARD_S = 5.0
END_S = 10.0
"""For a supervisor, or the guard of one that does not (`GUARD_S`), to have ended everything below it."""
_GONE_S = 5.0
_LOCK_EVERY_S = 0.2
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Start:
    """What a supervisor is told to start.

    Attributes:
      arguments: of Python.
      environment: on top of the supervisor's own; `without`: names that are taken out of that first.
      folder: to run in.
      log: file that gets the output; empty: it goes where the supervisor's own goes, or to the launcher.
      relay: whether it goes to the launcher.
      lock: file that must be free first; empty: none.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    without: list[str] = field(default_factory=list)
    log: str = ""
    relay: bool = False
    lock: str = ""

    def message(self) -> dict[str, Any]:
        return {"start": asdict(self)}


@dataclass
class _Process:
    """The process that is supervised."""

    popen: subprocess.Popen[bytes]
    log: str
    offset: int  # of what it writes there
    outputs: dict[int, int]  # pipe -> 1 or 2, where its output is relayed
    last: dict[int, bytes] = field(default_factory=dict)  # of what was relayed, by stream


class _Supervisor:
    def __init__(self, channel: Channel, guard: int, run_dir: str, host: str) -> None:
        self._channel, self._guard, self._run_dir, self._host = channel, guard, run_dir, host
        self._process: _Process | None = None
        self._waiting: tuple[Start, float] | None = None  # for the lock, since when
        self._seen: int | None = None  # checkpoint
        self._looked_s = time.monotonic()
        self._asked = False

    def ask(self) -> None:
        """Somebody wants the run to stop; called by a signal."""
        self._asked = True

    def run(self) -> NoReturn:
        """Returns when the launcher or the guard is gone, with nothing left below."""
        adopt_orphans()
        self._woken = wake_by_children()
        try:
            self._seen = newest_checkpoint(self._run_dir)
            self._say({"ready": os.getpid(), "port": free_port(self._host), "checkpoint": self._seen})
            while not self._channel.ended:
                self._listen()
        finally:
            self._end_all()
            os._exit(0)

    def _say(self, message: dict[str, Any]) -> None:
        self._channel.send(to_bytes(message))

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0))
        outputs = {} if self._process is None else self._process.outputs
        for source in (self._guard, self._woken.fileno(), *outputs):
            poll.register(source, select.POLLIN)
        wait_s = ALIVE_EVERY_S if self._waiting is None else _LOCK_EVERY_S
        ready = {fd for fd, _ in poll.poll(math.ceil(wait_s * 1000))}
        if self._guard in ready:  # it says nothing: it has ended
            self._channel.close()
            return
        self._channel.flush()
        for payload in self._channel.receive():
            self._obey(read_message(payload))
        if self._waiting is not None:
            self._await_lock(*self._waiting)
        for source in ready & outputs.keys():
            self._relay(source)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        if self._asked:
            self._asked = False
            self._say({"asked": True})
        self._reap()
        if time.monotonic() - self._looked_s >= ALIVE_EVERY_S:
            self._looked_s = time.monotonic()
            self._say({"alive": True})
            self._look()

    def _obey(self, message: dict[str, Any]) -> None:
        if "start" in message:
            start = Start(**message["start"])
            if start.lock:
                self._waiting = start, time.monotonic()
            else:
                self._start(start)
        elif "signal" in message and self._process is not None and self._process.popen.returncode is None:
            os.kill(self._process.popen.pid, message["signal"])

    def _await_lock(self, start: Start, since_s: float) -> None:
        """Starts when nobody holds the lock any more, or when it has been waited for long enough: the process itself
        has the words for that."""
        if is_locked(start.lock) and time.monotonic() - since_s < LOCK_S:
            return
        self._waiting = None
        self._start(start)

    def _start(self, start: Start) -> None:
        environment = {n: v for n, v in os.environ.items() if n not in start.without} | start.environment
        with contextlib.ExitStack() as files:
            try:
                out, err, sources, offset = self._streams(start, files)
                popen = subprocess.Popen(
                    [sys.executable, *start.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    cwd=start.folder,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            except OSError as error:
                place = f"{error.filename}: " if error.filename else ""
                self._say({"refused": place + (error.strerror or str(error)).lower()})
                return
        self._process = _Process(popen, start.log, offset, sources)
        self._say({"started": popen.pid})

    def _streams(self, start: Start, files: contextlib.ExitStack) -> tuple[Any, Any, dict[int, int], int]:
        """The process's two streams, the pipes that they are read from here, and what the log holds already."""
        if start.relay:
            sources, sinks = {}, []
            for number in (1, 2):
                source, sink = os.pipe()
                os.set_blocking(source, False)
                sources[source] = number
                sinks.append(files.enter_context(os.fdopen(sink, "wb")))
            return *sinks, sources, 0
        if start.log:
            path = Path(start.log)
            path.parent.mkdir(parents=True, exist_ok=True)
            log = files.enter_context(path.open("ab"))
            return log, log, {}, log.tell()
        return None, None, {}, 0

    def _relay(self, source: int) -> None:
        """Passes on what there is to read; closes the pipe when that was all."""
        process = self._process
        assert process is not None
        while True:
            try:
                data = os.read(source, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                os.close(source)
                del process.outputs[source]
                return
            stream = process.outputs[source]
            process.last[stream] = (process.last.get(stream, b"") + data)[-_TAIL_BYTES:]
            # one character for each byte: a letter of several bytes may be cut here
            self._say({"output": data.decode("latin-1"), "stream": stream})

    def _reap(self) -> None:
        """Reaps what has ended below, and reports the end of the process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            process = self._process
            if process is not None and pid == process.popen.pid:
                process.popen.returncode = os.waitstatus_to_exitcode(status)
                for source in tuple(process.outputs):
                    self._relay(source)
                self._look()
                self._say({"ended": process.popen.returncode, "tail": _tail(process)})
                self._end_all()  # nothing that it started outlives it

    def _look(self) -> None:
        """Reports a new checkpoint."""
        step = newest_checkpoint(self._run_dir)
        if step != self._seen and step is not None:
            self._seen = step
            self._say({"saved": step})

    def _end_all(self) -> None:
        if self._process is not None and self._process.popen.returncode is None:
            kill(self._process.popen.pid, group=True)
        kill_descendants(())


class SupervisorProcess:
    """A supervisor on this machine, from the side of who starts it.

    Args:
      run_dir: whose checkpoints it looks for.
      host: the address that the port it finds is to be free on; empty: all of the machine's.
    """

    def __init__(self, run_dir: str, host: str) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self.pid = 0  # of the supervisor itself, once it has said so
        fds = theirs.fileno(), lifeline
        self._process = start_python(__name__, [*map(str, fds), run_dir, host], fds, stdout=None)
        theirs.close()
        os.close(lifeline)
        self._channel = Channel(ours, MAX_MESSAGE_BYTES)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def guard(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._channel.ended

    def send(self, message: dict[str, Any]) -> None:
        self._channel.send(to_bytes(message))

    def receive(self) -> list[dict[str, Any]]:
        """What it has said by now."""
        self._channel.flush()
        try:
            messages = [read_message(payload) for payload in self._channel.receive()]
        except BadMessage:
            self._channel.ended = True
            return []
        for message in messages:
            self.pid = message.get("ready", self.pid)
        return messages

    def begin_end(self) -> None:
        """Asks it to end."""
        os.close(self._lifeline)
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_WR)

    def finish_end(self, deadline_s: float) -> None:
        """Returns when it is gone with all below it; kills it at `deadline_s`, by `time.monotonic`."""
        if not self._gone(deadline_s):
            for pid in filter(None, (self.pid, self.guard)):  # what is below the one is killed by the other
                kill(pid)
            self._gone(time.monotonic() + _GONE_S)
        self._channel.close()

    def _gone(self, deadline_s: float) -> bool:
        """Whether both the supervisor and its guard end by then."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._channel.ended:
            poll.poll(max(deadline_s - time.monotonic(), 0.0) * 1000)
            self.receive()
            if time.monotonic() >= deadline_s and not self._channel.ended:
                return False
        try:
            self._process.wait(max(deadline_s - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            return False
        return True


def newest_checkpoint(run_dir: str) -> int | None:
    """What run.json says (`jaxrl.record.run_dir`); None where it is not there, or cannot be read."""
    try:
        found = json.loads((Path(run_dir) / "run.json").read_text(encoding="utf-8")).get("checkpoint")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def is_locked(file: str) -> bool:
    """Whether a process holds the lock. A file that is not there is not made."""
    try:
        held = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as filelock does
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(held)
    return False


def free_port(host: str) -> int:
    """One that nobody listens on now, on `host`; empty: on all addresses, which is where jax's coordinator listens."""
    if host or not socket.has_dualstack_ipv6():
        with socket.socket() as probe:
            probe.bind((host, 0))
            return probe.getsockname()[1]
    with socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("::", 0))
        return probe.getsockname()[1]


def _tail(process: _Process) -> list[str]:
    """The last lines that the process printed, where they went to a log or through here; then of stderr, if any."""
    last = process.last.get(2) or process.last.get(1, b"")
    if process.log:
        try:
            with open(process.log, "rb") as file:
                file.seek(max(process.offset, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                last = file.read()
        except OSError:
            return []
    return last.decode("utf-8", "replace").splitlines()[-TAIL_LINES:]


def main() -> NoReturn:
    """The guard, and the supervisor below it. `argv`: the path, the numbers of the socket and of a pipe that closes
    with the launcher, the run directory, the host."""
    sock, launcher = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    sock.set_inheritable(False)
    os.set_inheritable(launcher, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # not ignored, or what is started would ignore it as well
            signal.signal(number, lambda *_: None)  # the launcher decides when it ends
    adopt_orphans()
    lifeline, held = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.setpgid(0, 0)  # who kills the guard's group has not killed the supervisor
        os.close(held)
        os.close(launcher)
        own = _Supervisor(Channel(sock, MAX_MESSAGE_BYTES), lifeline, *sys.argv[4:6])
        _on_sigterm(own.ask)
        own.run()
    _on_sigterm(lambda: os.kill(supervisor, signal.SIGTERM))
    sock.close()
    os.close(lifeline)
    _guard(supervisor, launcher)


def _on_sigterm(act: Callable[[], None]) -> None:
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, lambda *_: act())


def _guard(supervisor: int, launcher: int) -> NoReturn:
    """Ends when the supervisor has, with nothing left below."""
    woken, deadline_s = wake_by_children(), math.inf
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(launcher, select.POLLIN)
    while os.waitpid(supervisor, os.WNOHANG) == (0, 0):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            kill(supervisor)
            os.waitpid(supervisor, 0)
            break
        ready = {fd for fd, _ in poll.poll(None if math.isinf(left_s) else math.ceil(left_s * 1000))}
        if launcher in ready:
            poll.unregister(launcher)
            deadline_s = time.monotonic() + GUARD_S
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)
    kill_descendants(())
    os._exit(0)
