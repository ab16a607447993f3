"""The first process of a reward pool: it has the scorer's libraries loaded, and forks a keeper for each worker.

The trainer starts it with `start_warden`, as a new interpreter: jax's threads do not survive a fork, and the main
module is not run again. It is a session of its own, so Ctrl-C in the trainer's terminal does not reach it, and it runs
no code of the user's. It ends when its socket closes, whatever ended the trainer, and takes everything below it along.

A keeper's socket to the trainer is made here and handed over, so that neither needs a name in the file system.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, NoReturn

from jaxrl.processes.messages import Channel, read_message, receive_message
from jaxrl.processes.process_tree import (
    PATIENCE_S,
    adopt_orphans,
    close_all_but,
    kill,
    kill_descendants,
    wake_by_children,
)
from jaxrl.rewards.keeper import Keeper
from jaxrl.rewards.tracebacks import TracebackDeduper
from jaxrl.rewards.worker import WorkerSettings

PID = struct.Struct("!I")
"""What comes with a keeper's socket."""
_COMMAND_BYTES = 4096
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jaxrl.rewards.warden import main; main()"

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


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """What workers get of this process's environment, and `more`."""
    return {n: v for n, v in os.environ.items() if n in NAMES or n.startswith("LC_")} | dict(more)


def start_warden(sock: socket.socket, env: Mapping[str, str], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    """A new warden, which has the other end of the socket `sock` is one end of."""
    # -P: before the path is set, nothing comes from the working folder, such as a json.py of the user's
    path = [os.getcwd() if entry == "" else entry for entry in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT, json.dumps(path), str(sock.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=dict(env),
        pass_fds=[sock.fileno()],
        start_new_session=True,
    )


def main() -> NoReturn:
    sock = socket.socket(fileno=int(sys.argv[2]))
    sock.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when its pool ends
    setup = receive_message(sock)
    if setup is not None:
        _Warden(sock, pickle.loads(setup)).run()
    os._exit(0)


class _Warden:
    def __init__(self, sock: socket.socket, settings: WorkerSettings):
        adopt_orphans()
        for module in settings.preload:
            with contextlib.suppress(Exception):  # a worker finds the same, and can say so
                importlib.import_module(module)
        self._control = Channel(sock, _COMMAND_BYTES)
        self._settings, self._tracebacks = settings, TracebackDeduper()
        self._wakeup = wake_by_children()
        self._keepers: dict[int, socket.socket] = {}  # by process; it lives while its socket is open

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
                for frame in self._control.receive():
                    command = read_message(frame)
                    if "start" in command:
                        self._start_keeper()
                    elif command["end"] in self._keepers:
                        kill(command["end"])
        self._end()

    def _start_keeper(self) -> None:
        trainers, keepers = socket.socketpair()
        ours, lifeline = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                close_all_but({keepers.fileno(), lifeline.fileno()})
                Keeper(keepers, lifeline, wake_by_children(), self._tracebacks, self._settings).run()
            os._exit(1)
        keepers.close()
        lifeline.close()
        self._keepers[pid] = ours
        self._control.sock.setblocking(True)
        socket.send_fds(self._control.sock, [PID.pack(pid)], [trainers.fileno()])
        self._control.sock.setblocking(False)
        trainers.close()

    def _reap(self) -> None:
        """A keeper that ended leaves its worker's processes to this one: they are killed."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                lost = self._keepers.pop(pid, None)
                if lost is not None:
                    lost.close()
        kill_descendants(self._keepers)

    def _end(self) -> None:
        """The keepers end as their sockets close, with all that is below them; those that do not are killed."""
        for lifeline in self._keepers.values():
            lifeline.close()
        deadline = time.monotonic() + PATIENCE_S
        while self._keepers and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        kill_descendants(())
