"""The scorer's side of the sandbox: starts the fork server, hands it programs, and reads what became of them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrl.processes.messages import BadMessage, receive_message
from jaxrl.processes.python_child import wait_or_kill
from jaxrl.rewards.sandbox.locks import Limits, Means, environment

_HEADER_BYTES = 4
_START_S = 60.0
_SLACK_S = 20.0  # beyond the limits of an execution, for forks and for ending what it left, on a loaded machine
_MAX_REPLY = 64 << 20
_ROOT = Path(__file__).resolve().parents[3]
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from jaxrl.rewards.sandbox.server import main; main()"
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SandboxFailed(Exception):
    """The sandbox could not run a program: no verdict on it."""


@dataclass(frozen=True)
class Execution:
    """What running one program came to.

    Attributes:
      end: exit; time, output or memory: a limit ended it. code: its exit code, where end is exit.
      seconds: that a script ran, and of tests, that the last case which began did.
      output, errors: what it wrote; of errors the last part.
      cases: how many its tests have; None of a script, or if the tests did not begin.
      results: (case, whether it was right, seconds, why not) of each that ended. running: one that did not.
      loaded: whether the tested program was run to its end, so that it could be called.
      done: whether all cases were run. broken: why the tests are no Python.
    """

    end: str
    code: int
    seconds: float
    output: str
    errors: str
    cases: int | None
    results: list[tuple[int, bool, float, str]]
    running: int | None
    loaded: bool
    done: bool
    broken: str


class Sandbox:
    """Runs programs, one at a time. A context manager; without it, the server ends with this process. `means`: what
    locks programs in; as long as there is nothing, nothing is run."""

    def __init__(self, limits: Limits, means: Means | None = None):
        self.limits = limits
        self.means = means
        self._server: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._owner = 0

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._server is not None, "start() comes first"
        return self._server.pid

    def start(self) -> Means:
        """Starts the server, waits until it is warm, and returns what it finds on this machine to lock programs in.
        Raises SandboxFailed: it does not start."""
        self.close()
        ours, theirs = socket.socketpair()
        try:
            self._server = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", _BOOT, str(_ROOT), str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment(),
                cwd="/",
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            ours.close()
            raise SandboxFailed(f"the sandbox's fork server cannot be started: {error}") from error
        finally:
            theirs.close()
        self._sock, self._owner = ours, os.getpid()
        return Means(**self._receive(_START_S))

    def script(self, text: str, stdin: str, limit_s: float, command: Sequence[str] = ()) -> Execution:
        """Runs a program that reads its standard input and writes to its standard output."""
        return self._run(
            "script", text.encode("utf-8", "replace"), stdin.encode("utf-8", "replace"), (), limit_s, command
        )

    def tests(self, text: str, job: dict[str, Any], limits_s: Sequence[float], default_limit_s: float) -> Execution:
        """Runs tests against a program (`jaxrl.rewards.sandbox.suites.run_tests` says what a job is)."""
        mode = "calls" if job["shape"] == "calls" else "names"
        return self._run(mode, text.encode("utf-8", "replace"), json.dumps(job).encode(), limits_s, default_limit_s, ())

    def _run(
        self,
        mode: str,
        text: bytes,
        data: bytes,
        limits_s: Sequence[float],
        default_limit_s: float,
        command: Sequence[str],
    ) -> Execution:
        if self._sock is None:
            self.start()
        assert self.means is not None, "start() says what there is to choose from"
        total_s = sum(limits_s) + default_limit_s
        order = {
            "mode": mode,
            "limits_s": list(limits_s),
            "default_limit_s": default_limit_s,
            "limits": {**asdict(self.limits), "cpu_s": total_s, "execute": bool(command)},
            "command": list(command),
            "means": self.means.as_dict(),
        }
        fds = [_unnamed_file("program", text), _unnamed_file("data", data)]
        try:
            payload = json.dumps(order).encode()
            assert self._sock is not None
            socket.send_fds(self._sock, [len(payload).to_bytes(_HEADER_BYTES, "big")], fds)
            self._sock.sendall(payload)
        except OSError as error:
            self.close()
            raise SandboxFailed(f"the sandbox's fork server is gone: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
        reply = self._receive(None)
        if "failed" in reply:
            raise SandboxFailed(f"the sandbox could not run a program: {reply['failed']}")
        reply["results"] = [tuple(result) for result in reply["results"]]
        return Execution(**reply)

    def _receive(self, timeout_s: float | None) -> dict[str, Any]:
        """The server's next message. An execution's time is its supervisor's to keep, so there is no limit then."""
        assert self._sock is not None
        self._sock.settimeout(timeout_s)
        try:
            payload = receive_message(self._sock, _MAX_REPLY)
            if payload is None:
                raise OSError("it has ended")
        except (OSError, BadMessage) as error:
            self.close()
            raise SandboxFailed(f"the sandbox's fork server is gone: {error}") from error
        return json.loads(payload)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        server, self._server, self._sock = self._server, None, None
        if server is not None and self._owner == os.getpid():
            wait_or_kill(server, _SLACK_S)


def _unnamed_file(name: str, data: bytes) -> int:
    """A file in memory that can be read and not written."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
