"""`jaxrl train`: a run in its directory, from the first step or from where it stopped.

`jaxrl.commands.start` comes before it, and has the order in which a run is built.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from jaxrl.commands.opening import Opened
from jaxrl.commands.run import TrainingRun
from jaxrl.config import Config, differences
from jaxrl.config.options import total_steps
from jaxrl.config.rollout_correction import uncorrected
from jaxrl.data.prompts import Problem, PromptSource, validation_prompts
from jaxrl.data.stops import stop_ids
from jaxrl.loop import Loop
from jaxrl.mechanisms import enabled, refuse_devices
from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.build import read_judge
from jaxrl.mechanisms.turns.pool import EnvironmentPool
from jaxrl.record.journal import Journal
from jaxrl.record.run_record import RunRecord
from jaxrl.record.state import split_arrays
from jaxrl.rewards.pool import RewardPool
from jaxrl.runtime.arrival import ArrivalOrder
from jaxrl.runtime.beginnings import refuse_other_data
from jaxrl.runtime.build import (
    build_engines,
    read_tokenizer_and_model,
    refuse_too_large,
    with_planned_update,
)
from jaxrl.runtime.host import LoadRequest
from jaxrl.runtime.memory import layout_degrees, layout_sizes
from jaxrl.runtime.mesh_machine import MeshMachine
from jaxrl.runtime.rules import carried
from jaxrl.runtime.run import Run
from jaxrl.runtime.teacher import endpoint_teacher, read_teacher, refuse_context
from jaxrl.runtime.teacher_endpoint import EndpointTeacher
from jaxrl.scheduling.rounds.batches import BatchRule
from jaxrl.sharding.compiled import CompiledPrograms
from jaxrl.train.checkpoint import HostState
from jaxrl.train.training_step import Models
from jaxrl.types import Group


class RolloutTraining(TrainingRun):
    """A training run while it is being built and while it goes.

    Args:
      opened: its folder.
      rule, problems, held_out, pool, environments: what `jaxrl.commands.start` has found to be right.
    """

    def __init__(
        self,
        opened: Opened,
        rule: BatchRule,
        problems: Sequence[Problem],
        held_out: Sequence[Problem],
        pool: RewardPool,
        environments: EnvironmentPool | None,
    ) -> None:
        super().__init__(opened)
        self.rule, self.pool, self.environments = rule, pool, environments
        self.beside: list[CompiledPrograms] = []  # whose programs are compiled beside the first step
        self.asked: EndpointTeacher | None = None
        self.config = config = self._place_rollout()
        self.changes = [] if self.earlier is None else differences(self.earlier, config)
        self.tokenizer, self.model = read_tokenizer_and_model(config)
        self.host.read_model(self.model)
        memory = self.devices.memory
        self.teacher_model = read_teacher(config, self.tokenizer, self.model)
        refuse_too_large(config, self.model, self.devices.count, memory)
        if config.trainer.init_from and self.earlier is None:
            self.host.refuse_other_init()
        self._data(problems, held_out)
        refuse_other_data(self.run_dir, self.prompts, config)
        self.profile = (
            self.host.checked_profile() if any(each.reads_profile(config) for each in enabled(config)) else None
        )
        self.said += filter(None, (each.note(config) for each in enabled(config)))
        self.said += [*filter(None, [uncorrected(config), self.prompts.repeats()])]
        layout_sizes(config, self.model, self.num_rollout_devices, memory.reported)
        trained = with_planned_update(config, self.model, self.num_trainer_devices, memory)
        self.find_checkpoints()
        if Judge.is_on(config):
            read_judge(config)
        self.watchdog.beat("starting the reward workers")
        self.pool.warm()
        self.is_over = self.resuming and self.step >= self.total_steps
        if self.is_over:
            return
        self.watchdog.beat("loading the weights")
        self._weights(trained)
        if self.resuming:
            self.watchdog.beat("restoring the checkpoint")
        self.host_state = self.restored() if self.resuming else None

    def _place_rollout(self) -> Config:
        """Chooses devices; returns the configuration with the degree that they allow."""
        config, notes, self.num_trainer_devices, self.num_rollout_devices = self.host.place_rollout(self.earlier)
        self.said += notes
        refuse_devices(config, self.devices.count)
        return config

    def _data(self, problems: Sequence[Problem], held_out: Sequence[Problem]) -> None:
        config = self.config
        refuse_context(config, problems)
        self.prompts = PromptSource(problems, self.tokenizer, config, self.environments)
        self.validation = validation_prompts(config, self.tokenizer, held_out, self.environments)
        steps = total_steps(config, self.prompts.num_prompts)
        assert steps is not None
        self.total_steps = steps

    def _weights(self, trained: Config) -> None:
        config = self.config
        self.asked = endpoint_teacher(config, self.model, self.tokenizer, self.watchdog.beat)
        updates = (self.total_steps - config.critic_warmup) * config.updates_per_step
        critic_updates = self.total_steps * config.critic_updates_per_step if config.has_critic else 0
        asked = LoadRequest(trained, self.init_from, updates, critic_updates, self.teacher_model)
        if note := self.host.load(asked, self.tokenizer):
            self.said.append(note)

    def train(self, record: RunRecord, stack: ExitStack) -> Mapping[str, str]:
        self.watchdog.beat("building the engine")
        loop = self._loop(record, stack)
        if self.host_state is not None:
            loop.load_host_state(self.host_state)
        self.begin(record)
        self._warm_up(loop, record, stack)
        self.stop.save_first(record.view.message)
        loop.run()
        self.step = loop.step
        return carried(self.rule.name, loop.num_carried)

    def _loop(self, record: RunRecord, stack: ExitStack) -> Loop:
        config, journal, timeline = self.config, record.journal, record.timeline
        assert journal is not None, "only a simulated run goes without"
        assert timeline is not None, "only a simulated run goes without"
        host = self.host
        workers = self.workers = host.build_workers()
        arrival = ArrivalOrder(workers.first_done, journal) if config.rollout.order == "arrival" else None
        here: Any = host  # mechanisms that need devices of this process are refused where it has none
        devices = here.rollout_mesh, workers, stack, here.trainer, here.teacher
        self.machine = machine = MeshMachine(config, *devices, self.profile, timeline)
        run = Run(
            config=config,
            workers=build_engines(config, workers, self.tokenizer, self.profile, arrival),
            executors=workers,
            machine=machine,
            weights=lambda: host.params,
            scoring=self.pool,
            text_of=lambda sample: self.tokenizer.decode(sample.token_ids.tolist()),
            timeline=timeline,
            rule=self.rule,
            models=Models(host.trainer, host.critic, host.teacher or self.asked),
            prompts=self.prompts,
            validation=self.validation if config.trainer.test_freq or config.trainer.val_before_train else (),
            total_steps=self.total_steps,
            stop_token_ids=stop_ids(self.tokenizer, self.model.eos_token_ids),
            num_devices=self.devices.count,
            conversation=None
            if self.environments is None
            else self.environments.conversation(self.tokenizer, self.said),
            journal=journal,
            layout_log=record.layouts,
            on_phase=record.on_phase,
            on_step=partial(self._stepped, record),
            on_eval=record.on_eval,
            on_progress=record.on_progress,
            on_waiting=record.view.waiting,
            save=partial(self._save, journal),
            stop=self.stop,
            beat=self.watchdog.beat,
            mechanisms=() if arrival is None else (arrival,),
        )
        return run.loop()

    def _save(self, journal: Journal, step: int, state: Mapping[str, Any]) -> None:
        committed = self.store.latest_step()  # for sure only then: saving waits for the save before
        self.save(step, HostState(*split_arrays(state)))
        if committed is not None:
            journal.cut(committed)

    def _stepped(self, record: RunRecord, step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        record.on_step(step, measured, groups)
        while self.beside and step < self.total_steps and not self.stop():
            record.view.phase("compiling programs")  # what is left when a step has ended would only slow the next one
            self.beside.pop().complete(self.watchdog.beat)

    def _warm_up(self, loop: Loop, record: RunRecord, stack: ExitStack) -> None:
        """Compiles the rollout's programs, and begins with the update's and those of other layouts.

        For GPUs the update's are compiled here as well: compiling tries kernels on the device and takes the fastest,
        and a rollout beside it would disturb what is measured. On a CPU nothing is measured, and the first rollout
        does not wait. The programs of other layouts, which may be many and may never run, are compiled beside it
        everywhere.
        """
        programs = [each.programs for each in self.host.models]
        workers, update = self.workers, [*programs[:1], *self.machine.update_programs, *programs[1:]]
        if not self.config.rollout.warmup or self.step >= self.total_steps:
            return
        began = time.monotonic()
        rolling = self.machine.rollout_programs
        now, later = (rolling, update) if self.devices.backend == "cpu" else ([*update, *rolling], [])

        def progress(done: int, total: int) -> None:
            record.beat()
            record.view.phase(f"compiling programs {done}/{total}")

        assert record.timeline is not None, "only a simulated run goes without"
        with record.timeline.span("loop", "compile"):
            loop.backend.enter_rollout(self.step)
            count = workers.warm_up(progress, now)
        record.view.message(f"{count} programs ready in {time.monotonic() - began:.0f} s")
        ahead = workers.compile_ahead(layout_degrees(self.config, self.num_rollout_devices), later)
        if ahead is not None:
            stack.enter_context(closing(ahead))
        self.beside = later
