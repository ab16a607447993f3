"""A process that uses ray, from both sides: rewards on several machines.

Ray ends the process that uses it when it has lost the cluster's head for a minute ("The program will terminate"), and
installs handlers of signals. In the trainer that would be the end of a run, without a word. So a pool starts a process
of its own (`RayProcess`), and starts it again if it ends.

Source: ray 2.60, of which a killed head was tried; https://github.com/ray-project/ray/issues/45570.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any

from jaxrl.processes.messages import HEADROOM_BYTES, MAX_ANSWER_BYTES, Channel, read_message, receive_message
from jaxrl.processes.python_child import last_line, start_python, wait_or_kill

SILENT_S = 150.0
"""Longer than ray may be busy with one call; the process says every few seconds that it lives."""
END_S = 10.0
"""For the actors to be ended when who started the process has gone."""
_CLOSE_S = 15.0
_WORDS = 500  # characters of a last line


class RayProcess:
    """A process that uses ray, and the way to it; it runs `main` of `module`, and is sent `setup` first."""

    def __init__(self, module: str, setup: bytes) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        fds = theirs.fileno(), lifeline
        self._process = start_python(module, [str(fd) for fd in fds], fds, stderr=self._stderr)
        theirs.close()
        os.close(lifeline)
        self._channel = Channel(ours, MAX_ANSWER_BYTES + HEADROOM_BYTES)
        self._heard_s = time.monotonic()
        self._channel.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, *message: Any) -> None:
        self._channel.send(pickle.dumps(message))

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """What it has said; waits so long for something."""
        self._channel.flush()
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0))
        deadline = time.monotonic() + timeout_s
        while not self._channel.ended:
            ready = poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
            self._channel.flush()
            found = [read_message(payload) for payload in self._channel.receive()]
            if found:
                self._heard_s = time.monotonic()
                return found
            if not ready or time.monotonic() >= deadline:
                break
        return []

    @property
    def problem(self) -> str | None:
        """Why it is of no use any more; None if it is."""
        if self._channel.ended:
            return f"it ended ({last_line(self._stderr)[-_WORDS:]})"
        if time.monotonic() - self._heard_s > SILENT_S:
            return f"it said nothing for {SILENT_S:.0f} s"
        return None

    def end(self) -> None:
        """Closes the socket, on which it ends the actors and itself; kills it if it does not."""
        self._channel.close()
        wait_or_kill(self._process, _CLOSE_S)
        os.close(self._lifeline)
        self._stderr.close()


def begin() -> tuple[socket.socket, Any]:
    """What a process that uses ray does first: the socket to the process that started it, and the setup that came.

    `argv` holds the path, and the numbers of the socket and of a pipe that closes with the other process.
    """
    sock, lifeline = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    sock.set_inheritable(False)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    return sock, pickle.loads(receive_message(sock) or b"")


def connect(address: str | None) -> Any:
    """The module ray, which uses the cluster at `address` from here on; None: one that it finds or makes."""
    import ray  # pyright: ignore[reportMissingImports]  (an optional extra)

    ray.init(address=address, include_dashboard=False, log_to_driver=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the other process decides when this one ends
    return ray


def _end_with(lifeline: int) -> None:
    """Ends the process, whatever call of ray it is in, some time after who started it has."""
    os.read(lifeline, 1)
    time.sleep(END_S)
    os._exit(1)
