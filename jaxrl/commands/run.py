"""A run that trains, whatever it learns from: checkpoints, the record, and how it ends.

`jaxrl.commands.train` and `jaxrl.commands.supervised` add what is trained on. The order in which a run is built stands
in docs/architecture.md, "Starting a run".
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxrl.commands.opening import Opened
from jaxrl.config import ConfigError
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms import page_parts
from jaxrl.models.config import ModelConfig
from jaxrl.record.failures import summary_of
from jaxrl.record.files import reason, way_on
from jaxrl.record.run_dir import recorded_start
from jaxrl.record.run_record import RunOutcome, RunRecord
from jaxrl.record.state import join_arrays
from jaxrl.report.page import write_report
from jaxrl.runtime.build import retuning_note
from jaxrl.runtime.host import Host, NoGroup
from jaxrl.train.checkpoint import Checkpointer, HostState, holds_critic
from jaxrl.types import RunFailed

if TYPE_CHECKING:
    from jaxrl.runtime.cluster import RemoteHost, RemoteStore


class TrainingRun(ABC):
    """A run that trains, while it is being built and while it goes. What is trained on is a subclass's.

    Attributes, besides those that `Opened` has:
      host: what touches devices. devices: what is known of them. tokenizer, model: that `model.path` names.
      changes: since the last start.
      said: notes that are shown once nothing is refused any more.
      step: that the run has reached. total_steps: the last one. is_over: there is none to run.
      needs_ref: whether the beginning's weights are kept. needs_critic: whether a critic is trained, too.
      resuming: whether there is a checkpoint to go on from; init_from: the one whose weights the run begins with.
    """

    total_steps: int
    is_over: bool
    record: RunRecord

    def __init__(self, opened: Opened) -> None:
        self.run_dir, self.stop, self.stages, self.stack = opened.run_dir, opened.stop, opened.stages, opened.stack
        self.began_s, self.say, self.watchdog = opened.began_s, opened.say, opened.watchdog
        self.earlier, self.config = opened.earlier, opened.config
        self.needs_ref, self.needs_critic = self.config.needs_ref, self.config.has_critic
        self.changes: list[str] = []
        self.tokenizer: Tokenizer
        self.model: ModelConfig
        self.host: Host | RemoteHost
        if opened.hosts is None:
            self.host = Host(NoGroup(), self.watchdog.beat)
        else:
            from jaxrl.runtime.cluster import RemoteHost

            self.host = RemoteHost(self.stack.enter_context(opened.hosts(self.watchdog.beat)))
        self.devices = self.host.open(self.config, self.run_dir.kind, self.earlier)
        self.config = self.devices.config
        self.said: list[str] = [*self.devices.notes]

    @abstractmethod
    def train(self, record: RunRecord, stack: ExitStack) -> Mapping[str, str]:
        """Trains up to `total_steps`, or until a stop is asked for; `step` is the last one. Calls `begin` once nothing
        can refuse the start any more. Returns lines for the summary."""

    def find_checkpoints(self) -> None:
        """Finds what the run goes on or begins from. That reads all of a checkpoint, which may take minutes: after
        everything that a look at the options could have told."""
        config = self.config
        self.watchdog.beat("comparing the checkpoint with its checksums")
        self.store = self._open_store()
        latest = self.store.latest_step()
        self.step, self.resuming = latest or 0, latest is not None
        self.watchdog.saved_step = latest
        self.said += [gone] if (gone := self.run_dir.missing_journal()) is not None else []
        saved = self.run_dir.file(f"checkpoints/{self.step}") if self.resuming else None
        self.init_from = None
        # a run that goes on has its weights; only the reference is always that of the beginning, or the base
        if self.model.lora is not None and self.resuming:
            self.init_from = saved
        elif config.trainer.init_from and (self.needs_ref or not self.resuming):
            self.init_from, notes = self.host.whole_step(config.trainer.init_from)
            self.said += notes
        self.began_with = self._beginning()
        for place in dict.fromkeys((self.init_from, saved)):
            if place is not None:
                self.host.refuse_other_model(place)
        if saved is not None and holds_critic(saved) != self.needs_critic:
            found, needed = ("no", "needs one") if self.needs_critic else ("a", "has none")
            raise ConfigError(
                f"checkpoint {saved} holds {found} critic, and "
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} {needed}: go on with the run's estimator, "
                "or begin a run from its parameters (trainer.init_from)"
            )

    def _beginning(self) -> str:
        """The weights that the run began with, as options. No checkpoint of it has them: each start reads them again
        for the reference of a KL loss or of pairs, and for the base of adapters.

        Raises:
          ConfigError: they would be others now.
        """
        config, has_base = self.config, self.model.lora is not None
        if self.init_from is not None and not has_base:
            now = f"trainer.init_from={self.init_from.resolve()}"
        else:
            path = Path(config.model.path).expanduser()
            now = f"model.path={path.resolve() if path.exists() else config.model.path}"
            now += f" (model.random_init, trainer.seed={config.trainer.seed})" if config.model.random_init else ""
        recorded = (recorded_start(self.run_dir.path) or {}).get("began_with") if self.resuming else None
        if recorded not in (None, now) and (self.needs_ref or has_base) and self.step < self.total_steps:
            what = "the base of its adapters" if has_base else "its reference"
            raise ConfigError(
                f"{self.run_dir.path} holds a run that began with {recorded}, which is {what}, and now that would be "
                f"{now}: leave it as it was, or choose another trainer.run_dir"
            )
        return recorded or now

    def _open_store(self) -> Checkpointer | RemoteStore:
        """The run's checkpoints, of which the newest whole one is known. Nothing is written."""
        store = self.host.open_store(self.run_dir.file("checkpoints"), self._committed)
        chosen = store.chosen
        newest = None if chosen is None else max([chosen.step, *chosen.faults])
        missing = self.run_dir.missing_checkpoint(newest)
        self.said += [*(() if missing is None else (missing,)), *(() if chosen is None else chosen.notes())]
        return store

    def go(self) -> RunOutcome:
        """Runs to the end.

        Raises:
          RunFailed: the system refused a file or memory, with how to go on.
        """
        try:
            return self._go()
        except RunFailed:
            with suppress(OSError, ValueError):  # the cause is more than that its page cannot be written
                _write_page(self.run_dir.path)
            raise
        except OSError as error:
            place = error.filename or self.run_dir.path
            raise RunFailed(f"{place}: {reason(error)}; {self.store.last_good()}: {way_on(error)}") from error
        except jax.errors.JaxRuntimeError as error:
            said = str(error).partition("\n")[0]
            if not said.startswith("RESOURCE_EXHAUSTED"):
                raise
            raise RunFailed(
                f"the memory of the device is full ({self.devices.kind}; {said}); {self.store.last_good()}: "
                "lower rollout.memory_fraction or actor.ppo_max_token_len_per_gpu, or set actor.remat=full, and run "
                "again"
            ) from error

    def _over(self) -> RunOutcome:
        """The run has had all of its steps: no weight is loaded, and only its page is written anew."""
        option = "trainer.total_training_steps" if self.config.trainer.total_training_steps else "trainer.total_epochs"
        with closing(self.store):
            self.stages.close()
            report = _write_page(self.run_dir.path)
            of = f"already at step {self.step} of {self.total_steps}"
            unused = f"; what has changed since has no effect: {'; '.join(self.changes)}" if self.changes else ""
            for line in (*self.said, f"{self.run_dir.path}: {of}: raise {option} to go on{unused}"):
                self.say(line)
        return RunOutcome(self.step, True, {"run": str(self.run_dir.path), "steps": of, "report": str(report)}, report)

    def _go(self) -> RunOutcome:
        if self.is_over:
            return self._over()
        with ExitStack() as stack:  # however the run ends, everything opened is closed, the last opened first
            stack.enter_context(closing(self.store))
            resume_step = self.step if self.resuming else -1
            opened = RunRecord(
                self.config,
                self.run_dir,
                resume_step,
                total_steps=self.total_steps,
                watchdog=self.watchdog,
                pieces_of=self.tokenizer.pieces,
            )
            self.record = record = stack.enter_context(opened)
            carried = self.train(record, stack)
            self.watchdog.beat("waiting for the last checkpoint")
            self.store.wait()
            self.watchdog.beat("closing the run's files")
        self.watchdog.beat("writing the report")
        report = _write_page(self.run_dir.path)
        finished = self.step >= self.total_steps
        summary = {
            "run": str(self.run_dir.path),
            "steps": f"{self.step} of {self.total_steps}" + ("" if finished else " (stopped; run again to go on)"),
            **summary_of(self.run_dir.path),
            **carried,
            "time": f"{time.monotonic() - self.began_s:.0f} s",
            "report": str(report),
        }
        record.view.final_table(summary)
        return RunOutcome(self.step, finished, summary, report)

    def begin(self, record: RunRecord) -> None:
        """The first writes: nothing about the start is refused any more."""
        found = self.devices
        described = {"platform": found.backend, "kind": found.kind, "count": found.count}
        self.watchdog.beat("opening what trainer.logger names")
        record.metrics.open_sinks()  # the last that can fail; a signal does not wait for the network
        cache_before = (recorded_start(self.run_dir.path) or {}).get("compilation_cache")
        with self.stop.held():
            newest = self.step if self.resuming else None
            self.run_dir.record_start(self.config, described, self.step, checkpoint=newest, began_with=self.began_with)
            self.store.tidy()
            record.begin()
            cache = self.host.use_compilation_cache()
            note = retuning_note(cache_before, cache, found.platform) if self.resuming else None
            self.run_dir.record_cache(cache, note)
        self.said += [] if note is None else [note]
        if self.resuming:
            self.said += self.run_dir.resuming(self.changes, self.step, self.total_steps)
        for line in self.said:
            self.say(line)
        self.stages.close()

    def save(self, step: int, state: HostState) -> None:
        """Begins to write a checkpoint."""
        self.host.save(step, state)

    def _committed(self, step: int) -> None:
        """A checkpoint is complete; in the thread that wrote it."""
        self.run_dir.record_checkpoint(step)
        self.watchdog.saved_step = step

    def restored(self) -> dict[str, Any]:
        """Brings the models to the checkpoint; returns the controller's part of it."""
        state = self.host.restore(self.step)
        return join_arrays(state.values, state.arrays)


def _write_page(folder: Path) -> Path:
    return write_report(folder, parts=page_parts())
