"""Requests to the sandbox's server, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Means:
    """The means that lock a program in on a machine (`jaxrl.rewards.sandbox.probe`)."""

    landlock: int = 0  # its ABI; 0: none
    seccomp: bool = False
    user_ids: tuple[int, ...] = ()  # for root, the first and last of the ids that nothing has
    namespaces: bool = False  # of mounts, for an ordinary user of users, and of processes where the kernel has them


@dataclass(frozen=True)
class Limits:
    """The limits of one program."""

    memory_mib: int  # beyond what the fork server has mapped
    processes: int  # at once, threads counted
    file_mib: int  # in a scratch folder; 0: it has none
    output_kib: int


@dataclass(frozen=True)
class Order:
    """An execution request."""

    role: str  # "script": it reads and writes the standard streams; "calls", "names": tests call it, or use its names
    limits_s: Sequence[float]  # of each case; the last is of those beyond as well
    default_limit_s: float  # of a script, and of all cases where there are no limits of theirs
    means: Means
    limits: Limits
    command: Sequence[str] = ()  # what runs the program's text, in place of Python
    modules: Sequence[str] = ()  # that the tests import

    def limit_s(self, case: int) -> float:
        return self.limits_s[min(case, len(self.limits_s) - 1)] if self.limits_s else self.default_limit_s


@dataclass
class Execution:
    """The outcome of one program."""

    end: str = ""  # exit; time, output or memory: a limit ended it
    code: int = 0  # the exit code, where end is exit
    seconds: float = 0.0  # that a script ran, and of tests, that the last case which began did
    output: str = ""
    errors: str = ""  # the last part
    cases: int | None = None  # that the tests have; None: there are none, or they did not begin
    results: list[tuple[int, bool, float, str]] = field(default_factory=list)  # case, is right, seconds, why not
    running: int | None = None  # a case that began and did not end
    loaded: bool = False  # the tested program was run to its end, so that it could be called
    done: bool = False  # all cases were run
    broken: str = ""  # why the tests are no Python
