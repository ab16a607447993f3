"""The watchdog names the phase that hangs, once per silence, and ends the process, whatever holds the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl.record.timeline import Timeline
from jaxrl.record.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[2]


class Said(list[str]):
    """What was said; `wait` waits for more."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Semaphore(0)

    def __call__(self, text: str) -> None:
        self.append(text)
        self._more.release()

    def wait(self) -> str:
        assert self._more.acquire(timeout=20)
        return self[-1]


def test_the_phase_that_hangs_is_named_once_and_then_the_run_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    reports, ends = Said(), Said()
    with Timeline(tmp_path / "timeline.json") as timeline:
        watchdog = Watchdog(2.0, ends)
        watchdog.follow(timeline, reports)
        watchdog.saved_step = 4
        with timeline.phase("step", step=3), timeline.phase("update_actor"):
            text = reports.wait()
            assert text.startswith("no progress for 1")
            assert "s in step (" in text
            assert "> update_actor (" in text
            assert text.endswith("after 2 s the run is ended (trainer.hang_timeout_s)")
            watchdog.beat()
            reports.wait()
            assert len(reports) == 2, "the next silence is reported again"
            assert ends == []
            text = ends.wait()
            assert "> update_actor (" in text
            assert text.endswith("(trainer.hang_timeout_s); the last checkpoint is step 4: run again to go on from it")
            assert len(reports) == 2, "one silence, one report"
        watchdog.close()
    stacks = capfd.readouterr().err
    assert stacks.count("test_the_phase_that_hangs_is_named_once_and_then_the_run_ends") == 3, "of every thread"


def test_outside_any_phase_and_no_report_while_it_moves(tmp_path: Path):
    reports, ends = Said(), Said()
    with Timeline(tmp_path / "timeline.json") as timeline:
        watchdog = Watchdog(4.0, ends)
        watchdog.beat("reading the weights")
        watchdog.follow(timeline, reports)
        for _ in range(25):
            time.sleep(0.1)
            watchdog.beat()
        assert reports == []
        assert "s in reading the weights;" in reports.wait()
        watchdog.close()
    assert ends == []


def test_zero_turns_it_off_and_closing_does_not_wait_for_the_limit():
    ends = Said()
    off = Watchdog(0, ends)
    off.beat()
    off.close()
    began = time.monotonic()
    Watchdog(60.0, ends).close()
    assert time.monotonic() - began < 10
    assert ends == []


def test_a_wait_for_other_hosts_is_no_hang_of_this_one():
    ends, waits = Said(), [True]
    watchdog = Watchdog(1.0, ends, waits=lambda: waits[0])
    time.sleep(2.0)
    assert ends == []
    waits[0] = False
    assert ends.wait().startswith("no progress for 1")
    watchdog.close()


def test_others_hear_of_progress():
    heard: list[str] = []
    watchdog = Watchdog(60.0, Said(), heard.append)
    watchdog.beat()
    watchdog.beat("reading the weights")
    watchdog.close()
    assert heard == ["", "reading the weights"]


def test_a_beat_costs_little():
    watchdog = Watchdog(60.0, Said())
    began = time.thread_time()
    for _ in range(100_000):
        watchdog.beat()
    seconds = time.thread_time() - began
    watchdog.close()
    assert seconds < 1.0, "10 µs each; it is 0.1 µs on an idle machine"


HANG = """
import ctypes, sys, time
from jaxrl.record.watchdog import Watchdog
from jaxrl.runtime.stop import end
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


@pytest.mark.parametrize("name", HANGS)
def test_it_ends_the_process_whatever_hangs(name: str):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANG.format(hang=HANGS[name])], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert "in stuck_here" in done.stderr
    if "lock" in name:
        assert "Timeout (" in done.stderr, "faulthandler's words: nothing else can run"
    else:
        assert done.stderr.splitlines()[-1].startswith("jaxrl: no progress for 1")
        assert done.stderr.endswith("s in the update (trainer.hang_timeout_s); there is no checkpoint yet\n")


def test_time_in_which_the_process_is_suspended_does_not_count():
    program = """
import os, time
from jaxrl.record.watchdog import Watchdog
from jaxrl.runtime.stop import end
watchdog = Watchdog(8.0, lambda sentence: end(sentence, 1))
print("up", flush=True)
for _ in range(50):
    time.sleep(0.1)  # 5 s in all, and as long suspended: more than the limit together
print("done")
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(5.0)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == "done\n"
    assert process.returncode == 0
