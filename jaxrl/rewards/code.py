"""Model-written programs, scored by running them against tests in a sandbox (`reward.kind=code`).

Source: RollPacker §4.3 (a sandbox beside the rollout, a time limit per test case). The program is taken from the
response, the tests from the prompt's columns (`jaxrl.rewards.programs`), and `jaxrl.rewards.sandbox` runs one against
the other. The worker process that this runs in has the sandbox's fork server as a child.

A test case that takes too long, a program that ends early, and one that takes too much memory are wrong answers, and
not errors of the scorer; the record distinguishes them. With `reward.code.score=all` the first wrong case decides.
With `share`, `reward.code.max_failing_s` bounds what the cases that a program does not pass may take together. A
program that passes is never ended by it, however slow it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from jaxrl.mechanisms.reward_timeouts import limit_of
from jaxrl.rewards.programs import Checks, checks_of, program_of, same_output
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.sandbox.client import Sandbox, SandboxFailed
from jaxrl.rewards.sandbox.orders import Execution, Limits, Means
from jaxrl.rewards.sandbox.probe import choose_means

if TYPE_CHECKING:
    from jaxrl.config.rewards import CodeSection

_MAX_ERROR = 500
MAX_PROCESSES, MAX_FILE_MIB, MAX_OUTPUT_KIB = 32, 16, 256  # of one program


@dataclass(frozen=True, slots=True)
class _Case:
    ok: bool
    seconds: float
    why: str = ""
    cut_off_at_s: float = 0.0  # the limit that ended it; 0: none did


@dataclass(slots=True)
class CodeScorer:
    """Runs a response's program against the prompt's tests.

    Attributes:
      means: what locks programs in; None for what `reward.code.sandbox` chooses on the machine that loads this.

    It records `passed` and `cases` (test cases), `correct` (all passed), and `case_s` (seconds of each case that ran,
    in order). `cut_off` counts cases that their time limit ended, `timeouts` the same by the kind of limit. `error`
    says why the first wrong case is wrong.
    """

    code: CodeSection
    loads: str = "reward.kind: starting the sandbox"
    means: Means | None = None
    _sandbox: Sandbox | None = field(default=None, compare=False, repr=False)

    @property
    def server_pid(self) -> int:
        assert self._sandbox is not None, "load() comes first"
        return self._sandbox.pid

    def load(self) -> None:
        """Starts the sandbox. Raises ValueError if this machine has none that `reward.code.sandbox` allows."""
        code = self.code
        limits = Limits(code.max_memory_mib, MAX_PROCESSES, MAX_FILE_MIB, MAX_OUTPUT_KIB)
        self._sandbox = Sandbox(limits, self.means, bubblewrap=code.sandbox == "bubblewrap")
        there = self._sandbox.start()
        if self.means is None:
            self._sandbox.means = choose_means(code.sandbox, there, needs_files=bool(code.command))

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def __call__(self, request: ScoreRequest) -> tuple[float, dict[str, Any]]:
        tests = checks_of(request, self.code.tests_key)
        if self.code.command and tests.shape != "stdin":
            raise ValueError(f"{request.source}: reward.code.command takes tests with inputs and outputs alone")
        program = program_of(request, tests)
        if not program.strip():
            return 0.0, self._info([], tests.count or 0, "the response holds no program")
        cases: list[_Case] = []
        failing_s, most_s = 0.0, self.code.max_failing_s or inf
        count = tests.count
        run = self._scripts if tests.shape == "stdin" else self._checks
        for case, known in run(program, tests, request.limits_s):
            cases.append(case)
            count = known
            if not case.ok:
                failing_s += case.seconds
                if self.code.score == "all" or failing_s >= most_s:
                    break
        assert count is not None
        why = next((case.why for case in cases if not case.ok), "")
        info = self._info(cases, count, why)
        if self.code.score == "share" and failing_s >= most_s / 2:
            info["outside"] = True  # a slower machine might have ended it elsewhere
            if failing_s >= most_s and len(cases) < count:
                info["timeouts"] = {**info.get("timeouts", {}), "program": 1}
        return (float(info["correct"]) if self.code.score == "all" else info["passed"] / count), info

    def _scripts(self, program: str, tests: Checks, limits_s: tuple[float, ...]) -> Iterator[tuple[_Case, int]]:
        """Runs each case in a separate process, which reads the input and is judged by its output."""
        for i, (given, wanted) in enumerate(tests.pairs):
            limit_s = limit_of(limits_s, i, self.code.max_timeout_s)
            ran = self._run(lambda sandbox, g=given, t=limit_s: sandbox.script(program, g, t, self.code.command))
            why = "" if ran.end == "exit" and ran.code == 0 else _why_ended(ran, limit_s)
            if not why and not same_output(ran.output, wanted):
                why = f"it wrote {ran.output[:100]!r}"
            yield _Case(not why, ran.seconds, why, limit_s * (ran.end == "time")), len(tests.pairs)

    def _checks(self, program: str, tests: Checks, limits_s: tuple[float, ...]) -> Iterator[tuple[_Case, int]]:
        """Runs all cases in one process; after a case that ends it, the rest run in another."""
        first, count, default_s, failing_s = 0, tests.count, self.code.max_timeout_s, 0.0
        most_s = self.code.max_failing_s or None
        while count is None or first < count:
            left_s = 0.0 if self.code.score == "all" else most_s and most_s - failing_s
            job = {**tests.job, "first": first, "max_failing_s": left_s}
            ran = self._run(lambda sandbox, j=job: sandbox.tests(program, j, limits_s, default_s))
            if ran.broken:
                raise ValueError(f"the tests cannot be read: {ran.broken}")
            if ran.cases is None:
                raise SandboxFailed(f"the tests did not begin: {_why_ended(ran, default_s)}")
            count = ran.cases
            if count == 0:
                raise ValueError("the tests have no case")
            for index, ok, seconds, why in ran.results:
                yield _Case(ok, seconds, why), count
                first, failing_s = index + 1, failing_s + (not ok) * seconds
            if ran.running is not None:
                limit_s = limit_of(limits_s, first, default_s)
                yield _Case(False, ran.seconds, _why_ended(ran, limit_s), limit_s * (ran.end == "time")), count
                first, failing_s = first + 1, failing_s + ran.seconds
            if ran.done or not ran.loaded:  # one that does not load does so for no case
                return

    def _info(self, cases: list[_Case], count: int, why: str) -> dict[str, Any]:
        passed, limits_s = sum(case.ok for case in cases), [case.cut_off_at_s for case in cases if case.cut_off_at_s]
        at_most = sum(limit_s >= self.code.max_timeout_s for limit_s in limits_s)
        timeouts = {"case": len(limits_s) - at_most, "case_max": at_most}
        info: dict[str, Any] = {
            "passed": passed,
            "cases": count,
            "cut_off": len(limits_s),
            "correct": count > 0 and passed == count,
            "case_s": [round(case.seconds, 5) for case in cases],
        }
        if limits_s:
            info["timeouts"] = {kind: number for kind, number in timeouts.items() if number}
        return {**info, "error": why[:_MAX_ERROR]} if why else info

    def _run(self, work: Callable[[Sandbox], Execution]) -> Execution:
        """Once more with a new server, if the server was ended."""
        assert self._sandbox is not None, "load() comes first"
        try:
            return work(self._sandbox)
        except SandboxFailed:
            self._sandbox.start()
            return work(self._sandbox)


def _why_ended(ran: Execution, limit_s: float) -> str:
    match ran.end:
        case "time":
            return f"it took longer than {limit_s:g} s"
        case "output":
            return f"it wrote more than {MAX_OUTPUT_KIB} KiB"
        case "memory":
            return "its processes took more than reward.code.max_memory_mib"
    last = ran.errors.strip().splitlines()[-1:]
    how = f"it ended with exit code {ran.code}" if ran.code >= 0 else f"signal {-ran.code} ended it"
    return f"{how}: {last[0]}"[:_MAX_ERROR] if last else how
