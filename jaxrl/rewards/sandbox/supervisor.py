"""One execution: forks the program, and the checker where there is one, keeps the time, and leaves nothing behind.

All of it runs in the fork server, as a server has one execution at a time. A program's orphans become children of the
server, or of the first process of its namespace. A program cannot leave its process group, as the filter refuses
`setsid` and `setpgid`: one signal to the group ends all of it at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import signal
import socket
import time
from typing import Any

from jaxrl.rewards.sandbox import program, suites
from jaxrl.rewards.sandbox.locks import MIB, lock_in, make_filter
from jaxrl.rewards.sandbox.orders import Execution, Order
from jaxrl.rewards.sandbox.processes import descendants, proportional, resident

_START_S = 60.0  # until a process is locked in: none of the program's time
_PATIENCE_S = 5.0  # for killed processes to be gone
_MAX_ERROR_BYTES = 2000
_LOOK_EVERY_S = 0.02  # at the memory of all processes together
_LOCKED_IN = b"locked in"


class Supervisor:
    """Runs an order in this process, which has one thread.

    Args:
      control: the client's socket: its end ends the execution.
      first: the first process of the namespace that forks are born in; 0: there is none.
    """

    def __init__(self, order: Order, control: socket.socket, first: int):
        self._order, self._control, self._first = order, control, first
        with open("/proc/self/statm", "rb") as file:
            self._mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        self._execution = Execution()
        self._output, self._errors, self._report = bytearray(), bytearray(), bytearray()
        self._streams: dict[int, bytearray] = {}  # descriptors to read, and where to
        self._pids: list[int] = []  # of the program and the checker
        self._since = self._deadline = 0.0

    def run(self, text: int, data: int) -> Execution:
        """Executes the order. Raises OSError: a process could not be locked in, so that nothing is known.

        `text`: the descriptor of the program's text; `data`: that of its input, or of the tests. Both are closed.
        """
        try:
            self._start(text, data)
            self._watch()
        finally:
            self._end()
        self._execution.output = self._output.decode("utf-8", "replace")
        self._execution.errors = self._errors.decode("utf-8", "replace")
        return self._execution

    def _start(self, text: int, data: int) -> None:
        order, (low, high) = self._order, self._order.means.user_ids or (0, 3)
        user = random.SystemRandom().randrange(low, high - 1) & ~1 if low else 0  # the next one is the checker's
        if order.means.seccomp:  # made here once, and not in each fork
            make_filter(order.means, has_scratch=order.limits.file_mib > 0, execute=bool(order.command))
        out, err, null = self._pipe(self._output), self._pipe(self._errors), os.open(os.devnull, os.O_RDWR)
        ends = [text, data, out, err, null]
        fds = {0: data if order.role == "script" else null, 1: out, 2: err, program.JOB: text}
        try:
            if order.role == "script":
                ready = [self._fork(fds, user, order.role)]
            else:
                ours, theirs = (sock.detach() for sock in socket.socketpair())
                report = self._pipe(self._report)
                ends += [ours, theirs, report]
                ready = [self._fork({**fds, program.CALLS: theirs}, user, order.role)]
                fds = {0: null, 1: null, 2: err, program.JOB: data, program.CALLS: ours, program.RESULT: report}
                ready.append(self._fork(fds, user and user + 1, "tests"))
        finally:
            for fd in ends:
                os.close(fd)
        for fd in ready:
            with open(fd, "rb") as file:
                said = file.read() if select.select([file], [], [], _START_S)[0] else b"it took too long"
            if said != _LOCKED_IN:
                raise OSError(f"a process was not locked in: {said.decode('utf-8', 'replace')}")
        self._begin(0 if order.role == "script" else None)

    def _begin(self, case: int | None) -> None:
        """The time of a case begins; None: that until the checker begins."""
        self._since = time.monotonic()
        self._deadline = self._since + (_START_S if case is None else self._order.limit_s(case))

    def _pipe(self, into: bytearray) -> int:
        source, sink = os.pipe()
        os.set_blocking(source, False)
        self._streams[source] = into
        return sink

    def _fork(self, fds: dict[int, int], user: int, role: str) -> int:
        """Starts a process with these descriptors. Returns the one that says when it is locked in."""
        parent = 0 if self._first else os.getpid()
        ready, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                _arrange({**fds, program.READY: theirs})
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which the server ignores
                    signal.signal(number, signal.SIG_DFL)
                lock_in(self._order, user_id=user, parent=parent, mapped=self._mapped)
                os.write(program.READY, _LOCKED_IN)
                os.close(program.READY)
                if self._order.command:
                    program.run_command(self._order.command)
                if role == "script":
                    program.run_script(program.read_job())
                if role == "tests":
                    suites.run_tests(json.loads(program.read_job()))
                program.serve_calls(program.read_job(), in_contest=role == "calls")
            except BaseException as error:
                os.write(program.READY, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(1)
        os.close(theirs)
        self._pids.append(pid)
        with contextlib.suppress(OSError):  # it does so itself, if it is first
            os.setpgid(pid, pid)
        return ready

    def _watch(self) -> None:
        decisive = os.pidfd_open(self._pids[-1])
        ran, poll = self._execution, select.poll()
        for fd in (*self._streams, decisive):
            poll.register(fd, select.POLLIN)
        poll.register(self._control, select.POLLRDHUP)
        look_s = time.monotonic() + _LOOK_EVERY_S
        while not ran.end and (now := time.monotonic()) < self._deadline:
            ready = dict(poll.poll(max(min(self._deadline, look_s) - now, 0.0) * 1000))
            for fd in self._streams.keys() & ready.keys():
                if not self._read(fd):
                    poll.unregister(fd)
            if self._control.fileno() in ready:
                ran.end = "client"
            elif decisive in ready and not ran.end:
                ran.end, ran.code = "exit", os.waitstatus_to_exitcode(os.waitpid(self._pids[-1], 0)[1])
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + _LOOK_EVERY_S
                self._look_at_memory()
        ran.end = ran.end or "time"
        ran.seconds = time.monotonic() - self._since
        os.close(decisive)

    def _read(self, fd: int) -> bool:
        """Reads what a process wrote. False if there is nothing, as at the end of a pipe."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        into, most = self._streams[fd], self._order.limits.output_kib * 1024
        into += data
        if into is self._report:
            *lines, into[:] = into.split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        elif into is self._errors:
            del into[:-_MAX_ERROR_BYTES]
        elif len(into) > most:
            del into[most:]
            self._execution.end = self._execution.end or "output"
        return bool(data)

    def _hear(self, message: dict[str, Any]) -> None:
        """A message of the checker: a case begins or has ended, or an attribute of the execution."""
        if "result" in message:
            self._execution.running = None
            self._execution.results.append(tuple(message["result"]))
            return
        vars(self._execution).update(message)
        if "running" in message:
            self._begin(message["running"])

    def _look_at_memory(self) -> None:
        """One process keeps its limit itself; of several, the sum counts as well."""
        pids = set(self._running()) - set(self._pids[1:])
        most = self._order.limits.memory_mib * MIB + self._mapped
        if len(pids) > 1 and sum(map(resident, pids)) > most and sum(map(proportional, pids)) > most:
            self._execution.end = self._execution.end or "memory"

    def _running(self) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if pid != self._first]

    def _end(self) -> None:
        for pid in reversed(self._pids):  # a checker that outlived the program would report its end as a result
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + _PATIENCE_S
        while (left := self._running()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.0005)
        for fd in self._streams:
            while self._read(fd):  # what is left is there already, as all writers are gone
                pass
            os.close(fd)


def _arrange(fds: dict[int, int]) -> None:
    """Makes these the only descriptors of the process, under these numbers."""
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, program.READY + 1) for number, fd in fds.items()}
    for number, fd in copies.items():
        os.dup2(fd, number, inheritable=True)
    for number in {*range(program.READY)} - fds.keys():
        with contextlib.suppress(OSError):
            os.close(number)
    os.closerange(program.READY + 1, 1 << 20)
