"""`jaxrl train`: a run in its directory, from the first step or from where it stopped."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.config.options import total_steps
from jaxrl.data.prompts import PromptSource, load_train, validation_prompts
from jaxrl.data.stops import stop_ids
from jaxrl.loop import Hooks, Loop
from jaxrl.record.journal import Journal
from jaxrl.record.layouts import FILE_NAME as LAYOUTS_FILE
from jaxrl.record.layouts import LayoutLog
from jaxrl.record.live import LiveView
from jaxrl.record.metrics import MetricsWriter
from jaxrl.record.run_dir import RunDir
from jaxrl.record.samples import SampleLog
from jaxrl.record.state import join_arrays, split_arrays
from jaxrl.record.timeline import Timeline
from jaxrl.record.watchdog import Watchdog
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
from jaxrl.runtime.layout_session import LayoutSession
from jaxrl.runtime.memory import layout_degrees
from jaxrl.runtime.overlap import Overlap
from jaxrl.runtime.profile import build_layouts
from jaxrl.runtime.rules import batch_rule, carried
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.train.checkpoint import Checkpointer, HostState, restore_params_only
from jaxrl.train.step import Trainer
from jaxrl.types import Group

_log = logging.getLogger(__name__)


class StopSignal:
    """SIGTERM and SIGINT ask for a stop: the run saves and ends. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.asked = False
        self._earlier: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._earlier[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@dataclass(slots=True)
class Outcome:
    """How a run ended: the last step, whether that was all of them, the summary shown, and the report."""

    step: int
    finished: bool
    summary: dict[str, Any]
    report: Path


def train(config: Config, say: Callable[[str], None] = print) -> Outcome:
    """Runs (or resumes) the training that `config` describes; raises ValueError for what a user can mend."""
    if not config.trainer.run_dir:
        raise ConfigError("trainer.run_dir is missing: give the folder that the run writes to and resumes from")
    run_dir = RunDir(config.trainer.run_dir)
    try:
        with StopSignal() as stop:
            return _Run(config, run_dir, stop, say).go()
    finally:
        run_dir.close()


@dataclass(slots=True)
class _Outputs:
    """Where what a run says of itself goes; the methods are hooks of the loop and the backend."""

    view: LiveView
    timeline: Timeline
    watchdog: Watchdog
    writer: MetricsWriter
    samples: SampleLog
    journal: Journal
    layouts: LayoutLog
    phase_began_s: float = field(default_factory=time.monotonic)
    evaluated: dict[str, float] = field(default_factory=dict)  # of the step that is running

    def on_progress(self, busy: int, rows: int, tokens: int, done: int, launched: int) -> None:
        self.watchdog.beat()
        seconds = max(time.monotonic() - self.phase_began_s, 1e-3)
        self.view.rollout(busy, rows, tokens / seconds, done, launched)

    def on_phase(self, step: int, name: str) -> None:
        self.phase_began_s = time.monotonic()
        self.watchdog.beat()
        self.view.phase(name)

    def on_step(self, step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        measured = measured | self.evaluated
        self.evaluated = {}
        self.writer.write(step, measured)
        self.samples.write(step, groups)
        self.view.step(step, measured)

    def on_eval(self, step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        if step == 0:
            self.writer.write(0, measured)
        else:
            self.evaluated = measured
        self.view.message(f"step {step}: held-out accuracy {measured['val/accuracy']:.3f} on {len(groups)} prompts")


class _Run:
    """A training run while it is being built and while it goes."""

    def __init__(self, config: Config, run_dir: RunDir, stop: StopSignal, say: Callable[[str], None]) -> None:
        self.config, self.run_dir, self.stop, self.say = config, run_dir, stop, say
        self.began = time.monotonic()
        self.rule = batch_rule(config)  # before anything that takes long: its settings may be refused
        run_dir.refuse_other_kind(simulated=False, option="trainer.run_dir")
        changes = run_dir.changes(config)
        self.devices = prepare_jax(config)
        own = config.rollout.num_devices
        self.mesh = make_mesh(self.devices[: len(self.devices) - own])  # of the trainer
        rollout_mesh = make_mesh(self.devices[-own:]) if own else self.mesh
        self.layout = Layout(rollout_mesh, config.rollout.tensor_model_parallel_size)
        self.tokenizer, self.model, params = load_tokenizer_and_model(config, self.mesh)
        problems = load_train(config)
        self.prompts = PromptSource(problems, self.tokenizer, config)
        self.validation = validation_prompts(config, self.tokenizer, problems)
        steps = total_steps(config, self.prompts.num_prompts)
        assert steps is not None
        self.total_steps = steps
        updates = steps * config.actor.ppo_epochs * (config.data.train_batch_size // config.mini_batch_prompts)
        if config.trainer.init_from:
            params = restore_params_only(config.trainer.init_from, abstract(params))
        trained = with_planned_remat(config, self.model, self.mesh.devices.ravel().tolist())
        self.trainer = Trainer(trained, self.model, params, self.mesh, total_updates=updates)
        del params
        self.store = Checkpointer(run_dir.checkpoints, max_to_keep=config.trainer.max_ckpt_to_keep)
        self.step = self.store.latest_step() or 0
        self.resuming = self.store.latest_step() is not None
        if self.resuming:
            self._say_resumed(changes)

    def _say_resumed(self, changes: list[str]) -> None:
        self.say(f"resuming {self.run_dir.path} after step {self.step} of {self.total_steps}")
        for change in changes:
            self.say(f"  changed since: {change}")

    def go(self) -> Outcome:
        config, run_dir = self.config, self.run_dir
        described = {
            "platform": self.devices[0].platform,
            "kind": self.devices[0].device_kind,
            "count": len(self.devices),
        }
        run_dir.record_start(config, described, self.step)
        resume_step = self.step if self.resuming else -1
        with contextlib.ExitStack() as stack:  # whatever ends the run: each thing opened is closed, the last first
            view = stack.enter_context(closing(LiveView(self.total_steps)))
            stack.enter_context(closing(self.store))
            timeline = stack.enter_context(closing(Timeline(run_dir.file("timeline.json"))))
            writer = MetricsWriter(
                run_dir.path,
                [name for name in config.trainer.logger if name != "console"],
                resume_step=resume_step,
                project=config.trainer.project_name,
                experiment=config.trainer.experiment_name,
            )
            stack.enter_context(closing(writer))
            samples = stack.enter_context(closing(SampleLog(run_dir.file("samples.jsonl"), last_step=resume_step)))
            journal = stack.enter_context(closing(Journal(run_dir.file("journal.jsonl"), self.step)))
            layouts = LayoutLog(run_dir.file(LAYOUTS_FILE), resume_step)
            pool = stack.enter_context(closing(build_pool(config, build_scorer(config))))
            watchdog = stack.enter_context(closing(Watchdog(timeline, config.trainer.hang_timeout_s, view.message)))
            pool.warm()
            outputs = _Outputs(view, timeline, watchdog, writer, samples, journal, layouts)
            loop = self._loop(pool, outputs, stack)
            finished = loop.run()
            self.store.wait()
            self.step = loop.step
        report = write_report(run_dir.path)
        summary = self._summary(finished, loop.num_carried, report)
        view.final_table(summary)
        return Outcome(self.step, finished, summary, report)

    def _loop(self, pool: RewardPool, outputs: _Outputs, stack: contextlib.ExitStack) -> Loop:
        config = self.config
        # with devices of the rollout's own an update may be going on: its weights are not those of the round
        weights = None if config.rollout.num_devices else lambda: self.trainer.params
        executor = build_executor(config, self.model, self.layout, weights)
        engine = build_engine(config, executor, self.tokenizer)
        mesh = self.layout.mesh
        layouts: LayoutSession | None = None
        if config.rollout.layout.adapts:
            kept = (outputs.journal, outputs.timeline, outputs.layouts)
            row_sizes = {tp: executor.row_sizes(tp) for tp in layout_degrees(config, mesh.size)}
            layouts = build_layouts(config, self.model, mesh, engine, row_sizes, *kept)
        overlap = stack.enter_context(closing(Overlap())) if config.rollout.num_devices else None
        backend = RolloutBackend(
            engine,
            executor,
            pool,
            text_by(self.tokenizer),
            lambda: self.trainer.params,
            journal=outputs.journal,
            timeline=outputs.timeline,
            on_progress=outputs.on_progress,
            interrupted=lambda: self.stop() and not (overlap is not None and overlap.busy),
            layouts=layouts,
        )

        def save(step: int, state: Mapping[str, Any]) -> None:
            if layouts is not None:
                state = {**state, "layouts": layouts.state_dict()}
            committed = self.store.latest_step()  # for sure only then: saving waits for the save before
            self.store.save(step, self.trainer.state(), HostState(*split_arrays(state)))
            if committed is not None:
                outputs.journal.cut(committed)

        loop = Loop(
            config,
            self.prompts,
            self.validation if config.trainer.test_freq or config.trainer.val_before_train else (),
            backend,
            self.trainer,
            outputs.timeline,
            Hooks(outputs.on_phase, outputs.on_step, outputs.on_eval, save, self.stop),
            rule=self.rule,
            stop_token_ids=stop_ids(self.tokenizer, self.model.eos_token_ids),
            total_steps=self.total_steps,
            num_devices=len(self.devices),
            together=overlap,
        )
        if self.resuming:
            state, host = self.store.restore(self.trainer.abstract_state())
            self.trainer.load_state(state)
            host_state = join_arrays(host.values, host.arrays)
            if layouts is not None:
                layouts.load_state_dict(host_state.get("layouts", {}))
            loop.load_host_state(host_state)
        if config.rollout.warmup and self.step < self.total_steps:
            self._warm_up(backend, executor, outputs)
            others = [tp for tp in layout_degrees(config, mesh.size) if tp != executor.tp]
            if others:
                stack.enter_context(closing(executor.compile_ahead(others)))
        return loop

    def _warm_up(self, backend: RolloutBackend, executor: MeshExecutor, outputs: _Outputs) -> None:
        began = time.monotonic()

        def progress(done: int, total: int) -> None:
            outputs.watchdog.beat()
            outputs.view.phase(f"compiling rollout programs {done}/{total}")

        with outputs.timeline.span("loop", "compile"):
            backend.enter_rollout(self.step)
            count = executor.warm_up(progress)
        outputs.view.message(f"{count} rollout programs ready in {time.monotonic() - began:.0f} s")

    def _summary(self, finished: bool, num_carried: int, report: Path) -> dict[str, Any]:
        return {
            "run": str(self.run_dir.path),
            "steps": f"{self.step} of {self.total_steps}" + ("" if finished else " (stopped; run again to go on)"),
            **carried(self.rule.name, num_carried),
            "time": f"{time.monotonic() - self.began:.0f} s",
            "report": str(report),
        }
