"""A process namespace for what one fork server runs: when its first process ends, the kernel ends all that is in it.

Source: pid_namespaces(7), setns(2). A program's own process ends with its supervisor, as those of its children do not:
a supervisor that is killed cannot end them. The namespace can, as its first process ends with its parent, and no
program can signal or stop it.

Processes have other numbers inside, and `/proc` keeps the numbers outside: a supervisor stays outside, and its forks
are born inside. What a program leaves as an orphan goes to the first process.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from jaxrl.processes.process_tree import (
    close_all_but,
    descendants,
    die_with_parent,
    kill,
    kill_descendants,
    works_in_fork,
)
from jaxrl.rewards.sandbox import locks, syscalls

_NEWPID, _NEWUSER = 0x20000000, 0x10000000


@dataclass(frozen=True)
class Cage:
    """A namespace, or none, where `first` is 0.

    Attributes:
      keeper: the parent of its first process, a child of the server.
      first: its first process, which adopts orphans.
    """

    keeper: int = 0
    first: int = 0

    def enter(self) -> None:
        """From here on the forks of this process are born in it. Raises OSError."""
        if self.first:
            fd = os.pidfd_open(self.first)
            syscalls.libc("setns", fd, _NEWPID | (_NEWUSER if os.geteuid() else 0))
            os.close(fd)

    def orphans(self) -> list[int]:
        return descendants(self.first) if self.first else []

    def clear(self) -> None:
        """Kills what is below this process and in the cage."""
        kill_descendants({self.keeper, self.first}, below=(self.first,) if self.first else ())


def make_cage() -> Cage:
    """A cage for the forks of this process, with which it ends; none where this machine refuses one."""
    server = os.getpid()
    source, sink = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        try:
            os.close(source)
            locks.unshare(_NEWPID)
            die_with_parent(server)
            first = os.fork()
            if first == 0:
                die_with_parent(0)  # whose number is none inside
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            else:
                os.write(sink, str(first).encode())
            close_all_but(())
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(sink)
    with open(source, "rb") as file:
        cage = Cage(keeper, int(file.read() or 0))
    if cage.first and works_in_fork(cage.enter):
        return cage
    kill(keeper)
    os.waitpid(keeper, 0)
    return Cage()
