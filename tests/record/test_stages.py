"""What goes on before the first step: said where it takes long, and not otherwise."""

from __future__ import annotations

import threading
import time
from contextlib import closing

from jaxrl.record.stages import Stages
from jaxrl.record.watchdog import Watchdog


def test_only_a_long_stage_is_said():
    said, heard = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        heard.set()

    with closing(Stages(say, patience_s=0.2)) as stages:
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

    with closing(Stages(say, patience_s=0.01)) as stages:
        stages.begin("reading the data")
        assert heard.wait(10.0)


def test_the_watchdog_tells_of_stages():
    told = list[str]()
    with closing(Watchdog(0.0, lambda text: None, told.append)) as watchdog:
        watchdog.beat("reading the data")
        watchdog.beat()
    assert told == ["reading the data"]
