"""SIGTERM to any process of a run on several hosts, and Ctrl-C to the command, in every phase: it saves once, all end
with 0, and the same command goes on to the same bits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from host_runs import SMALL, HostRun, assert_same_run, lines
from runs import Runs

TERM, INT = signal.SIGTERM, signal.SIGINT
pytestmark = pytest.mark.usefixtures("nothing_is_ignored")
STEPS = 34
OPTIONS = (*SMALL, f"trainer.total_training_steps={STEPS}", "trainer.compilation_cache_dir=")
CASES = [
    # whom, on which host; the signal; and in which process's place (the second time that it comes there)
    ("command", -1, TERM, 0, "gen of step"),
    ("command", -1, INT, 1, "update_actor of step"),
    ("process", 0, TERM, 0, "gen of step"),
    ("process", 1, TERM, 1, "gen of step"),
    ("process", 1, INT, 1, "exchange of tokens"),
    ("process", 0, TERM, 1, "sync of step"),
    ("agent", 0, TERM, 1, "gen of step"),
    ("agent", 1, TERM, 0, "old_log_prob of step"),
    ("guard", 1, TERM, 0, "update_actor of step"),
    ("command", -1, TERM, 0, "save of step"),
    ("process", 0, TERM, 0, "save of step"),
    ("process", 1, TERM, 1, "save of step"),
    ("command", -1, TERM, 0, "compiling in local gen of step"),
    ("process", 0, TERM, 0, "compiling in global the first run of zeros"),
    ("process", 1, TERM, 1, "compiling in global old_log_prob"),
    ("all", -1, TERM, 0, "gen of step"),
]


def pids(run: HostRun, kind: str, number: int) -> list[int]:
    if kind == "all":
        return [each.pid for each in run.processes() if each.kind != "other"]
    (pid,) = [each.pid for each in run.processes() if (each.kind, each.number) == (kind, number)]
    return [pid]


def saves(run: HostRun) -> set[str]:
    """The checkpoints that are there, complete or not."""
    return {path.name.partition(".")[0] for path in run.run_dir.glob("checkpoints/*")}


@pytest.mark.slow
def test_whoever_is_asked_to_stop_all_stop_and_go_on(tmp_path: Path, tiny_model: Path):
    runs = Runs(tmp_path, tiny_model)
    with HostRun(runs, tmp_path / "whole", *OPTIONS) as whole:
        whole.finish()
    with HostRun(runs, tmp_path / "stopped", *OPTIONS, "hosts.max_restarts=0") as run:
        for kind, number, asked, process, place in CASES:
            if "compiling" in place:
                for file in run.cache.iterdir():
                    file.unlink()
            run.start()
            if "compiling" not in place:
                run.until_at(process, place)  # compiled by then
                run.until(lambda place=place, process=process: place not in run.place(process))
            found = pids(run, kind, number) if "compiling" not in place else []
            run.until_at(process, place)
            before = saves(run)
            for pid in found or pids(run, kind, number):
                os.kill(pid, asked)
            began_s, came = time.monotonic(), run.place(process)
            output = run.end()
            print(f"{asked.name} to {kind} {number} at {came}: {time.monotonic() - began_s:.1f} s, saved {run.saved}")
            assert len(saves(run) - before) <= 1, "saved more than once"
            assert run.saved == len(lines(run.run_dir / "metrics.jsonl")), "all steps that were finished"
            assert f"of {STEPS} (stopped; run again to go on)" in output
            assert "Traceback" not in run.said()
        run.finish()
    assert_same_run(tmp_path / "stopped", tmp_path / "whole", "reward/retries")


@pytest.mark.slow
def test_a_stop_during_a_restart_loses_nothing(tmp_path: Path, tiny_model: Path):
    """Before there is anything to save a signal ends a run at once, with the status that it always has then."""
    runs, steps = Runs(tmp_path, tiny_model), "trainer.total_training_steps=8"
    with HostRun(runs, tmp_path / "whole", *OPTIONS, steps) as whole:
        whole.finish()
    with HostRun(runs, tmp_path / "stopped", *OPTIONS, steps) as run:
        for kind, number, at in (("command", -1, "importing"), ("process", 0, "loading"), ("process", 1, "loading")):
            run.start()
            run.until_at(1, "data of step")
            killed, _ = run.where(1)
            os.kill(killed, signal.SIGKILL)
            run.until(lambda killed=killed, at=at: run.where(1)[0] not in (0, killed) and at in run.place(1))
            (pid,) = pids(run, kind, number)
            os.kill(pid, TERM)
            run.command.wait(60)
            run.assert_nothing_left()
            assert run.command.returncode in (0, 128 + TERM), run.said()
            print(f"SIGTERM to {kind} {number} in a restart: status {run.command.returncode}")
        run.finish()
    assert_same_run(tmp_path / "stopped", tmp_path / "whole", "reward/retries")
