"""What a run, real or simulated, writes and shows while it runs.

No file is written before `RunRecord.begin`, when nothing can refuse the start any more. The other methods of
`RunRecord` are the hooks of the loop and the backend.

A simulated run differs: its metrics have `simulated`. It has no journal, because its clock decides the same again.
`RunRecord` writes no timeline for it, because that clock draws one, and it has no watchdog and no messages about
evaluations.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from jaxrl.config import Config, to_mapping
from jaxrl.record import batches, layouts, samples
from jaxrl.record.batches import BatchLog
from jaxrl.record.journal import FILE_NAME as JOURNAL
from jaxrl.record.journal import Journal
from jaxrl.record.layouts import LayoutLog
from jaxrl.record.live import LiveView
from jaxrl.record.metrics import MetricsWriter
from jaxrl.record.run_dir import RunDir
from jaxrl.record.samples import PiecesOf, SampleLog
from jaxrl.record.timeline import Timeline
from jaxrl.record.watchdog import Watchdog
from jaxrl.types import Group


class RunRecord:
    """The record of a run in its directory, to be closed by a `with`. Raises ValueError where the journal is damaged.

    `resume_step`: the last step that counts, a checkpoint's, or -1; `total_steps`: for the time left, 0 to show none;
    `watchdog`: receives the run's progress, and sees the open spans of its timeline. A simulated run has no `journal`
    and no `timeline`.
    """

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        resume_step: int,
        *,
        total_steps: int = 0,
        simulated: bool = False,
        watchdog: Watchdog | None = None,
        pieces_of: PiecesOf | None = None,
    ) -> None:
        self._watchdog = watchdog
        self._kind = {"simulated": 1} if simulated else {}
        self._evaluated: Mapping[str, float] = {}  # of the step that is running
        self.journal = None if simulated else Journal(run_dir.file(JOURNAL), max(resume_step, 0))
        self.timeline = None if simulated else Timeline(run_dir.file("timeline.json"), begin=False)
        self.metrics = MetricsWriter(
            run_dir.path,
            () if simulated else config.trainer.logger,
            resume_step=resume_step,
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            config=to_mapping(config),
        )
        self.samples = SampleLog(run_dir.file(samples.FILE_NAME), resume_step, pieces_of=pieces_of)
        limit = config.data.max_response_length
        self.batches = BatchLog(run_dir.file(batches.FILE_NAME), resume_step, limit)
        self.layouts = LayoutLog(run_dir.file(layouts.FILE_NAME), resume_step)
        save_freq = config.trainer.save_freq
        window = max(config.trainer.test_freq, 0 if save_freq == "auto" else save_freq)
        self.view = LiveView(total_steps, sys.stdout, done=max(resume_step, 0), window=window)
        if self.timeline is not None and watchdog is not None:
            watchdog.follow(self.timeline, self.view.message)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.enter_context(closing(self.view))
            for part in self._parts():
                stack.enter_context(closing(part))

    def _parts(self) -> list[Any]:
        parts = (self.timeline, self.metrics, self.samples, self.batches, self.layouts, self.journal)
        return [part for part in parts if part is not None]

    def begin(self) -> None:
        """Drops from the files what later steps wrote. The first write of a start that is not refused."""
        for part in self._parts():
            part.begin()

    def on_progress(self, busy: int, rows: int, tokens: int, done: int, launched: int) -> None:
        self.beat()
        self.view.rollout(busy, rows, tokens, done, launched)

    def on_phase(self, step: int, name: str) -> None:
        self.beat()
        self.view.phase(name)

    def on_step(self, step: int, measured: Mapping[str, float], groups: Sequence[Group]) -> None:
        measured = {**measured, **self._evaluated, **self._kind}
        self._evaluated = {}
        self.metrics.write(step, measured, self.samples.write(step, groups))
        self.batches.write(step, groups)
        self.view.step(step, measured)

    def on_eval(self, step: int, measured: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """An evaluation's numbers stand in the line of its training step; those of step 0 have a line of their own."""
        if step > 0:
            self._evaluated = measured
        else:
            self.metrics.write(0, {**measured, **self._kind})
        if self._kind:
            return
        if "val/loss" in measured:
            accuracy = measured.get("val/rewards/accuracies")
            text = f"loss {measured['val/loss']:.4f}" + ("" if accuracy is None else f", accuracy {accuracy:.3f}")
        else:
            text = f"reward {measured['val/reward']:.3f}, accuracy {measured['val/accuracy']:.3f}"
            text += f" on {len(groups)} prompts"
        self.view.message(f"step {step}: held-out {text}")

    def beat(self) -> None:
        if self._watchdog is not None:
            self._watchdog.beat()


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """`finished`: whether all steps are done."""

    step: int
    finished: bool
    summary: Mapping[str, Any]
