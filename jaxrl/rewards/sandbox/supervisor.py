"""One execution: forks the program, and the checker where there is one, keeps the time, and leaves nothing behind.

The supervisor is a fork of the server, made for one execution. It adopts what the program leaves as orphans, or the
first process of its cage does, and the program cannot leave its process group, as the filter refuses `setsid` and
`setpgid`: one signal to the group ends all of it at once. Output is bytes up to a limit, and the checker's report is
JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.processes.process_tree import adopt_orphans, close_all_but, descendants, kill, wake_by_children
from jaxrl.rewards.sandbox import bubblewrap, filters, groups, program, roles
from jaxrl.rewards.sandbox.cage import Cage
from jaxrl.rewards.sandbox.locks import MIB, Limits, Means

_START_S = 60.0  # until a process is locked in: none of the program's time
_MAX_ERROR_BYTES = 2000
_LOOK_EVERY_S = 0.02  # at the memory of all processes together
_REPORT_BYTES = 4 << 20


@dataclass(frozen=True)
class ExecutionRequest:
    """What is to be executed.

    Attributes:
      mode: "script": the program reads and writes the standard streams; "calls": a checker calls a function of it;
        "names": a test program of the checker's uses its names.
      limits_s: of each case; of a script, the first.
      default_limit_s: of loading, and of all cases where there are none of those; else the last is of cases beyond.
      command: what runs the program's text, in place of Python.
    """

    mode: str
    limits_s: Sequence[float]
    default_limit_s: float
    limits: Limits
    command: Sequence[str] = ()

    def limit_s(self, case: int) -> float:
        if case < 0 or not self.limits_s:
            return self.default_limit_s
        return self.limits_s[min(case, len(self.limits_s) - 1)]


@dataclass
class _Child:
    pid: int
    ready: socket.socket  # where it says that it is locked in, or why not
    said: bytes = b""
    listener: int = -1  # where it asks for shared memory
    shared: int = 0  # bytes of that which it got
    code: int | None = None


@dataclass
class _Outcome:
    end: str = ""  # exit, time, output, memory
    code: int = 0
    seconds: float = 0.0  # of the script, or of the case that began last
    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    report: bytearray = field(default_factory=bytearray)
    cases: int | None = None
    results: list[list[Any]] = field(default_factory=list)  # [index, ok, seconds, why]
    running: int | None = None  # the case that has begun and not ended
    loaded: bool = False
    done: bool = False
    broken: str = ""


class Supervisor:
    """Runs one order in this process, a fresh fork of the server.

    Args:
      control: the client's socket: its end ends the execution.
      fds: of the program's text, and of its input or the tests.
      mapped: bytes that the server has mapped.
    """

    def __init__(
        self, control: socket.socket, means: Means, cage: Cage, order: ExecutionRequest, fds: list[int], mapped: int
    ):
        self._control, self._means, self._order, self._fds, self._mapped = control, means, order, fds, mapped
        self._cage = cage
        self._outcome = _Outcome()
        self._program: _Child | None = None
        self._checker: _Child | None = None
        self._wakeup = wake_by_children()
        self._since = self._deadline = 0.0
        self._group: groups.ControlGroup | None = None
        self._out = self._err = self._report = -1

    def run(self) -> dict[str, Any]:
        adopt_orphans()
        os.setpgid(0, 0)
        self._since = time.monotonic()
        self._deadline = self._since + _START_S
        try:
            self._cage.enter()
            with groups.group(self._means.cgroup, self._order.limits) as self._group:
                try:
                    self._start()
                    self._watch()
                finally:
                    self._outcome.seconds = time.monotonic() - self._since
                    self._end_all()
        except OSError as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        return self._reply()

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        order, (code_fd, data_fd) = self._order, self._fds
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        user = self._unused_id()
        null = os.open(os.devnull, os.O_RDWR)
        if order.mode == "script":
            self._program = self._fork({0: data_fd, 1: out, 2: err, program.JOB: code_fd}, user, "script")
        else:
            ours, theirs = socket.socketpair()
            self._report, report = os.pipe()
            calls = program.CALLS
            self._program = self._fork(
                {0: null, 1: out, 2: err, calls: theirs.fileno(), program.JOB: code_fd}, user, order.mode
            )
            fds = {0: null, 1: null, 2: err, calls: ours.fileno(), program.JOB: data_fd, program.RESULT: report}
            self._checker = self._fork(fds, user + 1 if user else 0, "tests")
            os.close(report)
            ours.close()
            theirs.close()
        for fd in (out, err, null, *self._fds):
            os.close(fd)
        for fd in (self._out, self._err, self._report):
            if fd >= 0:
                os.set_blocking(fd, False)

    def _unused_id(self) -> int:
        """An even one; the next is the checker's."""
        if not self._means.user_ids:
            return 0
        low, high = self._means.user_ids
        return random.SystemRandom().randrange(low, high - 1) & ~1 if high - low > 1 else low

    def _fork(self, fds: dict[int, int], user: int, role: str) -> _Child:
        supervisor = 0 if self._cage.first else os.getpid()
        ready, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            ready.setblocking(False)
            with contextlib.suppress(OSError):  # it does so itself, if it is first
                os.setpgid(pid, pid)
            return _Child(pid, ready)
        try:
            os.setpgid(0, 0)
            if self._group is not None:
                self._group.enter()
            _arrange({**fds, program.READY: theirs.fileno()})
            entry = roles.Entry(self._means, self._order.limits, role, self._order.command, self._mapped)
            if self._means.bubblewrap:
                bubblewrap.become(entry, user)
            roles.enter(entry, user, supervisor)
        finally:
            os._exit(1)

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poll = select.poll()
        for fd in (self._out, self._err, self._report, self._wakeup.fileno()):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        children = {child.ready.fileno(): child for child in (self._program, self._checker) if child is not None}
        for fd in children:
            poll.register(fd, select.POLLIN)
        asking: dict[int, _Child] = {}
        poll.register(self._control, select.POLLRDHUP)
        look_s = time.monotonic() + _LOOK_EVERY_S
        while not self._outcome.end:
            now = time.monotonic()
            if now >= self._deadline:
                self._outcome.end = "time"
                return
            ready = dict(poll.poll(max(min(self._deadline, look_s) - now, 0.0) * 1000))
            if self._control.fileno() in ready:
                self._outcome.end = "client"
                return
            for fd in children.keys() & ready.keys():
                poll.unregister(fd)
                child = children.pop(fd)
                self._meet(child)
                if child.listener >= 0:
                    asking[child.listener] = child
                    poll.register(child.listener, select.POLLIN)
            for fd in asking.keys() & ready.keys():
                if ready[fd] & select.POLLIN:
                    child = asking[fd]
                    child.shared += filters.decide(fd, self._order.limits.memory_mib * MIB - child.shared)
                else:  # all that could ask have ended
                    poll.unregister(fd)
            for fd in (self._out, self._err, self._report):
                if fd in ready and not self._read(fd):
                    poll.unregister(fd)
            if self._wakeup.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
                self._reap()
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + _LOOK_EVERY_S
                self._look_at_memory()

    def _meet(self, child: _Child) -> None:
        """A process is locked in, or cannot be. A script's time begins; that of a case when the checker says so."""
        with contextlib.suppress(BlockingIOError):
            child.said, fds, _, _ = socket.recv_fds(child.ready, 4096, 1)
            child.listener = fds[0] if fds else -1
        if self._checker is None and child.said == roles.LOCKED_IN:
            self._since = time.monotonic()
            self._deadline = self._since + self._order.limit_s(0)

    def _read(self, fd: int) -> bool:
        """What a process wrote. False at the end of the pipe."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        outcome, most = self._outcome, self._order.limits.output_kib * 1024
        if fd == self._report:
            self._hear(data)
        elif fd == self._err:
            outcome.errors += data
            del outcome.errors[:-_MAX_ERROR_BYTES]
        elif len(outcome.output) + len(data) > most:
            outcome.output += data[: most - len(outcome.output)]
            outcome.end = outcome.end or "output"
        else:
            outcome.output += data
        return bool(data)

    def _hear(self, data: bytes) -> None:
        outcome = self._outcome
        outcome.report += data
        if len(outcome.report) > _REPORT_BYTES:
            outcome.end = "output"
        *lines, rest = outcome.report.split(b"\n")
        outcome.report = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            if "cases" in message:
                outcome.cases = message["cases"]
            elif "start" in message:
                outcome.running, self._since = message["start"], time.monotonic()
                self._deadline = self._since + self._order.limit_s(message["start"])
            elif "end" in message:
                outcome.running = None
                outcome.results.append([message["end"], message["ok"], message["seconds"], message["why"]])
            elif "broken" in message:
                outcome.broken = message["broken"]
            elif "loaded" in message:
                outcome.loaded = True
            elif "done" in message:
                outcome.done = True

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
                pid, status = found
                for child in (self._program, self._checker):
                    if child is not None and child.pid == pid:
                        child.code = os.waitstatus_to_exitcode(status)
        decisive = self._checker or self._program
        assert decisive is not None
        if decisive.code is not None and not self._outcome.end:
            self._outcome.end, self._outcome.code = "exit", decisive.code

    def _look_at_memory(self) -> None:
        """One process keeps its limit itself; of several, the sum counts as well."""
        assert self._program is not None
        most = (self._order.limits.memory_mib * MIB) + self._mapped
        apart_from = () if self._checker is None else (self._checker.pid,)
        pids = [*descendants(os.getpid(), apart_from), *self._cage.orphans()]
        if groups.memory_of(pids, self._program.shared, most) > most:
            self._outcome.end = "memory"

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        for child in (self._program, self._checker):
            if child is not None:
                kill(child.pid, group=True)
        self._cage.clear()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for fd in (self._out, self._err, self._report):
            if fd >= 0:
                while True:  # all writers are gone: what is left is there already
                    before = len(self._outcome.output) + len(self._outcome.errors)
                    if not self._read(fd) or before == len(self._outcome.output) + len(self._outcome.errors):
                        break
                os.close(fd)

    def _reply(self) -> dict[str, Any]:
        outcome = self._outcome
        errors = outcome.errors.decode("utf-8", "replace")
        for child in (self._program, self._checker):
            if child is not None and (why := self._not_locked_in(child)):
                return {"failed": f"{why} {errors}".strip()}
        told = {name: value for name, value in vars(outcome).items() if name != "report"}
        return told | {"output": outcome.output.decode("utf-8", "replace"), "errors": errors}

    def _not_locked_in(self, child: _Child) -> str:
        """Why a process was never locked in, so that what came of it is no verdict; empty if it was."""
        if not child.said:
            self._meet(child)
        child.ready.close()
        said = child.said.decode("utf-8", "replace")
        return "" if child.said == roles.LOCKED_IN else f"a process was not locked in: {said}"


def _arrange(fds: dict[int, int]) -> None:
    """Makes these the only descriptors of the process, under these numbers."""
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, program.READY + 1) for number, fd in fds.items()}
    for number, fd in copies.items():
        os.dup2(fd, number, inheritable=True)
    for number in range(3, program.READY + 1):
        if number not in fds:
            with contextlib.suppress(OSError):
                os.close(number)
    close_all_but(set(fds))
