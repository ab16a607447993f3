"""The scorer's side of the sandbox: starts the fork server, gives it programs, and reads what became of them."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxrl.rewards.sandbox.locks import environment
from jaxrl.rewards.sandbox.orders import Execution, Limits, Means, Order
from jaxrl.rewards.sandbox.probe import bubblewrap

_START_S = 60.0
_CLOSE_S = 20.0  # for what a program left to be ended, on a loaded machine
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_ROOT = Path(__file__).resolve().parents[3]
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from jaxrl.rewards.sandbox.server import main; main()"


class SandboxFailed(Exception):
    """The sandbox could not run a program: no verdict on it."""


class Sandbox:
    """Runs programs, one at a time. Its server ends with `close`, or with this process.

    Attributes:
      means: what locks programs in; as long as there is nothing, nothing is run.
      bubblewrap: whether the server, and all that it runs, is in bubblewrap's namespaces.
    """

    def __init__(self, limits: Limits, means: Means | None = None, *, bubblewrap: bool = False):
        self.limits = limits
        self.means = means
        self.bubblewrap = bubblewrap
        self._server: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._owner = 0

    @property
    def pid(self) -> int:
        assert self._server is not None, "start() comes first"
        return self._server.pid

    def start(self) -> Means:
        """Starts the server, waits until it is warm, and returns what it finds on this machine to lock programs in.

        Raises:
          SandboxFailed: it does not start.
          ValueError: bubblewrap cannot be had here.
        """
        self.close()
        wrapping, user = bubblewrap() if self.bubblewrap else ([], None)
        self._sock, theirs = socket.socketpair()
        self._owner = os.getpid()
        caged = "caged" if self.means is None or self.means.namespaces else "free"
        command = [*wrapping, sys.executable, "-s", "-P", "-c", _BOOT, str(_ROOT), str(theirs.fileno()), caged]
        with theirs:
            try:
                self._server = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment(),
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    user=user,
                    group=user,
                    extra_groups=None if user is None else [],
                )
            except OSError as error:
                self._gone(error)
        found = self._receive(_START_S)
        return Means(**{**found, "user_ids": tuple(found["user_ids"])})

    def script(self, text: str, stdin: str, limit_s: float, command: Sequence[str] = ()) -> Execution:
        """Runs a program that reads its standard input and writes to its standard output."""
        return self._run(text, stdin, role="script", limits_s=(), default_limit_s=limit_s, command=command)

    def tests(self, text: str, job: dict[str, Any], limits_s: Sequence[float], default_limit_s: float) -> Execution:
        """Runs tests against a program (`jaxrl.rewards.sandbox.suites.run_tests` says what a job is)."""
        role, modules = "calls" if job["shape"] == "calls" else "names", ["pytest"] * ("pytest" in job.get("text", ""))
        asked = {"role": role, "limits_s": limits_s, "default_limit_s": default_limit_s, "modules": modules}
        return self._run(text, json.dumps(job), **asked)

    def _run(self, text: str, data: str, **asked: Any) -> Execution:
        if self._sock is None:
            self.start()
        assert self._sock is not None
        assert self.means is not None, "start() says what there is to choose from"
        fds = [_unnamed_file(text), _unnamed_file(data)]
        try:
            socket.send_fds(self._sock, [b"f"], fds)
            self._sock.sendall(pickle.dumps(Order(means=self.means, limits=self.limits, **asked)))
        except OSError as error:
            self._gone(error)
        finally:
            for fd in fds:
                os.close(fd)
        reply = self._receive(None)
        if "failed" in reply:
            raise SandboxFailed(f"the sandbox could not run a program: {reply['failed']}")
        return Execution(**reply)

    def _receive(self, timeout_s: float | None) -> dict[str, Any]:
        """The server's next message. An execution's time is the server's to keep, so there is no limit then."""
        assert self._sock is not None
        self._sock.settimeout(timeout_s)
        try:
            with self._sock.makefile("rb") as stream:
                line = stream.readline()
        except OSError as error:
            self._gone(error)
        return json.loads(line) if line else self._gone("it has ended")

    def _gone(self, why: Exception | str) -> NoReturn:
        self.close()
        raise SandboxFailed(f"the sandbox's fork server is gone: {why}")

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        server, self._server, self._sock = self._server, None, None
        if server is not None and self._owner == os.getpid():
            try:
                server.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _unnamed_file(text: str) -> int:
    """A file in memory that can be read and not written."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "replace"))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
