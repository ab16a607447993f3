"""50 SIGKILLs of runs on several hosts, of every kind of process in turn, in every phase: each ends as an unbroken one.

A watched process tells where it is (tests/support/watched_run.py), so that a kill waits for its phase, and it is known
afterwards where it came. What is killed in turn: a process of the run, an agent, the guard above it, and the command
itself. The run goes on by itself, after a killed command by the same one again. After each kill nothing of the old
world is left within two seconds.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from host_runs import RULES, SMALL, HostRun, assert_same_run, gone_after, is_living, parent_of, started_s
from runs import PATIENCE_S, Runs
from watched_run import COMPILING

DETECTION_S = 2.0
STEPS = 24
KILLS = {"plain": 14, "tail batching and dynamic sampling": 12, "partial rollout": 12, "one step off": 12}
NUM = {"partial rollout": 3}
PHASES = ("compiling", "rollout", "exchange", "update", "save", "restart")
WORDS = {
    "rollout": ("gen of step", "reward of step"),
    "exchange": ("exchange of tokens", "first run of tokens"),
    "update": ("old_log_prob of", "adv of", "update_actor of", "run of zeros", "run of accumulate", "run of update"),
    "save": ("save of step",),
}
"""A phase's places."""
LONGEST_S = {"compiling": 0.5, "rollout": 0.15, "exchange": 0.004, "update": 0.2, "save": 0.03, "restart": 6.0}
"""The kill comes so long after the beginning of its phase, at most."""


def phase_of(place: str, is_saving: bool, has_begun: bool) -> str:
    """Where a kill has come, by the place of the process whose host it was."""
    if place.startswith(COMPILING):
        return "compiling"
    if not has_begun:
        return "restart"
    if is_saving:
        return "save"
    return next((phase for phase, words in WORDS.items() if any(word in place for word in words)), "between")


class Killer:
    """Kills what belongs to a run."""

    def __init__(self, run: HostRun, num: int, chance: random.Random) -> None:
        self._run, self._num, self._chance = run, num, chance
        self.phases, self.victims = Counter[str](), Counter[str]()
        self.detected_s: list[float] = []
        self._old: set[int] = set()  # processes of worlds that are gone

    def kill(self, kind: str, number: int, phase: str) -> None:
        """Kills the process of a kind on a host in a phase of this world."""
        run, chance = self._run, self._chance
        self._await(number, phase)
        pid, place = self._where(number)
        victim = self._victim(kind, number, pid)
        time.sleep(chance.uniform(0, LONGEST_S[phase]))
        while victim is None or not is_living(victim):  # what has not been started yet
            assert run.command.poll() is None, run.said()
            time.sleep(0.01)
            victim = self._victim(kind, number, self._where(number)[0])
        place, is_saving = self._where(number)[1], bool(list(run.run_dir.glob("checkpoints/*.tmp*")))
        began_s, booted_s = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        os.kill(victim, signal.SIGKILL)
        old = [
            pid for pid in run.living() if started_s(pid) < booted_s and (pid != run.command.pid or kind == "command")
        ]
        if kind == "command":
            run.command.wait()
        gone_after(old, PATIENCE_S)
        self.detected_s.append(time.monotonic() - began_s)
        begun = any(word in place for words in WORDS.values() for word in words) or "of step" in place
        self.phases[phase_of(place, is_saving, begun)] += 1
        self.victims[f"{kind} {number}" if kind != "command" else kind] += 1
        self._old |= {self._run.where(i)[0] for i in range(self._num)} | set(old)

    def _where(self, number: int) -> tuple[int, str]:
        pid, place = self._run.where(number)
        return (0, "") if pid in self._old else (pid, place)

    def _victim(self, kind: str, number: int, pid: int) -> int | None:
        if kind == "command":
            return self._run.command.pid
        if not pid:
            return self._run.pid_of(kind, number)
        agent = parent_of(pid) if kind != "process" else None
        return {"process": pid, "agent": agent, "guard": parent_of(agent or 0)}[kind]

    def _await(self, number: int, phase: str) -> None:
        """Until the host's process is in the phase; or beyond it, where this world does not come there."""
        if phase == "restart":
            return
        words = WORDS.get(phase, (COMPILING,))
        skipped, inside = self._chance.randrange({"compiling": 6, "save": 1}.get(phase, 2)), False
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self._run.command.poll() is None, self._run.said()
            assert time.monotonic() < deadline, self._run.said()
            place = self._where(number)[1]
            is_there = any(word in place for word in words)
            if is_there and not inside:
                skipped -= 1
            if skipped < 0 or (phase == "compiling" and WORDS["save"][0] in place):
                return
            inside = is_there
            time.sleep(0.0003)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_killed_hosts_end_with_the_same_bits(tmp_path: Path, tiny_model: Path, rule: str):
    runs, num, chance = Runs(tmp_path, tiny_model), NUM.get(rule, 2), random.Random(rule)
    options = (*SMALL, *RULES[rule], f"trainer.total_training_steps={STEPS}", "trainer.compilation_cache_dir=")
    with HostRun(runs, tmp_path / "whole", *options, num=num) as whole:
        whole.finish()
    kinds = [*(("process", i) for i in range(num)), ("agent", 0), ("agent", 1), ("command", 0), ("guard", 1)]
    first = chance.randrange(len(PHASES))
    with HostRun(runs, tmp_path / "killed", *options, "hosts.max_restarts=1000", num=num) as run:
        run.start()
        killer = Killer(run, num, chance)
        for i in range(KILLS[rule]):
            phase = PHASES[(first + i) % len(PHASES)]
            kind, number = kinds[i % len(kinds)]
            if phase == "compiling":
                forget_programs(run, chance)
            killer.kill(kind, number, phase)
            if kind == "command":
                run.assert_nothing_left()
                run.start()
        output = run.end()
    print(f"{rule}: {sum(killer.victims.values())} kills in {dict(killer.phases)} of {dict(killer.victims)}")
    found = sorted(killer.detected_s)
    print(f"{rule}: all gone after {found[len(found) // 2]:.3f} s, at most {found[-1]:.3f} s; {run.saved} steps")
    print("\n".join(line for line in output.splitlines() if line.startswith("jaxrl: host")))
    assert found[-1] < DETECTION_S
    assert set(PHASES) <= killer.phases.keys(), killer.phases
    # what the journal tells again is not scored again
    assert_same_run(tmp_path / "killed", tmp_path / "whole", "reward/retries")
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.tmp*"))


@pytest.mark.slow
def test_restarts_are_counted_from_checkpoint_to_checkpoint(tmp_path: Path, tiny_model: Path):
    runs = Runs(tmp_path, tiny_model)
    options = (*SMALL, "trainer.total_training_steps=7", "trainer.compilation_cache_dir=", "hosts.max_restarts=1")

    def kill(place: str, saved: int | None, *before: int) -> int:
        run.until(lambda: run.where(1)[0] not in (0, *before) and place in run.place(1) and run.saved == saved)
        pid = run.where(1)[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    with HostRun(runs, tmp_path / "whole", *options) as whole:
        whole.finish()
    with HostRun(runs, tmp_path / "killed", *options) as run:
        run.start()
        kill("step 1", None, kill("step 1", None))
        assert run.end(1).splitlines()[-1] == (
            "jaxrl: host 1 was ended by SIGKILL, after 1 restarts without a checkpoint in between "
            "(hosts.max_restarts); there is no checkpoint yet"
        )
        run.start()
        first = kill("step 3", 2)
        second = kill("step 5", 4, first)
        kill("step 7", 6, first, second)
        assert run.end().count("(restart 1 of 1 without a checkpoint in between)") == 3
    assert_same_run(tmp_path / "killed", tmp_path / "whole", "reward/retries")


def seconds_of(trace: list[tuple[float, str]], began_s: float) -> dict[str, float]:
    """What a start has cost up to the end of its first step, by what a process was doing. Waiting counts."""
    kinds = {"importing": "import", "connecting": "connect", COMPILING: "compile", "the restore of": "restore"}
    found = {"launch": trace[0][0] - began_s, **dict.fromkeys(kinds.values(), 0.0), "other": 0.0}
    for (at_s, place), (next_s, _) in pairwise(trace):
        found[next((kind for word, kind in kinds.items() if word in place), "other")] += next_s - at_s
        if "sync of step" in place:
            return found | {"all": next_s - began_s}
    raise AssertionError("the first step does not end")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["", "programs"], ids=["nothing kept", "programs kept"])
def test_what_a_start_costs(tmp_path: Path, tiny_model: Path, cache: str):
    """Prints a table: seconds of the first start and of one after a SIGKILL, up to the end of their first steps."""
    runs, name = Runs(tmp_path, tiny_model), f"trainer.compilation_cache_dir={cache}"
    options = ("trainer.total_training_steps=6", f"trainer.compilation_cache_dir={cache and tmp_path / cache}")
    with HostRun(runs, tmp_path / "run", *options, keeps=False) as run:
        began_s = time.time()
        run.start()
        run.until_at(1, "gen of step 4")
        killed_s = time.time()
        os.kill(run.where(1)[0], signal.SIGKILL)
        run.end()
        print(f"{name}\nstart, process  " + "  ".join(seconds_of(run.trace(0)[0], began_s)))
        for process in range(2):
            first, again = run.trace(process)
            for what, trace, since_s in (("first", first, began_s), ("again", again, killed_s)):
                costs = "  ".join(f"{seconds:.1f}" for seconds in seconds_of(trace, since_s).values())
                print(f"{what}, {process}  {costs}")
        again = seconds_of(run.trace(0)[1], killed_s)
    assert again["restore"] < again["all"]
    if cache:
        assert again["compile"] < seconds_of(run.trace(0)[0], began_s)["compile"] / 2


def forget_programs(run: HostRun, chance: random.Random) -> None:
    """Some of the programs will be compiled again."""
    for file in run.cache.iterdir():
        if chance.random() < 0.5:
            with suppress(FileNotFoundError):
                file.unlink()
