"""`jaxrl train`: a run in its directory, from the first step or from where it stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.config.options import total_steps
from jaxrl.data.prompts import PromptSource, load_train, validation_prompts
from jaxrl.data.stops import stop_ids
from jaxrl.loop import Hooks, Loop
from jaxrl.record.disk import is_full, reason
from jaxrl.record.lost import missing_checkpoint
from jaxrl.record.run_dir import RunDir
from jaxrl.record.run_record import RunOutcome, RunRecord, open_record
from jaxrl.record.state import join_arrays, split_arrays
from jaxrl.report.page import write_report
from jaxrl.rewards.pool import RewardPool, build_pool
from jaxrl.rewards.scorers import build_scorer
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.runtime.backend import RolloutBackend, text_by
from jaxrl.runtime.build import (
    abstract,
    build_engine,
    build_executor,
    load_tokenizer_and_model,
    prepare_jax,
    with_planned_remat,
)
from jaxrl.runtime.degree import with_degree
from jaxrl.runtime.layout_session import LayoutSession
from jaxrl.runtime.memory import layout_degrees
from jaxrl.runtime.overlap import Overlap
from jaxrl.runtime.profile import build_layouts
from jaxrl.runtime.rules import batch_rule, carried
from jaxrl.runtime.stop import Stop
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.train.checkpoint import Checkpointer, HostState, restore_params_only
from jaxrl.train.step import Trainer
from jaxrl.types import RunFailed

_log = logging.getLogger(__name__)


def train(config: Config, say: Callable[[str], None] = print, stop: Stop | None = None) -> RunOutcome:
    """Runs (or resumes) the training that `config` describes; raises ValueError for what a user can mend.

    Args:
      stop: the signals of the program; without one they are the caller's.
    """
    if not config.trainer.run_dir:
        raise ConfigError("trainer.run_dir is missing: give the folder that the run writes to and resumes from")
    with closing(RunDir(config.trainer.run_dir)) as run_dir:
        return _Run(config, run_dir, stop or Stop(), say).go()


class _Run:
    """A training run while it is being built and while it goes."""

    def __init__(self, config: Config, run_dir: RunDir, stop: Stop, say: Callable[[str], None]) -> None:
        self.config, self.run_dir, self.stop = config, run_dir, stop
        self.began = time.monotonic()
        self.rule = batch_rule(config)  # before anything that takes long: its settings may be refused
        run_dir.refuse_other_kind(simulated=False, option="trainer.run_dir")
        self.store = self._find_checkpoint(say)
        self.step = self.store.latest_step() or 0
        self.resuming = self.store.latest_step() is not None
        self.devices = prepare_jax(config)
        own = config.rollout.num_devices
        self.mesh = make_mesh(self.devices[: len(self.devices) - own])  # of the trainer
        rollout_mesh = make_mesh(self.devices[-own:]) if own else self.mesh
        config = self.config = with_degree(config, rollout_mesh, say, run_dir.earlier)
        changes = run_dir.changes(config)
        self.layout = Layout(rollout_mesh, config.rollout.tp)
        self.tokenizer, self.model, params = load_tokenizer_and_model(config, self.mesh)
        problems = load_train(config)
        self.prompts = PromptSource(problems, self.tokenizer, config)
        self.validation = validation_prompts(config, self.tokenizer, problems)
        steps = total_steps(config, self.prompts.num_prompts)
        assert steps is not None
        self.total_steps = steps
        updates = steps * config.actor.ppo_epochs * (config.data.train_batch_size // config.mini_batch_prompts)
        if config.trainer.init_from:
            params = restore_params_only(config.trainer.init_from, abstract(params), say=say)
        trained = with_planned_remat(config, self.model, self.mesh.devices.ravel().tolist())
        self.trainer = Trainer(trained, self.model, params, self.mesh, total_updates=updates)
        del params
        self.host_state: dict[str, Any] | None = None  # of the checkpoint that the run goes on from
        if self.resuming:
            self.host_state = self._restored()
            for line in run_dir.resuming(changes, self.step, self.total_steps):
                say(line)

    def _find_checkpoint(self, say: Callable[[str], None]) -> Checkpointer:
        """The run's checkpoints, of which the newest whole one is known. Nothing is written."""
        store = Checkpointer(
            self.run_dir.file("checkpoints"),
            max_to_keep=self.config.trainer.max_ckpt_to_keep,
            on_commit=self.run_dir.record_checkpoint,
        )
        chosen = store.chosen
        newest = None if chosen is None else max([chosen.step, *chosen.faults])
        missing = missing_checkpoint(self.run_dir, newest)
        for line in (*(() if missing is None else (missing,)), *(() if chosen is None else chosen.notes())):
            say(line)
        return store

    def go(self) -> RunOutcome:
        """Runs to the end. Raises RunFailed where the device has no space left, which says how to go on."""
        try:
            return self._go()
        except OSError as error:
            if not is_full(error):
                raise
            place = error.filename or self.run_dir.path
            raise RunFailed(f"{place}: {reason(error)}; {self.store.last_good()}: make room and run again") from error

    def _go(self) -> RunOutcome:
        config, run_dir = self.config, self.run_dir
        described = {
            "platform": self.devices[0].platform,
            "kind": self.devices[0].device_kind,
            "count": len(self.devices),
        }
        resume_step = self.step if self.resuming else -1
        run_dir.record_start(config, described, self.step, checkpoint=self.step if self.resuming else None)
        self.store.tidy()
        with (  # however the run ends, everything opened is closed, the last opened first
            closing(self.store),
            open_record(config, run_dir, resume_step, total_steps=self.total_steps) as record,
            closing(build_pool(config, build_scorer(config))) as pool,
            ExitStack() as stack,
        ):
            pool.warm()
            loop = self._loop(pool, record, stack)
            self.stop.save_first(record.view.message)
            finished = loop.run()
            self.store.wait()
        report = write_report(run_dir.path)
        summary = {
            "run": str(run_dir.path),
            "steps": f"{loop.step} of {self.total_steps}" + ("" if finished else " (stopped; run again to go on)"),
            **carried(self.rule.name, loop.num_carried),
            "time": f"{time.monotonic() - self.began:.0f} s",
            "report": str(report),
        }
        record.view.final_table(summary)
        return RunOutcome(loop.step, finished, summary, report)

    def _loop(self, pool: RewardPool, record: RunRecord, stack: ExitStack) -> Loop:
        config, journal, timeline = self.config, record.journal, record.timeline
        assert journal is not None, "only a simulated run goes without"
        assert timeline is not None, "only a simulated run goes without"
        # with devices of the rollout's own an update may be going on: its weights are not those of the round
        weights = None if config.rollout.num_devices else lambda: self.trainer.params
        executor = build_executor(config, self.model, self.layout, weights)
        engine = build_engine(config, executor, self.tokenizer)
        mesh = self.layout.mesh
        layouts: LayoutSession | None = None
        if config.rollout.layout.adapts:
            kept = (journal, timeline, record.layouts)
            row_sizes = {tp: executor.row_sizes(tp) for tp in layout_degrees(config, mesh.size)}
            layouts = build_layouts(config, self.model, mesh, engine, row_sizes, *kept)
        overlap = stack.enter_context(closing(Overlap())) if config.rollout.num_devices else None
        backend = RolloutBackend(
            engine,
            executor,
            pool,
            text_by(self.tokenizer),
            lambda: self.trainer.params,
            journal=journal,
            timeline=timeline,
            on_progress=record.on_progress,
            interrupted=lambda: self.stop() and not (overlap is not None and overlap.busy),
            layouts=layouts,
        )

        def save(step: int, state: Mapping[str, Any]) -> None:
            if layouts is not None:
                state = {**state, "layouts": layouts.state_dict()}
            committed = self.store.latest_step()  # for sure only then: saving waits for the save before
            self.store.save(step, self.trainer.state(), HostState(*split_arrays(state)))
            if committed is not None:
                journal.cut(committed)

        loop = Loop(
            config,
            self.prompts,
            self.validation if config.trainer.test_freq or config.trainer.val_before_train else (),
            backend,
            self.trainer,
            timeline,
            Hooks(record.on_phase, record.on_step, record.on_eval, save, self.stop),
            rule=self.rule,
            stop_token_ids=stop_ids(self.tokenizer, self.model.eos_token_ids),
            total_steps=self.total_steps,
            num_devices=len(self.devices),
            together=overlap,
        )
        self._go_on(loop, layouts)
        if config.rollout.warmup and self.step < self.total_steps:
            with timeline.span("loop", "compile"):
                self._warm_up(backend, executor, record)
            others = [tp for tp in layout_degrees(config, mesh.size) if tp != executor.tp]
            if others:
                stack.enter_context(closing(executor.compile_ahead(others)))
        return loop

    def _restored(self) -> dict[str, Any]:
        """Brings the trainer to the checkpoint; returns the host's part of it."""
        state, host = self.store.restore(self.trainer.abstract_state(), self.step)
        self.trainer.load_state(state)
        return join_arrays(host.values, host.arrays)

    def _go_on(self, loop: Loop, layouts: LayoutSession | None) -> None:
        """Brings what is not the trainer's to the checkpoint, if there is one."""
        if self.host_state is None:
            return
        if layouts is not None:
            layouts.load_state_dict(self.host_state.get("layouts", {}))
        loop.load_host_state(self.host_state)

    def _warm_up(self, backend: RolloutBackend, executor: MeshExecutor, record: RunRecord) -> None:
        began = time.monotonic()

        def progress(done: int, total: int) -> None:
            record.beat()
            record.view.phase(f"compiling rollout programs {done}/{total}")

        backend.enter_rollout(self.step)
        count = executor.warm_up(progress)
        record.view.message(f"{count} rollout programs ready in {time.monotonic() - began:.0f} s")
