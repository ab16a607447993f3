"""What a client asks of the sandbox's server, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Means:
    """What locks a program in on this machine (`jaxrl.rewards.sandbox.probe`)."""

    landlock: int = 0  # its ABI; 0: none
    seccomp: bool = False
    user_ids: tuple[
        int, ...
    ] = ()  # for root, the first and last of the ids that nothing has; empty: it keeps the user's
    namespaces: bool = False  # of mounts, and as an ordinary user of users; of processes where the kernel has them


@dataclass(frozen=True)
class Limits:
    """What one program may take."""

    memory_mib: int  # beyond what the fork server has mapped
    processes: int  # at once, threads counted
    file_mib: int  # written to a scratch folder; 0: it has none
    output_kib: int


@dataclass(frozen=True)
class Order:
    """What is to be executed.

    Attributes:
      role: "script": the program reads and writes the standard streams; "calls": a checker calls a function of it;
        "names": a test program of the checker's uses its names.
      limits_s: of each case; of a script, the first. default_limit_s: of a case where there are none of those; else the
        last is of cases beyond.
      command: what runs the program's text, in place of Python.
      modules: to be imported before the forks.
    """

    role: str
    limits_s: Sequence[float]
    default_limit_s: float
    means: Means
    limits: Limits
    command: Sequence[str] = ()
    modules: Sequence[str] = ()

    def limit_s(self, case: int) -> float:
        return self.limits_s[min(case, len(self.limits_s) - 1)] if self.limits_s else self.default_limit_s


@dataclass
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

    end: str = ""
    code: int = 0
    seconds: float = 0.0
    output: str = ""
    errors: str = ""
    cases: int | None = None
    results: list[tuple[int, bool, float, str]] = field(default_factory=list)
    running: int | None = None
    loaded: bool = False
    done: bool = False
    broken: str = ""
