"""What a run, real or simulated, writes and shows while it goes, opened and closed together.

Purpose: `open_record` reads the files of a run directory up to the step from which the run goes on, and opens the live
view; `RunRecord.begin` opens the files for writing, once nothing can refuse the start any more; the other methods of
`RunRecord` are the hooks of the loop and the backend. However the run ends, each file is closed, the last opened first.

A simulated run differs: its metrics have `simulated`. It has no journal, because its clock decides the same again; no
timeline of its own, because that clock draws it; no watchdog and no messages about evaluations.

Of several processes, process 0 leads (`RunFolder.leads`). The others have a timeline and a layout log of their own,
remember what the journal holds, show nothing, and write no metrics and no samples.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.config import Config, to_mapping
from jaxrl.record import batches, layouts, samples
from jaxrl.record.batches import BatchLog
from jaxrl.record.files import Written
from jaxrl.record.journal import FILE_NAME as JOURNAL
from jaxrl.record.journal import Journal, Tell
from jaxrl.record.layouts import LayoutLog
from jaxrl.record.live import LiveView
from jaxrl.record.metrics import FILE_NAME as METRICS
from jaxrl.record.metrics import MetricsWriter
from jaxrl.record.run_dir import FollowerRunDir, RunDir
from jaxrl.record.samples import PiecesOf, SampleLog
from jaxrl.record.timeline import MAX_BYTES, Timeline
from jaxrl.record.watchdog import Watchdog
from jaxrl.types import Group


@dataclass(slots=True)
class RunRecord:
    """The open record of a run; `journal` and `timeline` are None in a simulated one, `metrics`, `samples` and
    `batches` where another process writes them, and `watchdog` where none is."""

    view: LiveView
    metrics: MetricsWriter | None
    samples: SampleLog | None
    batches: BatchLog | None
    layouts: LayoutLog
    timeline: Timeline | None = None
    journal: Journal | None = None
    watchdog: Watchdog | None = None
    simulated: bool = False
    _phase_began_s: float = field(default_factory=time.monotonic)
    _evaluated: Mapping[str, float] = field(default_factory=dict)  # of the step that is running

    def open_sinks(self) -> None:
        """As `MetricsWriter.open_sinks`."""
        if self.metrics is not None:
            self.metrics.open_sinks()

    def begin(self) -> None:
        """Drops from the files what later steps wrote. The first write of a start that is not refused."""
        parts = (self.timeline, self.metrics, self.samples, self.batches, self.layouts, self.journal)
        for part in parts:
            if part is not None:
                part.begin()

    def written(self) -> dict[str, Written]:
        """The checksums of the files that only grow, by name; the journal has its own."""
        logs = {
            METRICS: None if self.metrics is None else self.metrics.lines,
            samples.FILE_NAME: self.samples,
            batches.FILE_NAME: self.batches,
            layouts.FILE_NAME: self.layouts,
        }
        return {name: log.written for name, log in logs.items() if log is not None and log.written.lines}

    def on_progress(self, busy: int, rows: int, tokens: int, done: int, launched: int) -> None:
        self.beat()
        seconds = max(time.monotonic() - self._phase_began_s, 1e-3)
        self.view.rollout(busy, rows, tokens / seconds, done, launched)

    def on_phase(self, step: int, name: str) -> None:
        self._phase_began_s = time.monotonic()
        self.beat()
        self.view.phase(name)

    def on_step(self, step: int, measured: Mapping[str, float], groups: Sequence[Group]) -> None:
        measured = {**measured, **self._evaluated, **self._kind()}
        self._evaluated = {}
        rows = [] if self.samples is None else self.samples.write(step, groups)
        if self.metrics is not None:
            self.metrics.write(step, measured, rows)
        if self.batches is not None:
            self.batches.write(step, groups)
        self.view.step(step, measured)

    def on_eval(self, step: int, measured: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """An evaluation's numbers stand in the line of its training step; those of step 0 have a line of their own."""
        if step > 0:
            self._evaluated = measured
        elif self.metrics is not None:
            self.metrics.write(0, {**measured, **self._kind()})
        if not self.simulated:
            self.view.message(f"step {step}: held-out {_held_out(measured, len(groups))}")

    def beat(self) -> None:
        """Tells the watchdog that the run has made progress."""
        if self.watchdog is not None:
            self.watchdog.beat()

    def _kind(self) -> dict[str, float]:
        return {"simulated": 1} if self.simulated else {}


def _held_out(measured: Mapping[str, float], num_prompts: int) -> str:
    if "val/loss" in measured:
        accuracy = measured.get("val/rewards/accuracies")
        return f"loss {measured['val/loss']:.4f}" + ("" if accuracy is None else f", accuracy {accuracy:.3f}")
    return f"reward {measured['val/reward']:.3f}, accuracy {measured['val/accuracy']:.3f} on {num_prompts} prompts"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: the last step, whether all steps are done, the summary shown, and the report."""

    step: int
    finished: bool
    summary: Mapping[str, Any]
    report: Path


@contextmanager
def open_record(
    config: Config,
    run_dir: RunDir | FollowerRunDir,
    resume_step: int,
    *,
    total_steps: int = 0,
    simulated: bool = False,
    watchdog: Watchdog | None = None,
    tell: Tell | None = None,
    pieces_of: PiecesOf | None = None,
) -> Iterator[RunRecord]:
    """The record of a run in its directory, closed at the end of the `with`. It writes from `RunRecord.begin` on.

    Args:
      resume_step: the last step that counts, a checkpoint's; -1 where there is none. What later steps wrote is dropped.
      total_steps: for the live view's estimate of the time left; 0: it shows none.
      watchdog: hears of the run's progress, and from now on sees the open spans of its timeline.
      tell: as in `Journal`. pieces_of: as in `SampleLog`.

    Raises:
      ValueError: a file of the record is damaged.
    """
    with ExitStack() as stack:
        shown = sys.stdout if run_dir.leads else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        every = {"testing": config.trainer.test_freq, "save": config.trainer.save_freq}
        view = stack.enter_context(closing(LiveView(total_steps, shown, done=max(resume_step, 0), every=every)))
        timeline, metrics, sample_log, batch_log = None, None, None, None
        if not simulated:
            timeline = stack.enter_context(closing(_timeline(config, run_dir)))
        if run_dir.leads:
            metrics = MetricsWriter(
                run_dir.path,
                () if simulated else config.trainer.logger,
                resume_step=resume_step,
                project=config.trainer.project_name,
                experiment=config.trainer.experiment_name,
                config=to_mapping(config),
                begin=False,
            )
            stack.enter_context(closing(metrics))
            file = run_dir.file(samples.FILE_NAME)
            sample_log = SampleLog(file, resume_step, begin=False, pieces_of=pieces_of)
            stack.enter_context(closing(sample_log))
            limit = config.data.max_response_length
            batch_log = BatchLog(run_dir.file(batches.FILE_NAME), resume_step, limit, begin=False)
            stack.enter_context(closing(batch_log))
        layout_log = LayoutLog(run_dir.own(layouts.FILE_NAME), resume_step, begin=False)
        stack.enter_context(closing(layout_log))
        record = RunRecord(view, metrics, sample_log, batch_log, layout_log, timeline, simulated=simulated)
        if timeline is not None:
            journal = Journal(run_dir.file(JOURNAL), max(resume_step, 0), begin=False, tell=tell)
            record.journal = stack.enter_context(closing(journal))
            if watchdog is not None:
                watchdog.follow(timeline, view.message if run_dir.leads else _to_stderr)
                record.watchdog = watchdog
        yield record


def _timeline(config: Config, run_dir: RunDir | FollowerRunDir) -> Timeline:
    """Of this process; several share the room that one has."""
    file, num_hosts = run_dir.own("timeline.json"), config.hosts.num
    if num_hosts == 1:
        return Timeline(file, begin=False)
    return Timeline(file, host=run_dir.process, max_bytes=max(MAX_BYTES // num_hosts, 1 << 20), begin=False)


def _to_stderr(text: str) -> None:
    print(f"jaxrl: {text}", file=sys.stderr)
