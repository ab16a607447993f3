"""`jaxrl sft` and `jaxrl dpo`: a run that learns from files, without a rollout.

It has the trainer, the checkpoints and the record of `jaxrl train`, whose sections `model`, `data`, `actor`, `trainer`
and `hosts` it reads; what it does with its rows is in `jaxrl.train.supervised`. A step is one optimizer update on
`data.train_batch_size` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from jaxrl.commands.opening import Opened, open_run
from jaxrl.commands.run import TrainingRun
from jaxrl.config import Config, ConfigError, differences
from jaxrl.config.commands import as_read
from jaxrl.config.options import total_steps
from jaxrl.data.conversations import ConversationTokens, ExampleRow, RowSource
from jaxrl.data.stops import stop_ids
from jaxrl.record import metrics as numbers
from jaxrl.record.alarms import Alarms
from jaxrl.record.run_record import RunOutcome, RunRecord
from jaxrl.record.state import split_arrays
from jaxrl.runtime.build import read_tokenizer_and_model, with_planned_update
from jaxrl.runtime.host import LoadRequest
from jaxrl.runtime.memory import update_problem
from jaxrl.runtime.stop import Stop
from jaxrl.train.checkpoint import HostState
from jaxrl.train.supervised import Demonstrations, Method, Preferences, batch_of
from jaxrl.types import RunFailed


def start_sft(config: Config, stop: Stop | None = None, progress: Callable[[str], None] = print) -> RunOutcome:
    """Runs (or resumes) supervised fine-tuning; raises ValueError for what a user can mend."""
    return _start("sft", config, stop, progress)


def start_dpo(config: Config, stop: Stop | None = None, progress: Callable[[str], None] = print) -> RunOutcome:
    """Runs (or resumes) preference optimization; raises ValueError for what a user can mend."""
    return _start("dpo", config, stop, progress)


def method_of(kind: str, config: Config) -> Method:
    """What `jaxrl sft` or `jaxrl dpo` learns from."""
    return Demonstrations(config) if kind == "sft" else Preferences(config)


def _start(kind: str, config: Config, stop: Stop | None, progress: Callable[[str], None]) -> RunOutcome:
    config = as_read(config, kind)
    if not config.data.train_files:
        raise ConfigError(f"data.train_files is missing: jaxrl {kind} learns from files")
    return open_run(
        kind, config, lambda opened: SupervisedRun(opened, method_of(kind, config)).go(), stop=stop, progress=progress
    )


class SupervisedRun(TrainingRun):
    """A run that learns from files, while it is being built and while it goes."""

    def __init__(self, opened: Opened, method: Method) -> None:
        super().__init__(opened)
        config, self._method = self.config, method
        trained = method.trained(config)
        self.needs_ref, self.needs_critic = trained.needs_ref, trained.has_critic
        self.changes = [] if self.earlier is None else differences(self.earlier, config)
        self.tokenizer, self.model = read_tokenizer_and_model(config)
        self.host.read_model(self.model)
        count, memory = self.devices.count, self.devices.memory
        trained = with_planned_update(trained, self.model, count, memory)
        problem = update_problem(trained, self.model, count, memory.platform, memory.share)
        if problem is not None:
            raise ConfigError(problem)
        if config.trainer.init_from and self.earlier is None:
            self.host.refuse_other_init()
        self._read_rows()
        self.total_steps = total_steps(trained, len(self._source))
        self.find_checkpoints()
        self.is_over = self.resuming and self.step >= self.total_steps
        if self.is_over:
            return
        self.watchdog.beat("loading the weights")
        if note := self.host.load(LoadRequest(trained, self.init_from, self.total_steps, is_supervised=True)):
            self.said.append(note)
        self.trainer = self.host.trainer
        if self.resuming:
            self.watchdog.beat("restoring the checkpoint")
            self._load(self.restored())

    def _read_rows(self) -> None:
        config = self.config
        self.watchdog.beat("reading the data")
        tokens = ConversationTokens(self.tokenizer, stop_ids(self.tokenizer, self.model.eos_token_ids), config)
        self._source = RowSource(self._method.read(config.data.train_files, "data.train_files", config, tokens), config)
        self._held_out: list[list[tuple[int, ExampleRow]]] = []
        self._held_out_rows = ""
        if config.data.val_files:
            rows = self._method.read(config.data.val_files, "data.val_files", config, tokens)
            self._held_out = [*rows.batches(config.data.val_size, config.data.train_batch_size)]
            self._held_out_rows = rows.fingerprint
        self.said += tokens.notes
        self._known: dict[str, np.ndarray] = {}  # by `Method.reference`: of the training rows, and of the held-out ones

    def _look_ahead(self) -> None:
        """Computes what is to be known under the weights that the run begins with."""
        size = self.config.data.train_batch_size
        for name, batches in (("train", [*self._source.rows.batches(0, size)]), ("val", self._held_out)):
            with self._phase(0, "ref"):
                found = [self._method.reference(self.trainer, batch_of(rows)) for rows in batches]
            self._known |= {name: np.concatenate(found)} if found else {}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._known = dict(state["known"])
        if self._method.precomputes != bool(self._known):
            began = "with" if self._known else "without"
            raise ConfigError(
                f"dpo.precompute_ref_log_probs: the run began {began} it: leave it as it was, or choose another "
                f"trainer.run_dir ({self.run_dir.path})"
            )
        held_out = [sum(map(len, self._held_out)), self._held_out_rows]
        if self._known and [len(self._known.get("val", ())), state.get("held_out")] != held_out:
            raise ConfigError(
                "dpo.precompute_ref_log_probs: the run began with other held-out rows, and the weights that it began "
                "with are gone: leave data.val_files and data.val_size as they were, or choose another "
                f"trainer.run_dir ({self.run_dir.path})"
            )
        try:
            self._source.load_state(state)
        except ValueError as error:
            raise ConfigError(
                f"{self.run_dir.path} holds a run with other data: {error}: choose another trainer.run_dir, with "
                f"trainer.init_from={self.run_dir.path} to begin from its parameters"
            ) from None

    def train(self, record: RunRecord, stack: ExitStack) -> Mapping[str, str]:
        assert record.timeline is not None, "only a simulated run goes without"
        self._timeline, self._alarms = record.timeline, Alarms(self.config)
        self._saved = self.step if self.resuming else None
        trainer = self.config.trainer
        self.begin(record)
        self.stop.save_first(record.view.message)
        if self._method.precomputes and not self._known:
            self._look_ahead()
        if trainer.val_before_train and not self.step:
            self._evaluate()
        self._timeline.take_phases()  # of no step
        while self.step < self.total_steps and not self.stop():
            self._run_step(self.step + 1)
        self._save(self.step)
        return {}

    def _run_step(self, step: int) -> None:
        trainer = self.config.trainer
        with self._timeline.phase("step", step=step):
            if self.step and trainer.save_freq and self.step % trainer.save_freq == 0:
                self._save(step)
            with self._phase(step, "data"):
                rows = self._source.next(self.config.data.train_batch_size)
                batch = batch_of(rows)
            with self._phase(step, "update_actor"):
                learned = self._method.train_step(self.trainer, batch, self._known_of("train", rows))
            self.step = step
            if trainer.test_freq and (step % trainer.test_freq == 0 or step == self.total_steps):
                self._evaluate()
        seconds = {"timing_s/save": 0.0} | self._timeline.take_phases()
        measured = {"training/epoch": float(self._source.epoch)} | learned | seconds
        measured |= numbers.throughput(batch, measured, self.devices.count)
        self.record.on_step(step, measured, ())
        skipped = {"actor": (1, int(learned["actor/skipped_updates"]))}
        if (failing := self._alarms.updated(step, skipped, learned, batch)) is not None:
            self._save(step)
            raise RunFailed(f"{failing}; saved after step {step}")

    def _evaluate(self) -> None:
        if not self._held_out:
            return
        with self._phase(self.step, "testing"):
            found = [
                self._method.evaluate(self.trainer, batch_of(rows), self._known_of("val", rows))
                for rows in self._held_out
            ]
        whole = sum(weight for _, weight in found)
        measured = {f"val/{name}": sum(m[name] * weight for m, weight in found) / whole for name in found[0][0]}
        self.record.on_eval(self.step, measured)

    def _known_of(self, name: str, rows: Sequence[tuple[int, ExampleRow]]) -> np.ndarray | None:
        return self._known[name][[number for number, _ in rows]] if self._known else None

    def _save(self, step: int) -> None:
        """`step`: that is running."""
        if self._saved != self.step:
            state = self._source.state() | {"known": self._known, "held_out": self._held_out_rows}
            with self._phase(step, "save"):
                self.save(self.step, HostState(*split_arrays(state)))
            self._saved = self.step

    @contextmanager
    def _phase(self, step: int, name: str) -> Iterator[None]:
        self.record.on_phase(step, name)
        with self._timeline.phase(name):
            yield
