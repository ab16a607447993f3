"""What a run's directory has lost: no run starts from step 1, and none goes on without its lines, in silence.

`run.json` holds the last checkpoint that was complete and what was in the files that only grow
(`RunDir.record_checkpoint`). The journal, which decides, vouches for itself (`jaxrl.record.journal`). Nothing vouches
for what other processes than the first write, or for what is only to look at (timelines, what rewards print).
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxrl.config.inputs import reading
from jaxrl.record.files import Written, read_lines
from jaxrl.record.journal import FILE_NAME as JOURNAL
from jaxrl.record.run_dir import RunFolder, recorded_start


def missing_checkpoint(run_dir: RunFolder, found: int | None) -> str | None:
    """What to tell about a checkpoint that is missing although the run goes on from an older one; None: nothing.

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


def lost_lines(run_dir: RunFolder, step: int) -> list[str]:
    """What to tell about lines that are not as they were written, in the files that decide nothing: the run goes on.

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


def missing_journal(run_dir: RunFolder) -> str | None:
    """What to tell about a journal that is gone although a run began here; None: it is there, or none began."""
    file = run_dir.file(JOURNAL)
    if os.path.lexists(file) or "written" not in (recorded_start(run_dir.path) or {}):
        return None
    return f"{file} is gone: steps after the last checkpoint ask the clock again, and may come out another way"
