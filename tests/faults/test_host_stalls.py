"""A host that stands still, leaves a program out or fails ends a run of several hosts, in every phase: in time, with a
sentence that names it and where it is, and with nothing left.

What goes wrong is told to a watched process (tests/support/watched_run.py); the command is the real one.
"""

from __future__ import annotations

import os
import time

import pytest
from host_runs import SMALL, HostRun
from runs import Runs
from tiny import write_tiny_model
from watched_run import Fault

STALL_S, HEARTBEAT_S = 12.0, 6.0
LATER_S = 15.0
FAILURE_S = 5.0
HOST = os.uname().nodename
OPTIONS = (
    *(*SMALL, "trainer.total_training_steps=4", "trainer.compilation_cache_dir="),
    *(f"hosts.stall_timeout_s={STALL_S}", f"hosts.heartbeat_s={HEARTBEAT_S}"),
)
PLACES = {
    # phase: in which process, at which place, and how the sentence calls the place of the one that stands still
    "agreement": (1, "local comparing the hosts", "comparing the hosts"),
    "loading": (0, "local loading the weights", "loading the weights"),
    "compiling": (1, "compiling in global old_log_prob of step 1", "old_log_prob of step 1"),
    "rollout": (0, "local gen of step 1", "gen of step 1"),
    "rollout of another": (1, "local gen of step 2", "gen of step 2"),
    "exchange": (1, "global the exchange of tokens", "the exchange of tokens"),
    "old log-probabilities": (0, "global old_log_prob of step 2", "old_log_prob of step 2"),
    "update": (1, "global update_actor of step 2", "update_actor of step 2"),
    "sync": (0, "global sync of step 1", "sync of step 1"),
    "save": (1, "global save of step 3", "save of step 3"),
    "the last save": (0, "waiting the last checkpoint", "the last checkpoint"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A first run compiles what the others need: a stall is not to be taken for that."""
    folder = tmp_path_factory.mktemp("stalls")
    write_tiny_model(folder / "model")
    made = Runs(folder, folder / "model")
    with HostRun(made, folder / "first", *OPTIONS, "hosts.stall_timeout_s=300") as run:
        run.finish()
    return made


def wrong(runs: Runs, name: str, fault: Fault, *overrides: str, starts: int = 1) -> tuple[float, str]:
    """The seconds from a fault to the end of the command, with status 1 and nothing left, and all that was printed.

    Args:
      starts: the fault comes in this one; those before end by a stop.
    """
    with HostRun(runs, runs.folder / name.replace(" ", "-"), *OPTIONS, *overrides) as run:
        for _ in range(starts - 1):
            run.start()
            run.until_at(0, "save of step")
            run.command.terminate()
            run.end()
        run.start(faults=[fault])
        run.command.wait(300)
        ended_s = time.time()
        run.assert_nothing_left()
        assert run.command.returncode == 1, run.said()
        at_s, what = run.wrong
        print(f"{name}: {what}: ended after {ended_s - at_s:.1f} s\n  " + "\n  ".join(said(run.output.read_text())))
        return ended_s - at_s, run.output.read_text()


def said(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("jaxrl: ")]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PLACES)
def test_a_sleep_ends_the_run(runs: Runs, phase: str):
    process, at, place = PLACES[phase]
    seconds, output = wrong(runs, f"sleep {phase}", Fault(process, at, "sleep 1000"))
    assert seconds < STALL_S + LATER_S
    (sentence, *_) = said(output)
    assert "(hosts.stall_timeout_s)" in sentence
    assert place in sentence
    assert f"process {process}" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "process"), [("rollout", 0), ("update", 1), ("save", 0), ("exchange", 1)])
def test_a_stopped_process_ends_the_run(runs: Runs, phase: str, process: int):
    _, at, _ = PLACES[phase]
    seconds, output = wrong(runs, f"stop {phase} {process}", Fault(process, at, "signal SIGSTOP"))
    assert seconds < STALL_S + LATER_S
    assert f"silent for {HEARTBEAT_S:g} s (hosts.heartbeat_s): process {process} ({HOST})" in output
    assert "last heard in " in output


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_skipped_exchange_ends_the_run(runs: Runs, process: int):
    """The others wait in a collective for a host that has gone on to the next phase."""
    seconds, output = wrong(runs, f"skip {process}", Fault(process, "data of step 2", "skip"))
    assert seconds < STALL_S, "found at the next pulse, and not when the others give up"
    (sentence, *_) = said(output)
    assert sentence.startswith(f"jaxrl: process {process} ({HOST}) has skipped a program of all hosts: it is at ")
    assert "is in the exchange of tokens" in sentence


@pytest.mark.slow
@pytest.mark.parametrize("phase", PLACES)
def test_an_exception_ends_the_run(runs: Runs, phase: str):
    process, at, _ = PLACES[phase]
    seconds, output = wrong(runs, f"raise {phase}", Fault(process, at, "raise"))
    assert seconds < FAILURE_S
    assert [line for line in said(output) if "it was told so" in line] == said(output)
    assert f"process {process} ({HOST}) failed in " in output


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_hang_ends_the_run_by_the_watchdog_of_its_host(runs: Runs, process: int):
    fault = Fault(process, "local gen of step 2", "sleep 1000")
    seconds, output = wrong(runs, f"hang {process}", fault, "hosts.stall_timeout_s=100", "trainer.hang_timeout_s=15")
    assert seconds < 15 + FAILURE_S
    sentence = next(line for line in said(output) if "(trainer.hang_timeout_s); " in line)
    assert sentence.startswith(f"jaxrl: process {process} ({HOST}) failed in gen of step 2: no progress for 15")


@pytest.mark.slow
def test_a_restore_that_stands_still_ends_the_run(runs: Runs):
    seconds, output = wrong(runs, "restore", Fault(1, "global the restore of step", "sleep 1000"), starts=2)
    assert seconds < STALL_S + LATER_S
    (sentence, *_) = said(output)
    assert "the restore of step" in sentence
    assert f"process 1 ({HOST})" in sentence
