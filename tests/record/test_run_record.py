"""The record of a run: the content of its files, the lines that a resumed run drops, and that every file is closed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import contents

from jaxrl.config import Config, from_mapping
from jaxrl.record.journal import Journal
from jaxrl.record.layouts import LayoutLog, read_layouts
from jaxrl.record.live import LiveView
from jaxrl.record.metrics import MetricsWriter, read_metrics
from jaxrl.record.run_dir import RunDir
from jaxrl.record.run_record import RunRecord
from jaxrl.record.samples import SampleLog
from jaxrl.record.timeline import Timeline
from jaxrl.types import Group, Prompt, Sample, SampleKey

IDS, ZEROS = np.asarray([5, 6], np.int32), np.zeros((2,), np.float32)
SAMPLE = Sample(SampleKey(0, 0, 0), IDS, ZEROS, ZEROS, IDS, "stop", text="4", reward=0.5)
GROUPS = [Group(Prompt(0, 0, (1,), "2+2?", "src", "4"), [SAMPLE])]
PARTS = (LiveView, Timeline, MetricsWriter, SampleLog, LayoutLog, Journal)  # as they are opened


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    run_dir = RunDir(tmp_path)
    yield run_dir
    run_dir.close()


def make_config(**trainer: object) -> Config:
    data = {"task": "leg_counting", "task_config": {"min_animals": 2}}
    return from_mapping({"model": {"path": "m", "random_init": True}, "data": data, "trainer": trainer})


def numbers(run_dir: RunDir) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(run_dir.path)]


@pytest.mark.parametrize("simulated", [False, True])
def test_an_evaluation_stands_in_the_line_of_its_step(run_dir: RunDir, simulated: bool):
    with RunRecord(make_config(), run_dir, -1, simulated=simulated) as record:
        record.begin()
        record.on_eval(0, {"val/reward": 0.375, "val/accuracy": 0.25}, GROUPS)
        for step in (1, 2):
            record.on_phase(step, "gen")
            record.on_progress(3, 8, 100, 1, 4)
            if step == 1:
                record.on_eval(1, {"val/reward": 0.5, "val/accuracy": 0.5}, GROUPS)
            record.on_step(step, {"x": step}, GROUPS)
    kind = {"simulated": 1} if simulated else {}
    assert numbers(run_dir) == [
        {"step": 0, "val/reward": 0.375, "val/accuracy": 0.25} | kind,
        {"step": 1, "x": 1, "val/reward": 0.5, "val/accuracy": 0.5} | kind,
        {"step": 2, "x": 2} | kind,
    ]
    assert [json.loads(line)["step"] for line in run_dir.file("samples.jsonl").read_text().splitlines()] == [1, 2]


def write(record: RunRecord, steps: tuple[int, ...]) -> None:
    assert record.journal is not None
    for step in steps:
        record.layouts.write(step, 0, "all", "measured", {"points": [], "switches": []})
        record.journal.append(step, "verdict", (0, step), {"status": "timeout"})
        record.on_step(step, {"x": step}, GROUPS)


@pytest.mark.parametrize(("resume_step", "kept"), [(2, [1, 2]), (0, [])])
def test_a_resumed_run_drops_what_later_steps_wrote(run_dir: RunDir, resume_step: int, kept: list[int]):
    with RunRecord(make_config(), run_dir, -1) as record:
        record.begin()
        write(record, (1, 2, 3))
    for name in ("metrics", "samples", "layouts", "journal"):
        with open(run_dir.file(f"{name}.jsonl"), "ab") as file:
            file.write(b'{"step": 4, "cut o')
    before = contents(run_dir.path)
    with RunRecord(make_config(), run_dir, resume_step) as record:
        assert contents(run_dir.path) == before, "a start may still be refused"
        record.begin()
        assert record.journal is not None
        decided = [step for step in (1, 2, 3) if record.journal.find(step, "verdict", (0, step)) is not None]
        assert decided == [step for step in (1, 2, 3) if step not in kept], "of the steps that run again"
        assert [row["step"] for row in read_metrics(run_dir.path)] == kept
        assert [row["step"] for row in read_layouts(run_dir.path)] == kept
        record.on_step(resume_step + 1, {}, GROUPS)
    samples = [json.loads(line)["step"] for line in run_dir.file("samples.jsonl").read_text().splitlines()]
    assert samples == [*kept, resume_step + 1]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of parts in the order in which they are closed."""
    order: list[str] = []
    for kind in PARTS:

        def close(self: object, name: str = kind.__name__, really: Callable[[Any], None] = kind.close) -> None:
            order.append(name)
            really(self)

        monkeypatch.setattr(kind, "close", close)
    return order


def interrupt(run_dir: RunDir) -> None:
    with RunRecord(make_config(), run_dir, -1):
        raise KeyboardInterrupt


def test_all_is_closed_last_opened_first_whatever_ends_the_run(run_dir: RunDir, closed: list[str]):
    with pytest.raises(KeyboardInterrupt):
        interrupt(run_dir)
    assert closed == [kind.__name__ for kind in reversed(PARTS)]
