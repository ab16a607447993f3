"""A fork server: a process that has libraries loaded, and forks a supervisor for each worker that a pool wants.

`ForkServer` is the pool's side. The server is a new interpreter in a session of its own, where Ctrl-C in the terminal
does not reach it. It runs no code of the user's, and ends when its socket closes, with everything below it. A
supervisor's socket to the pool is made in the server and handed over.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, NoReturn, Protocol

from jaxrl.processes.messages import Channel, read_message, receive_message, to_bytes
from jaxrl.processes.process_tree import (
    PATIENCE_S,
    adopt_orphans,
    close_all_but,
    kill,
    kill_descendants,
    wake_by_children,
)
from jaxrl.processes.python_child import last_line, start_python, wait_or_kill

_PID = struct.Struct("!I")  # what comes with a supervisor's socket
_COMMAND_BYTES = 4096
_CLOSE_S = 7.0
_WORDS = 500  # characters of a last line

NAMES = frozenset(
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

Supervise = Callable[[socket.socket, socket.socket, socket.socket], NoReturn]
"""What a supervisor does, given its socket to the pool, one that closes with the server, and one that can be read when
a child of its own has ended or stopped (`wake_by_children`)."""


class Service(Protocol):
    """What the server is for; it travels there as a pickle."""

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that are imported once, in the server."""
        ...

    def prepare(self) -> Supervise:
        """Called once, in the server; what it makes is shared by all supervisors, as far as memory can be."""
        ...


class ForkServer:
    """The server's process, and the way to it.

    Args:
      env: variables that it gets besides `NAMES`.

    Attributes:
      asked_s: when it was last commanded, by `time.monotonic`.
    """

    def __init__(self, service: Service, env: Mapping[str, str]):
        self._service, self._env = service, _environment(env)
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
        """Raises OSError where no process can be started."""
        ours, theirs = socket.socketpair()
        try:
            self._process = start_fork_server(theirs, self._env, self._stderr)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._has_handed_over = False
        self.control = Channel(ours, 0)
        self.control.send(pickle.dumps(self._service))

    def command(self, message: dict[str, int]) -> None:
        """`{"start": 1}` for another supervisor, `{"end": pid}` to kill one."""
        if self.alive:
            self.asked_s = time.monotonic()
            self.control.send(to_bytes(message))

    def new_supervisors(self) -> list[tuple[int, socket.socket]]:
        """Those that have been started since the last call, with their sockets."""
        found: list[tuple[int, socket.socket]] = []
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self.control.sock, _PID.size, 1)
                if not data:
                    self.control.ended = True
                    break
                os.set_inheritable(fds[0], False)
                found.append((_PID.unpack(data)[0], socket.socket(fileno=fds[0])))
                self._has_handed_over = True
        except BlockingIOError:
            pass
        except OSError:
            self.control.ended = True
        return found

    def last_words(self) -> str:
        return last_line(self._stderr)[:_WORDS]

    def end(self) -> None:
        """Closes the server's socket, on which it ends with all its processes; kills it if it does not.

        One that has handed over no supervisor is killed at once: it may import for a second before it looks, and a
        supervisor ends by itself where the server is gone.
        """
        if self._process is None:
            return
        self.control.close()
        wait_or_kill(self._process, _CLOSE_S if self._has_handed_over else 0.0)
        self._process = None

    def close(self) -> None:
        self.end()
        self._stderr.close()


def start_fork_server(sock: socket.socket, env: Mapping[str, str], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return start_python(__name__, [str(sock.fileno())], [sock.fileno()], stderr=stderr, env=env)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if n in NAMES or n.startswith("LC_")} | dict(more)


# -- in the server -----------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    sock = socket.socket(fileno=int(sys.argv[2]))
    sock.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pool decides when it ends
    setup = receive_message(sock)
    if setup is not None:
        _Server(sock, pickle.loads(setup)).run()
    os._exit(0)


class _Server:
    def __init__(self, sock: socket.socket, service: Service):
        adopt_orphans()
        for module in service.preload:
            with contextlib.suppress(Exception):  # a worker finds the same, and can say so
                importlib.import_module(module)
        self._control = Channel(sock, _COMMAND_BYTES)
        self._supervise = service.prepare()
        self._wakeup = wake_by_children()
        self._supervisors: dict[int, socket.socket] = {}  # by process; it lives while its socket is open

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while not self._control.ended:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(4096)
                self._reap()
            if self._control.fileno() in ready:
                for payload in self._control.receive():
                    command = read_message(payload)
                    if "start" in command:
                        self._start_supervisor()
                    elif command["end"] in self._supervisors:
                        kill(command["end"])
        self._end()

    def _start_supervisor(self) -> None:
        pools, supervisors = socket.socketpair()
        ours, lifeline = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                close_all_but({supervisors.fileno(), lifeline.fileno()})
                self._supervise(supervisors, lifeline, wake_by_children())
            os._exit(1)
        supervisors.close()
        lifeline.close()
        self._supervisors[pid] = ours
        self._control.sock.setblocking(True)
        socket.send_fds(self._control.sock, [_PID.pack(pid)], [pools.fileno()])
        self._control.sock.setblocking(False)
        pools.close()

    def _reap(self) -> None:
        """A supervisor that ended leaves its worker's processes to this one: they are killed."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                lost = self._supervisors.pop(pid, None)
                if lost is not None:
                    lost.close()
        kill_descendants(self._supervisors)

    def _end(self) -> None:
        """The supervisors end as their sockets close, with all that is below them; those that do not are killed."""
        for lifeline in self._supervisors.values():
            lifeline.close()
        deadline = time.monotonic() + PATIENCE_S
        while self._supervisors and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        kill_descendants(())
