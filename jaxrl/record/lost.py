"""Checkpoints that are gone: what a run's directory tells of them, so that no run starts from step 1 in silence.

`run.json` holds the last checkpoint that was complete (`RunDir.record_checkpoint`).
"""

from __future__ import annotations

from jaxrl.record.files import read_lines
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


def missing_metrics(run_dir: RunFolder, step: int) -> str | None:
    """What to tell about lines of metrics that are gone, of steps up to the checkpoint that a run goes on from; None:
    every line is there. They decide nothing, so that the run goes on."""
    file = run_dir.file("metrics.jsonl")
    there = {line.get("step") for line in read_lines(file)}
    gone = [each for each in range(1, step + 1) if each not in there]
    if not gone:
        return None
    shown = ", ".join(map(str, gone[:5])) + (f" and {len(gone) - 5} more" if len(gone) > 5 else "")
    return f"{file} has no line of step {shown}: what was measured there is lost"
