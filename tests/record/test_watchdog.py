"""The watchdog names the phase that hangs, once per silence, and ends the process, whatever holds the interpreter."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxrl.record import watchdog
from jaxrl.record.timeline import Timeline
from jaxrl.record.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Watched:
    """A watchdog with a clock of its own: 20 looks in its limit, none but those of `after`."""

    limit_s: float
    now_s: float = 0.0
    reports: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.limit_s, self.ends.append, clock=lambda: self.now_s)

    def after(self, seconds: float) -> None:
        """That time goes by, with a look every period."""
        for _ in range(round(seconds * 20 / self.limit_s)):
            self.now_s += self.limit_s / 20
            self.watchdog._look()


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The thread looks at no clock while a test runs; what it does in a process of its own is tested below."""
    monkeypatch.setattr(watchdog, "_LOOK_EVERY_S", 1e6)
    yield
    faulthandler.cancel_dump_traceback_later()  # a test that failed must not end pytest


def test_the_phase_that_hangs_is_named_once_and_then_the_run_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run = Watched(2000.0)
    with Timeline(tmp_path / "timeline.json") as timeline:
        run.watchdog.follow(timeline, run.reports.append)
        run.watchdog.saved_step = 4
        with timeline.phase("step", step=3), timeline.phase("update_actor"):
            run.after(900.0)
            assert run.reports == []
            run.after(200.0)
            (text,) = run.reports
            assert text.startswith("no progress for 1e+03 s in step (0 s) > update_actor (0 s);")
            assert text.endswith("after 2000 s the run is ended (trainer.hang_timeout_s)")
            run.watchdog.beat()
            run.after(1900.0)
            assert len(run.reports) == 2, "the next silence is reported again"
            assert run.ends == []
            run.after(100.0)
            (text,) = run.ends
            assert text.startswith("no progress for 2e+03 s in step (0 s) > update_actor (0 s) (")
            assert text.endswith("(trainer.hang_timeout_s); the last checkpoint is step 4: run again to resume from it")
            assert len(run.reports) == 2, "one silence, one report"
    run.watchdog.close()
    stacks = capfd.readouterr().err
    assert stacks.count("in test_the_phase_that_hangs_is_named_once_and_then_the_run_ends") == 3, "of every thread"


HANG = """
import ctypes, sys, time
from jaxrl.record.watchdog import Watchdog
from jaxrl.run.stop import end
watchdog = Watchdog(1.0, lambda sentence: end(sentence, 1))
watchdog.beat("the update")
def stuck_here():
    {hang}
stuck_here()
"""
HANGS = {
    "python": "while True: pass",
    "waiting": "import threading; threading.Lock().acquire(); threading.Event().wait()",
    "native code": "ctypes.CDLL(None).sleep(60)",
    "native code with the interpreter's lock": "ctypes.PyDLL(None).sleep(60)",
}
MOVES = """
import os, time
from jaxrl.record.watchdog import Watchdog
from jaxrl.run.stop import end
watchdog = Watchdog(4.0, lambda sentence: end(sentence, 1))
print("up", flush=True)
for _ in range(15):
    time.sleep(0.1)  # 1.5 s in all, and twice as long suspended: more than the limit together
print("done")
"""


def test_it_ends_processes_whatever_hangs_and_not_one_that_was_suspended():
    """All at once: they wait, each for its own second."""
    began = time.monotonic()
    with ExitStack() as started:
        hung = {
            name: started.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", HANG.format(hang=hang)], cwd=ROOT, stderr=subprocess.PIPE, text=True
                )
            )
            for name, hang in HANGS.items()
        }
        moves = started.enter_context(
            subprocess.Popen([sys.executable, "-c", MOVES], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        )
        assert moves.stdout is not None
        assert moves.stdout.readline() == "up\n"
        os.kill(moves.pid, signal.SIGSTOP)
        suspended_s = time.monotonic()
        for name, process in hung.items():
            _, said = process.communicate(timeout=50)
            assert process.returncode == 1, name
            assert "in stuck_here" in said, name
            if "lock" in name:
                assert "Timeout (" in said, "faulthandler's words: nothing else can run"
            else:
                assert said.splitlines()[-1].startswith("jaxrl: no progress for 1"), name
                assert said.endswith("s in the update (trainer.hang_timeout_s); there is no checkpoint yet\n"), name
        assert time.monotonic() - began < 30
        time.sleep(max(suspended_s + 3.0 - time.monotonic(), 0.0))
        os.kill(moves.pid, signal.SIGCONT)
        assert moves.stdout.read() == "done\n"
        assert moves.wait() == 0
