"""The watchdog names the phase that hangs, once per silence."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from jaxrl.record.timeline import Timeline
from jaxrl.record.watchdog import Watchdog


class Reports(list[str]):
    """What was reported; `wait` waits for more."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Semaphore(0)

    def __call__(self, text: str) -> None:
        self.append(text)
        self._more.release()

    def wait(self) -> str:
        assert self._more.acquire(timeout=20)
        return self[-1]


def test_the_phase_that_hangs_is_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    reports = Reports()
    with Timeline(tmp_path / "timeline.json") as timeline:
        watchdog = Watchdog(timeline, 0.2, reports)
        with timeline.phase("step", step=3), timeline.phase("update_actor"):
            text = reports.wait()
            assert "no progress for 0.2 s; in step (" in text
            assert "> update_actor (" in text
            time.sleep(0.5)
            assert len(reports) == 1, "one silence, one report"
            watchdog.beat()
            reports.wait()
            assert len(reports) == 2, "the next silence is reported again"
        watchdog.close()
    assert "test_the_phase_that_hangs_is_named_once" in capfd.readouterr().err, "the stacks of all threads"


def test_outside_any_phase_and_no_report_while_it_moves(tmp_path: Path):
    reports = Reports()
    with Timeline(tmp_path / "timeline.json") as timeline:
        watchdog = Watchdog(timeline, 1.0, reports)
        for _ in range(15):
            time.sleep(0.1)
            watchdog.beat()
        assert reports == []
        assert "in outside any phase" in reports.wait()
        watchdog.close()


def test_zero_turns_it_off_and_closing_does_not_wait_for_the_limit(tmp_path: Path):
    reports = Reports()
    with Timeline(tmp_path / "timeline.json") as timeline:
        off = Watchdog(timeline, 0, reports)
        off.beat()
        off.close()
        began = time.monotonic()
        Watchdog(timeline, 60.0, reports).close()
        assert time.monotonic() - began < 10
    assert reports == []
