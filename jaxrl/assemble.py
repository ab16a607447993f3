"""Builds a run from its configuration: the one place where devices, files, processes and objects come together."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.backend import RolloutBackend, stop_string_check
from jaxrl.config import Config, ConfigError
from jaxrl.data import PromptSource, load_train, validation_prompts
from jaxrl.explain import Explanation, explain, total_steps
from jaxrl.journal import Journal
from jaxrl.layout_log import FILE_NAME as LAYOUTS_FILE
from jaxrl.layout_log import LayoutLog
from jaxrl.layout_options import devices_problem
from jaxrl.layout_session import LayoutSession
from jaxrl.layouts import build_layouts
from jaxrl.live import LiveView
from jaxrl.loop import Hooks, Loop
from jaxrl.memory_plan import layout_degrees, layout_sizes, plan_remat
from jaxrl.metrics import MetricsWriter
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of, load_model, resolve_path
from jaxrl.overlap import Overlap
from jaxrl.report import write_report
from jaxrl.rewards.pool import RewardPool, build_pool
from jaxrl.rewards.scorers import build_scorer
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig, LayoutSizes
from jaxrl.rules import batch_rule, carried
from jaxrl.run_dir import RunDir
from jaxrl.samples import SampleLog
from jaxrl.scheduling.batcher import BatcherConfig
from jaxrl.scheduling.engine import Engine
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.text import stop_ids
from jaxrl.timeline import Timeline
from jaxrl.tokenizer import Tokenizer
from jaxrl.train.checkpoint import Checkpointer, HostState, restore_params_only
from jaxrl.train.step import Trainer
from jaxrl.types import Group
from jaxrl.watchdog import Watchdog

_log = logging.getLogger(__name__)


def prepare_jax(config: Config) -> list[Any]:
    """Sets what must be set before the first computation; returns the devices of the run."""
    wide = "float64" in (config.rollout.dtype, config.actor.dtype, config.actor.param_dtype)
    if wide:
        jax.config.update("jax_enable_x64", True)
    if config.trainer.compilation_cache_dir:
        folder = Path(config.trainer.compilation_cache_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    devices = jax.devices()
    wanted = config.trainer.num_devices or len(devices)
    if wanted > len(devices):
        raise ConfigError(f"trainer.num_devices ({wanted}) must be at most the devices there are ({len(devices)})")
    tp, own = config.rollout.tensor_model_parallel_size, config.rollout.num_devices
    problem = devices_problem(own, wanted, tp, "the number of devices")
    if problem is not None:
        raise ConfigError(problem)
    return devices[:wanted]


def device_bytes(devices: Sequence[Any]) -> int | None:
    """Memory of one device; None where the backend does not say (a CPU's memory is the host's)."""
    stats = devices[0].memory_stats()
    return None if not stats else stats.get("bytes_limit")


def with_planned_remat(config: Config, model: ModelConfig, devices: Sequence[Any]) -> Config:
    """`config` with `actor.remat: auto` replaced by what the devices' memory allows."""
    remat = plan_remat(config, model, len(devices), device_bytes(devices), devices[0].platform)
    return dataclasses.replace(config, actor=dataclasses.replace(config.actor, remat=remat))


def load_tokenizer_and_model(config: Config, mesh: Mesh) -> tuple[Tokenizer, ModelConfig, Any]:
    """What `model.path` names, the weights placed as training has them."""
    path = resolve_path(config.model.path)
    seed = config.trainer.seed if config.model.random_init else None
    model, params = load_model(path, mesh, config.actor.param_dtype, random_init_seed=seed)
    return Tokenizer.from_path(path.removeprefix("random:")), model, params


def build_executor(
    config: Config, model: ModelConfig, layout: Layout, weights: Callable[[], Any] | None = None
) -> MeshExecutor:
    """The executor of `config.rollout`, its pools sized by `layout_sizes`; `weights` as `MeshExecutor` takes them."""
    rollout, val = config.rollout, config.rollout.val_kwargs
    memory = device_bytes(layout.mesh.devices.ravel().tolist())
    sizes = layout_sizes(config, model, layout.mesh.size, memory)
    truncates = [rollout.top_k > 0, rollout.top_p < 1, rollout.min_p > 0, val.top_k > 0, val.top_p < 1]
    return MeshExecutor(
        model,
        layout,
        ExecutorConfig(
            num_slots=sizes[layout.tp][0],
            num_blocks=sizes[layout.tp][1],
            block_size=rollout.block_size,
            max_length=config.max_model_length,
            max_prefill_tokens=rollout.max_num_batched_tokens,
            decode_steps=rollout.decode_steps,
            attention=rollout.attention,
            dtype=rollout.dtype,
            seed=config.trainer.seed,
            truncate=any(truncates),
            max_tp=max(sizes),
            layouts=tuple(LayoutSizes(tp, *own) for tp, own in sizes.items()),
        ),
        weights,
    )


def build_engine(config: Config, executor: MeshExecutor, tokenizer: Tokenizer) -> Engine:
    """The engine of `config.rollout` over an executor."""
    batcher = BatcherConfig(decode_steps=config.rollout.decode_steps, max_model_len=config.max_model_length)
    return Engine(executor, batcher, stop_check=stop_string_check(tokenizer))


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def split_arrays(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Nested state as JSON values, and its numpy arrays by dotted name."""
    values: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            values[key], inner = split_arrays(value, f"{prefix}{key}.")
            arrays |= inner
        elif isinstance(value, np.ndarray):
            arrays[prefix + key] = value
        else:
            values[key] = value
    return values, arrays


def join_arrays(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The reverse of `split_arrays`."""
    state = copy.deepcopy(dict(values))
    for name, array in arrays.items():
        *path, last = name.split(".")
        node = state
        for key in path:
            node = node[key]
        node[last] = array
    return state


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
            self.tokenizer,
            outputs.journal,
            outputs.timeline,
            weights=lambda: self.trainer.params,
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
            stop_token_ids=stop_ids(self.tokenizer, self.model),
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


def explain_config(config: Config, num_devices: int, memory_bytes: int | None) -> Explanation:
    """Derived sizes and the memory of both phases, without loading weights or data."""
    batch_rule(config)  # its settings may be refused
    devices = [] if num_devices else prepare_jax(config)
    model = config_of(resolve_path(config.model.path))
    memory = memory_bytes or (device_bytes(devices) if devices else None)
    platform = devices[0].platform if devices else "gpu"
    return explain(config, model, num_devices or len(devices), memory, platform=platform)
