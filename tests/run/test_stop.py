"""A signal ends the process whatever state its threads and modules are in. `tests/refusals/test_signals.py` has whole
commands."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.run.stop import Stop

SIGNAL = """
import os, signal, sys, threading, time, types
from jaxrl.run.stop import Stop
stop = Stop()
stop.watch()
{before}
os.kill(os.getpid(), signal.SIGTERM)
time.sleep({awake})
{after}
time.sleep(20)
"""
NO_THREADS = """
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
"""
FAILING = """
def changed():
    raise RuntimeError("dictionary changed size during iteration")
sys.modules["multiprocessing"] = types.SimpleNamespace(active_children=changed)
"""
LATER = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()"
SWALLOWS = f"""
{LATER}
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""
# releases the lock, and no signal interrupts it
NATIVE = f"{LATER}; import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
SECOND = "assert stop.asked; os.kill(os.getpid(), signal.SIGTERM)"


def run(before: str, after: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SIGNAL.format(before=before, after=after, awake=0.5 if after else 0)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "before",
    ["sys.modules['multiprocessing'] = types.ModuleType('multiprocessing')", FAILING, NO_THREADS, SWALLOWS, NATIVE],
    ids=["half-imported", "children-change", "no-threads", "swallows", "native"],
)
def test_it_ends(before: str):
    done = run(before)
    assert (done.returncode, done.stderr) == (143, "jaxrl: terminated\n")


def test_a_stop_is_told_without_a_thread():
    done = run(f"stop.save_first(print)\n{NO_THREADS}", SECOND)
    asked = "jaxrl: terminated: the run saves its state and ends; a second signal ends it at once\n"
    assert (done.returncode, done.stderr) == (143, f"{asked}jaxrl: terminated\n")


def test_nothing_begins_to_be_written_while_it_ends():
    """The end waits for a reader of the output; a temporary file of that time would be left behind."""
    before = """
import jaxrl.run.stop as module
module._FLUSH_S, module._flush = 1.5, lambda: time.sleep(20)
"""
    done = run(before, "with stop.held(): os.write(1, b'written')")
    assert (done.returncode, done.stdout) == (143, "")


def test_a_signal_between_files_that_belong_together_ends_the_process_behind_them():
    ended: list[tuple[str, int]] = []
    stop = Stop(lambda sentence, status: ended.append((sentence, status)))
    with stop.held():
        with stop.held():
            stop._take(signal.SIGTERM)
        assert ended == [], "the outer block is not over"
    assert ended == [("terminated", 143)]


def test_a_second_signal_does_not_wait_for_them():
    ended: list[tuple[str, int]] = []
    stop = Stop(lambda sentence, status: ended.append((sentence, status)))
    with stop.held():
        stop._take(signal.SIGTERM)
        stop._take(signal.SIGINT)
        assert ended == [("interrupted", 130)]
