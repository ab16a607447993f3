"""What goes on before the first step: said where it takes long, and not otherwise."""

from __future__ import annotations

import io
import threading
import time
from contextlib import closing

from jaxrl.record.progress import ProgressCounter, StartupProgress


def test_only_a_long_stage_is_said():
    said, heard = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        heard.set()

    with closing(StartupProgress(say, patience_s=0.2)) as stages:
        stages.begin("reading the data")
        stages.begin("loading the weights")
        assert heard.wait(10.0)
        stages.begin("building the engine")
    time.sleep(0.3)
    assert said == ["loading the weights ..."]
    stages.close()


def test_a_closed_output_is_no_error():
    heard = threading.Event()

    def say(line: str) -> None:
        heard.set()
        raise BrokenPipeError

    with closing(StartupProgress(say, patience_s=0.01)) as stages:
        stages.begin("reading the data")
        assert heard.wait(10.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_count_on_a_terminal_is_one_line():
    out = Terminal()
    counted = ProgressCounter("responses", out)
    for done in (1, 2, 3):
        counted.show(done, 3)
    counted.close()
    counted.close()
    assert out.getvalue() == "\r1 of 3 responses\r2 of 3 responses\r3 of 3 responses\n"


def test_a_count_in_a_log_is_a_line_now_and_then():
    out, now = io.StringIO(), [0.0]
    counted = ProgressCounter("responses", out, clock=lambda: now[0])
    for done in range(100):
        now[0] += 1.0
        counted.show(done, 100)
    assert out.getvalue().splitlines() == [f"{done} of 100 responses" for done in (29, 59, 89)]
    counted.close()
    assert out.getvalue().count("\n") == 3
    out.close()
    now[0] += 60.0
    counted.show(100, 100)
