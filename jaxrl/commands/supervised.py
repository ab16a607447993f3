"""`jaxrl sft` and `jaxrl dpo`: a run that learns from files, without a rollout.

It has the trainer, the checkpoints and the record of `jaxrl train`; what it does with its rows is in
`jaxrl.training.supervised`. A step is one optimizer update on `data.train_batch_size` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from jaxrl.config import Config, ConfigError, differences
from jaxrl.config.checks import as_read
from jaxrl.config.options import total_steps
from jaxrl.data.conversations import ConversationTokens, ExampleRow, RowSource
from jaxrl.data.stops import stop_ids
from jaxrl.record import metrics as numbers
from jaxrl.record.alarms import Alarms
from jaxrl.record.run_record import RunOutcome
from jaxrl.run.build import read_tokenizer_and_model, with_planned_update
from jaxrl.run.host import LoadRequest
from jaxrl.run.memory import update_problem
from jaxrl.run.stop import Stop
from jaxrl.run.training import Training, run_training
from jaxrl.training.save_schedule import SaveSchedule
from jaxrl.training.supervised import Demonstrations, Method, Preferences, batch_of
from jaxrl.types import RunFailed


def method_of(kind: str, config: Config) -> Method:
    return Demonstrations(config) if kind == "sft" else Preferences(config)


def train_on_files(
    kind: str, config: Config, stop: Stop | None = None, progress: Callable[[str], None] = print
) -> RunOutcome:
    """Runs (or resumes) supervised fine-tuning (`sft`), or preference optimization (`dpo`); raises ValueError for what
    a user can mend."""
    config = as_read(config, kind)
    if not config.data.train_files:
        raise ConfigError(f"data.train_files is missing: jaxrl {kind} learns from files")

    def start(run: Training) -> RunOutcome:
        supervised = SupervisedRun(run, method_of(kind, config))
        return run.go(supervised.train)

    return run_training(kind, config, start, stop=stop, progress=progress)


class SupervisedRun:
    def __init__(self, run: Training, method: Method) -> None:
        self._run, self._method = run, method
        run.open_devices()
        config = run.config
        trained = method.trained(config)
        run.changes = [] if run.earlier is None else differences(run.earlier, config)
        run.tokenizer, run.model = read_tokenizer_and_model(config)
        run.host.read_model(run.model)
        count, memory = run.devices.count, run.devices.memory
        trained = with_planned_update(trained, run.model, count, memory)
        problem = update_problem(trained, run.model, count, memory.platform, memory.share)
        if problem is not None:
            raise ConfigError(problem)
        self._read_rows()
        run.total_steps = total_steps(trained, len(self._source))
        run.find_checkpoints(needs_ref=trained.needs_ref, needs_critic=trained.has_critic)
        if run.is_complete:
            return
        run.beat("loading the weights")
        request = LoadRequest(trained, run.init_from, run.total_steps, is_supervised=True)
        run.said += filter(None, [run.host.load(request)])
        self._trainer = run.host.trainer
        if (state := run.restored()) is not None:
            self._load(state)

    def _read_rows(self) -> None:
        config = self._run.config
        self._run.beat("reading the data")
        tokens = ConversationTokens(
            self._run.tokenizer, stop_ids(self._run.tokenizer, self._run.model.eos_token_ids), config
        )
        self._source = RowSource(self._method.read(config.data.train_files, "data.train_files", config, tokens), config)
        self._held_out: list[list[tuple[int, ExampleRow]]] = []
        self._held_out_rows = ""
        if config.data.val_files:
            rows = self._method.read(config.data.val_files, "data.val_files", config, tokens)
            self._held_out = [*rows.batches(config.data.val_size, config.data.train_batch_size)]
            self._held_out_rows = rows.fingerprint
        self._run.said += tokens.notes
        self._known: dict[str, np.ndarray] = {}  # by `Method.reference`: of the training rows, and of the held-out ones

    def _look_ahead(self) -> None:
        """Computes what is to be known under the weights that the run begins with."""
        size = self._run.config.data.train_batch_size
        for name, batches in (("train", [*self._source.rows.batches(0, size)]), ("val", self._held_out)):
            with self._phase(0, "ref"):
                found = [self._method.reference(self._trainer, batch_of(rows)) for rows in batches]
            self._known |= {name: np.concatenate(found)} if found else {}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._known = dict(state["known"])
        if self._method.precomputes != bool(self._known):
            began = "with" if self._known else "without"
            raise ConfigError(
                f"dpo.precompute_ref_log_probs: the run began {began} it: leave it as it was, or choose another "
                f"trainer.run_dir ({self._run.run_dir.path})"
            )
        held_out = [sum(map(len, self._held_out)), self._held_out_rows]
        if self._known and [len(self._known.get("val", ())), state.get("held_out")] != held_out:
            raise ConfigError(
                "dpo.precompute_ref_log_probs: the run began with other held-out rows, and the weights that it began "
                "with are gone: leave data.val_files and data.val_size as they were, or choose another "
                f"trainer.run_dir ({self._run.run_dir.path})"
            )
        try:
            self._source.load_state(state)
        except ValueError as error:
            raise self._run.other_data(error) from None

    def train(self, stack: ExitStack) -> Mapping[str, str]:
        record = self._run.record
        assert record.timeline is not None, "only a simulated run goes without"
        self._timeline, self._alarms = record.timeline, Alarms(self._run.config)
        self._saves = SaveSchedule(self._run.config.trainer)
        self._saved = self._run.step if self._run.resuming else None
        trainer = self._run.config.trainer
        self._run.begin()
        self._run.stop.save_first(record.view.message)
        if self._method.precomputes and not self._known:
            self._look_ahead()
        if trainer.val_before_train and not self._run.step:
            self._evaluate()
        self._timeline.take_phases()  # of no step
        while self._run.step < self._run.total_steps and not self._run.stop():
            self._run_step(self._run.step + 1)
        self._save(self._run.step)
        return {}

    def _run_step(self, step: int) -> None:
        trainer = self._run.config.trainer
        with self._timeline.phase("step", step=step):
            if self._saves.is_due(self._run.step):
                self._save(step)
            with self._phase(step, "data"):
                rows = self._source.next(self._run.config.data.train_batch_size)
                batch = batch_of(rows)
            with self._phase(step, "update_actor"):
                learned = self._method.train_step(self._trainer, batch, self._known_of("train", rows))
            self._run.step = step
            if trainer.test_freq and (step % trainer.test_freq == 0 or step == self._run.total_steps):
                self._evaluate()
        seconds = {"timing_s/save": 0.0} | self._timeline.take_phases()
        measured = {"training/epoch": float(self._source.epoch)} | learned | seconds
        measured |= numbers.throughput(batch, measured, self._run.devices.count)
        self._run.record.on_step(step, measured, ())
        skipped = {"actor": (1, int(learned["actor/skipped_updates"]))}
        if (failing := self._alarms.updated(step, skipped, learned, batch)) is not None:
            self._save(step)
            raise RunFailed(f"{failing}; saved after step {step}")

    def _evaluate(self) -> None:
        if not self._held_out:
            return
        with self._phase(self._run.step, "testing"):
            found = [
                self._method.evaluate(self._trainer, batch_of(rows), self._known_of("val", rows))
                for rows in self._held_out
            ]
        whole = sum(weight for _, weight in found)
        measured = {f"val/{name}": sum(m[name] * weight for m, weight in found) / whole for name in found[0][0]}
        self._run.record.on_eval(self._run.step, measured)

    def _known_of(self, name: str, rows: Sequence[tuple[int, ExampleRow]]) -> np.ndarray | None:
        return self._known[name][[number for number, _ in rows]] if self._known else None

    def _save(self, step: int) -> None:
        """`step`: that is running."""
        if self._saved != self._run.step:
            state = self._source.state() | {"known": self._known, "held_out": self._held_out_rows}
            with self._phase(step, "save"), self._saves.saving():
                self._run.save(self._run.step, state)
            self._saved = self._run.step

    @contextmanager
    def _phase(self, step: int, name: str) -> Iterator[None]:
        self._run.record.on_phase(step, name)
        with self._timeline.phase(name):
            yield
