"""`jaxrl train`: a run in its directory, from the first step or from where it stopped.

`jaxrl.commands.start` comes before it, and has the order in which a run is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl.config import Config, ConfigError, differences
from jaxrl.config.options import total_steps
from jaxrl.data.prompts import Problem, PromptSource, validation_prompts
from jaxrl.data.stops import stop_ids
from jaxrl.loop import Hooks, Job, Loop
from jaxrl.mechanisms.parts import RunParts
from jaxrl.mechanisms.table import is_timeless, notes, of_run, page_parts, reads_profile, refuse_devices, refuse_unread
from jaxrl.mechanisms.turns.pool import EnvironmentPool
from jaxrl.record.failures import summary_of
from jaxrl.record.files import reason, way_on
from jaxrl.record.integrity import lost_lines, missing_checkpoint, missing_journal
from jaxrl.record.journal import Journal
from jaxrl.record.progress import StartupProgress
from jaxrl.record.run_dir import FollowerRunDir, RunDir, recorded_start
from jaxrl.record.run_record import RunOutcome, RunRecord, open_record
from jaxrl.record.state import join_arrays, split_arrays
from jaxrl.record.watchdog import Watchdog
from jaxrl.report.page import write_report
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.reward_metrics import RewardMetrics
from jaxrl.rollout.profiles import checked_profile
from jaxrl.runtime.backend import RolloutBackend, Surroundings, text_by
from jaxrl.runtime.beginnings import refuse_other_data, refuse_other_init
from jaxrl.runtime.build import (
    build_engines,
    build_workers,
    read_tokenizer_and_model,
    refuse_too_large,
    retuning_note,
    row_sizes,
    share_notes,
    use_compilation_cache,
    with_planned_update,
)
from jaxrl.runtime.degree import with_degree
from jaxrl.runtime.devices import prepare_hosts
from jaxrl.runtime.hosts.process_group import ProcessGroup
from jaxrl.runtime.memory import layout_degrees, layout_sizes
from jaxrl.runtime.rules import carried
from jaxrl.runtime.stop import Stop
from jaxrl.runtime.weights import load_weights, refuse_other_model
from jaxrl.scheduling.rounds.batches import BatchRule
from jaxrl.sharding.compiled import CompiledPrograms
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh, platform_of, submeshes
from jaxrl.train.checkpoint import Checkpointer, HostState, holds_critic
from jaxrl.train.critic import Critic
from jaxrl.train.learner import Learner
from jaxrl.train.learning import Models
from jaxrl.train.step import Trainer
from jaxrl.train.steps import Choice, choose, whole_step
from jaxrl.types import Group, RunFailed


@dataclass(frozen=True, slots=True)
class Start:
    """What `jaxrl.commands.start` has found to be right; `say` shows a line, `began_s` is of `time.monotonic`."""

    config: Config
    rule: BatchRule
    run_dir: RunDir | FollowerRunDir
    earlier: Config | None
    problems: list[Problem]
    held_out: Sequence[Problem]
    pool: RewardPool
    environments: EnvironmentPool | None
    stop: Stop
    watchdog: Watchdog
    say: Callable[[str], None]
    began_s: float
    joined: ProcessGroup
    stages: StartupProgress


class Run:
    """A training run while it is being built and while it goes."""

    def __init__(self, start: Start) -> None:
        self.run_dir, self.rule, self.pool, self.stop = start.run_dir, start.rule, start.pool, start.stop
        self.environments = start.environments
        self.began_s, self.say, self.watchdog, self.joined = start.began_s, start.say, start.watchdog, start.joined
        self.stages = start.stages
        self.beside: list[CompiledPrograms] = []  # whose programs are compiled beside the first step
        self.critic: Critic | None = None
        self.said: list[str] = []  # shown once nothing is refused any more
        self.config = start.config
        self.config = config = self._devices(start)
        self.changes = [] if start.earlier is None else differences(start.earlier, config)
        self.tokenizer, self.model = read_tokenizer_and_model(config)
        refuse_too_large(config, self.model, len(self.devices), self.place.memory)
        if config.trainer.init_from and start.earlier is None:
            refuse_other_init(config, self.model, self.mesh)
        self._data(start)
        refuse_other_data(self.run_dir, self.prompts, config)
        mesh = self.rollout_mesh
        self.profile = checked_profile(config, self.model, mesh) if reads_profile(config) else None
        self.said += [*notes(config), *filter(None, [self.prompts.repeats()])]
        layout_sizes(config, self.model, mesh.size, self.place.memory.reported)
        trained = with_planned_update(config, self.model, self.mesh.size, self.place.memory)
        self._checkpoints()
        refuse_unread(config)
        self.watchdog.beat("starting the reward workers")
        self.pool.warm()
        # of several processes each would have to end alike: those go on to the loop, which has no step to run
        self.is_over = self.resuming and self.step >= self.total_steps and config.hosts.num == 1
        if self.is_over:
            return
        self.watchdog.beat("loading the weights")
        self._weights(trained)
        if self.resuming:
            self.watchdog.beat("restoring the checkpoint")
        self.host_state = self._restored() if self.resuming else None

    def _checkpoints(self) -> None:
        """Finds what the run goes on or begins from. That reads all of a checkpoint, which may take minutes: after
        everything that a look at the options could have told."""
        config = self.config
        self.watchdog.beat("comparing the checkpoint with its checksums")
        self.store = self._find_checkpoint()
        latest = self.store.latest_step()
        self.step, self.resuming = latest or 0, latest is not None
        self.watchdog.saved_step = latest
        if self.run_dir.leads:
            self.said += lost_lines(self.run_dir, self.step) if self.resuming else []
            self.said += [gone] if (gone := missing_journal(self.run_dir)) is not None else []
        self.init_from = None
        # a run that goes on has its weights; only the reference is always that of the beginning
        if config.trainer.init_from and (config.needs_ref or not self.resuming):
            look = partial(whole_step, config.trainer.init_from, say=self.said.append, progress=self.watchdog.beat)
            self.init_from = Path(self.joined.first("the checkpoint to begin from", lambda: str(look())))
        for place in (self.init_from, self.run_dir.file(f"checkpoints/{self.step}") if self.resuming else None):
            if place is not None:
                refuse_other_model(place, config, self.model, self.mesh)
        if self.resuming and holds_critic(place := self.run_dir.file(f"checkpoints/{self.step}")) != config.has_critic:
            found, needed = ("no", "needs one") if config.has_critic else ("a", "has none")
            raise ConfigError(
                f"checkpoint {place} holds {found} critic, and "
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} {needed}: go on with the run's estimator, "
                "or begin a run from its parameters (trainer.init_from)"
            )

    def _devices(self, start: Start) -> Config:
        """The meshes; returns the configuration with the degree that they allow."""
        config = start.config
        self.place = place = self.joined.compare(config, prepare_hosts(config))
        self.devices = place.devices
        self.mesh, rollout_mesh = place.mesh, place.local_mesh  # of the trainer over all hosts; of the rollout on this
        if own := config.rollout.num_devices:
            self.mesh, rollout_mesh = make_mesh(self.devices[:-own]), make_mesh(self.devices[-own:])
        config = with_degree(config, rollout_mesh, self.said.append, start.earlier, place.memory)
        self.said += share_notes(config, rollout_mesh.devices.ravel().tolist())
        self.rollout_mesh = rollout_mesh
        Layout(submeshes(rollout_mesh, config.workers_per_host)[0], config.rollout.tp)  # refused before all else
        refuse_devices(config, len(self.devices), len({device.process_index for device in self.devices}))
        return config

    def _data(self, start: Start) -> None:
        config = self.config
        self.prompts = PromptSource(start.problems, self.tokenizer, config, self.environments)
        self.validation = validation_prompts(config, self.tokenizer, start.held_out, self.environments)
        steps = total_steps(config, self.prompts.num_prompts)
        assert steps is not None
        self.total_steps = steps

    def _weights(self, trained: Config) -> None:
        config = self.config
        params = load_weights(config, self.model, self.mesh, self.init_from)
        given = trained, self.model, params, self.mesh
        told: Any = {"on_progress": self.watchdog.beat, "meet": self.joined.meet}
        updates = (self.total_steps - config.critic_warmup) * config.updates_per_step
        self.trainer = Trainer(*given, total_updates=updates, **told)
        self.trainer.programs.dispatched = self.joined.dispatched
        if config.has_critic:
            updates = self.total_steps * config.critic_updates_per_step
            self.critic = Critic(*given, total_updates=updates, **told)
            self.critic.programs.dispatched = self.joined.dispatched
        if note := self.trainer.programs.packed_attention.note:
            self.said.append(note)

    def _find_checkpoint(self) -> Checkpointer:
        """The run's checkpoints, of which the newest whole one is known. Nothing is written."""
        store = Checkpointer(
            self.run_dir.file("checkpoints"),
            max_to_keep=self.config.trainer.max_ckpt_to_keep,
            on_commit=self._committed,
            progress=self.watchdog.beat,
            find=self._choose,
        )
        chosen = store.chosen
        newest = None if chosen is None else max([chosen.step, *chosen.faults])
        missing = missing_checkpoint(self.run_dir, newest)
        self.said += [*(() if missing is None else (missing,)), *(() if chosen is None else chosen.notes())]
        return store

    def _choose(self, folder: Path, progress: Callable[[], None]) -> Choice | None:
        """`choose`, with the same result in every process: one of them reads all of the checkpoint."""

        def look() -> str:
            found = choose(folder, progress)
            return "" if found is None else found.to_json()

        told = self.joined.first("the checkpoint to go on from", look)
        return Choice.from_json(told) if told else None

    def go(self) -> RunOutcome:
        """Runs to the end.

        Raises:
          RunFailed: the system refused a file or memory, with how to go on.
        """
        try:
            return self._go()
        except RunFailed:
            with suppress(OSError, ValueError):  # the cause is more than that its page cannot be written
                self.run_dir.report(_write_page)
            raise
        except OSError as error:
            place = error.filename or self.run_dir.path
            raise RunFailed(f"{place}: {reason(error)}; {self.store.last_good()}: {way_on(error)}") from error
        except jax.errors.JaxRuntimeError as error:
            said = str(error).partition("\n")[0]
            if not said.startswith("RESOURCE_EXHAUSTED"):
                raise
            raise RunFailed(
                f"the memory of the device is full ({self.devices[0].device_kind}; {said}); {self.store.last_good()}: "
                "lower rollout.memory_fraction or actor.ppo_max_token_len_per_gpu, or set actor.remat=full, and run "
                "again"
            ) from error

    def _over(self) -> RunOutcome:
        """The run has had all of its steps: no weight is loaded, and only its page is written anew."""
        option = "trainer.total_training_steps" if self.config.trainer.total_training_steps else "trainer.total_epochs"
        with closing(self.store):
            self.stages.close()
            report = self.run_dir.report(_write_page)
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
            opened = open_record(
                self.config,
                self.run_dir,
                resume_step,
                total_steps=self.total_steps,
                watchdog=self.watchdog,
                tell=self.joined.tell,
                pieces_of=self.tokenizer.pieces,
            )
            self.record = record = stack.enter_context(opened)
            self.watchdog.beat("building the engine")
            loop, backend = self._loop(record, stack)
            if self.host_state is not None:
                loop.load_host_state(self.host_state)
            self._begin(record)
            self.stages.close()
            self._warm_up(backend, record, stack)
            self.stop.save_first(record.view.message)
            finished = loop.run()
            self.watchdog.beat("waiting for the last checkpoint")
            with self.joined.waiting("the last checkpoint"):
                self.store.wait()
            self.watchdog.beat("closing the run's files")
        self.watchdog.beat("writing the report")
        report = self.run_dir.report(_write_page)
        summary = {
            "run": str(self.run_dir.path),
            "steps": f"{loop.step} of {self.total_steps}" + ("" if finished else " (stopped; run again to go on)"),
            **(summary_of(self.run_dir.path) if self.run_dir.leads else {}),
            **carried(self.rule.name, loop.num_carried),
            "time": f"{time.monotonic() - self.began_s:.0f} s",
            "report": str(report),
        }
        record.view.final_table(summary)
        return RunOutcome(loop.step, finished, summary, report)

    def _begin(self, record: RunRecord) -> None:
        """The first writes: nothing about the start is refused any more."""
        described = {
            "platform": self.devices[0].platform,
            "kind": self.devices[0].device_kind,
            "count": len(self.devices),
        }
        self.watchdog.beat("opening what trainer.logger names")
        record.open_sinks()  # the last that can fail; a signal does not wait for the network
        cache_before = (recorded_start(self.run_dir.path) or {}).get("compilation_cache")
        with self.stop.held():
            newest = self.step if self.resuming else None
            self.run_dir.record_start(self.config, described, self.step, checkpoint=newest)
            self.store.tidy()
            record.begin()
            self.run_dir.record_checkpoint(newest, record.written())
            cache = use_compilation_cache(self.config)
            note = retuning_note(cache_before, cache, platform_of(self.devices[0])) if self.resuming else None
            self.run_dir.record_cache(cache, note)
        self.said += [] if note is None else [note]
        if self.resuming:
            self.said += self.run_dir.resuming(self.changes, self.step, self.total_steps)
        for line in self.said:
            self.say(line)

    def _loop(self, record: RunRecord, stack: ExitStack) -> tuple[Loop, RolloutBackend]:
        config, journal, timeline = self.config, record.journal, record.timeline
        assert journal is not None, "only a simulated run goes without"
        assert timeline is not None, "only a simulated run goes without"
        # with devices of the rollout's own an update may be going on: its weights are not those of the round
        weights = None if config.rollout.num_devices else lambda: self.trainer.params
        workers = build_workers(config, self.model, self.rollout_mesh, weights, self.place, self.joined.meet)
        self.workers = workers
        engines = build_engines(config, workers, self.tokenizer, self.profile, self.place.process)
        parts = self.parts = RunParts(
            config,
            self.place.process,
            self.rollout_mesh,
            engines,
            workers,
            self.trainer,
            self.tokenizer,
            self.pool,
            self.environments,
            journal,
            timeline,
            record.layouts,
            self.profile,
            row_sizes(config, workers),
            is_timeless(config),
            record.view.waiting,
            self.watchdog.beat,
            stack,
        )
        mechanisms = of_run(parts)
        self.said += parts.notes
        backend = RolloutBackend(
            engines,
            workers,
            self.pool,
            text_by(self.tokenizer),
            lambda: self.trainer.params,
            [*mechanisms, *self.joined.mechanisms],
            Surroundings(
                journal=journal,
                timeline=timeline,
                on_progress=record.on_progress,
                beat=self.watchdog.beat,
                interrupted=self.joined.is_asked,
                tally=RewardMetrics.configured(config),
            ),
            self.joined.hosts,
        )
        job = Job(
            self.prompts,
            self.validation if config.trainer.test_freq or config.trainer.val_before_train else (),
            self.total_steps,
            stop_ids(self.tokenizer, self.model.eos_token_ids),
            len(self.devices),
        )
        models = Models(self.trainer, self.critic)
        hooks = self._hooks(record, journal)
        return Loop(config, job, self.rule, backend, models, timeline, hooks, mechanisms), backend

    def _hooks(self, record: RunRecord, journal: Journal) -> Hooks:
        def on_phase(step: int, name: str) -> None:
            record.on_phase(step, name)
            self.joined.on_phase(step, name)

        stepped, save = partial(self._stepped, record), partial(self._save, journal)
        return Hooks(on_phase, stepped, record.on_eval, save, self.joined.stops, self.watchdog.beat)

    def _save(self, journal: Journal, step: int, state: Mapping[str, Any]) -> None:
        committed = self.store.latest_step()  # for sure only then: saving waits for the save before
        self.store.save(step, self._state(Learner.state), HostState(*split_arrays(state)))
        if committed is not None:
            journal.cut(committed)

    def _stepped(self, record: RunRecord, step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        record.on_step(step, {**measured, **self.joined.take_metrics()}, groups)
        while self.beside and step < self.total_steps and not self.stop():
            record.view.phase("compiling programs")  # what is left when a step has ended would only slow the next one
            self.beside.pop().complete(self.watchdog.beat)

    def _committed(self, step: int) -> None:
        """A checkpoint is complete; in the thread that wrote it."""
        self.run_dir.record_checkpoint(step, self.record.written())
        self.watchdog.saved_step = step

    def _state(self, of: Callable[[Learner], dict[str, Any]]) -> dict[str, Any]:
        """The policy's, and the critic's under its name."""
        return of(self.trainer) | ({} if self.critic is None else {"critic": of(self.critic)})

    def _restored(self) -> dict[str, Any]:
        """Brings the trainer to the checkpoint; returns the host's part of it."""
        self.joined.enter(f"the restore of step {self.step}")
        state, host = self.store.restore(self._state(Learner.abstract_state), self.step)
        self.trainer.load_state(state)
        if self.critic is not None:
            self.critic.load_state(state["critic"])
        self.joined.leave()
        return join_arrays(host.values, host.arrays)

    def _warm_up(self, backend: RolloutBackend, record: RunRecord, stack: ExitStack) -> None:
        """Compiles the rollout's programs, and begins with the update's and those of other layouts.

        For GPUs the update's are compiled here as well: compiling tries kernels on the device and takes the fastest,
        and a rollout beside it would disturb what is measured. On a CPU nothing is measured, and the first rollout
        does not wait. The programs of other layouts, which may be many and may never run, are compiled beside it
        everywhere.
        """
        workers, update = self.workers, [self.trainer.programs, *self.parts.update_programs]
        update += [] if self.critic is None else [self.critic.programs]
        if not self.config.rollout.warmup or self.step >= self.total_steps:
            return
        began = time.monotonic()
        rolling = self.parts.rollout_programs
        now, later = (rolling, update) if self.devices[0].platform == "cpu" else ([*update, *rolling], [])

        def progress(done: int, total: int) -> None:
            record.beat()
            record.view.phase(f"compiling programs {done}/{total}")

        assert record.timeline is not None, "only a simulated run goes without"
        with record.timeline.span("loop", "compile"):
            self.joined.enter("the first weights")
            backend.enter_rollout(self.step)
            self.joined.leave()
            count = workers.warm_up(progress, now)
        record.view.message(f"{count} programs ready in {time.monotonic() - began:.0f} s")
        ahead = workers.compile_ahead(layout_degrees(self.config, self.rollout_mesh.size), later)
        if ahead is not None:
            stack.enter_context(closing(ahead))
        self.beside = later


def _write_page(folder: Path) -> Path:
    return write_report(folder, parts=page_parts())
