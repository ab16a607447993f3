"""Checks of a run's directory before the run goes on: damaged files, and checkpoints, lines or a journal that are gone.

`refuse_damaged` reads the files. The others compare them with `run.json`, which holds the last complete checkpoint and
the checksums of the files that only grow (`RunDir.record_checkpoint`). The journal has its own checksum
(`jaxrl.record.journal`). There is none for timelines and what rewards print.
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxrl.config.inputs import reading
from jaxrl.record import batches, layouts, samples
from jaxrl.record.files import JsonLines, Written, read_lines
from jaxrl.record.journal import FILE_NAME as JOURNAL
from jaxrl.record.journal import read_journal
from jaxrl.record.metrics import read_metrics
from jaxrl.record.run_dir import RunDir, recorded_start
from jaxrl.record.timeline import Timeline


def refuse_damaged(run_dir: RunDir) -> None:
    """Raises ValueError if a run could not go on with the files in its directory; for before anything that takes long.
    `jaxrl.record.run_record.open_record` reads them again."""
    read_metrics(run_dir.path)
    for name in (samples.FILE_NAME, batches.FILE_NAME, layouts.FILE_NAME):
        JsonLines(run_dir.file(name), lambda step: True, begin=False)
    read_journal(run_dir.file(JOURNAL))
    Timeline(run_dir.file("timeline.json"), begin=False)


def missing_checkpoint(run_dir: RunDir, found: int | None) -> str | None:
    """A warning that the last checkpoint is missing, where the run goes on from an older one; None: it is there.

    Args:
      found: the newest step that is there, damaged or not; None: there is none.

    Raises:
      ValueError: none is there, and to start from step 1 would drop the metrics of the steps that were saved.
    """
    saved = (recorded_start(run_dir.path) or {}).get("checkpoint")
    if saved is None or (found is not None and found >= saved):
        return None
    if found is not None:
        return f"checkpoint {saved} is missing, though {run_dir.file('run.json')} tells of it"
    metrics = run_dir.file("metrics.jsonl")
    if not any(line.get("step") for line in read_lines(metrics)):
        return None  # moved away: a new start is what is wanted
    raise ValueError(
        f"{run_dir.file('checkpoints')} holds no checkpoint, though step {saved} was saved: bring the folder back, "
        f"choose another trainer.run_dir, or move {metrics} away to start from step 1"
    )


def lost_lines(run_dir: RunDir, step: int) -> list[str]:
    """Warnings about lines that are gone or have changed, in the files that decide nothing: the run goes on.

    Args:
      step: of the checkpoint that it goes on from.
    """
    told = (recorded_start(run_dir.path) or {}).get("written", {})
    found = (_lost(run_dir.file(name), Written(**written), step) for name, written in told.items())
    return [text for text in found if text is not None]


def _lost(file: Path, written: Written, step: int) -> str | None:
    if not os.path.lexists(file):
        return f"{file} is gone, and with it what its {written.lines} lines held"
    with reading(file), open(file, "rb") as opened:
        if Written().then(opened.read(written.bytes)) == written:
            return None
    steps = [line.get("step") for line in read_lines(file)]
    if missing := sorted(set(range(1, step + 1)) - set(steps)):
        shown = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return f"{file} has no line of step {shown}: what was recorded there is lost"
    if len(steps) < written.lines:
        return f"{file} has {len(steps)} of its {written.lines} lines: what was recorded in the others is lost"
    return f"{file} has changed since it was written: some of its first {written.lines} lines may say what was not"


def missing_journal(run_dir: RunDir) -> str | None:
    """A warning that the journal is gone although a run began here; None: it is there, or none began."""
    file = run_dir.file(JOURNAL)
    if os.path.lexists(file) or "written" not in (recorded_start(run_dir.path) or {}):
        return None
    return f"{file} is gone: steps after the last checkpoint ask the clock again, and may come out another way"
