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
