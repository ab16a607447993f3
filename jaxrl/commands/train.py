"""`jaxrl train`: from a configuration to the loop, in the order in which a run is put together.

What can be refused at once comes first, before jax is loaded, and nothing is written before all is known to fit. What a
run has in common with one that learns from files is in `jaxrl.run.training`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any

from jaxrl.config import Config, differences
from jaxrl.config.algorithm import uncorrected
from jaxrl.config.domains import domains
from jaxrl.config.options import total_steps
from jaxrl.data.problems import Problem
from jaxrl.data.prompts import PromptSource, load_train, load_validation, refuse_sources, validation_prompts
from jaxrl.data.stops import stop_ids
from jaxrl.mechanisms import batch_rule, enabled, refuse_devices
from jaxrl.mechanisms.judge import Judge
from jaxrl.record.run_record import RunOutcome
from jaxrl.rewards.domains import build_scorer, refuse_tests
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.reward_pool import RewardPool, build_pool
from jaxrl.run.run import Run, carried
from jaxrl.run.stop import Stop
from jaxrl.run.training import Training, run_training
from jaxrl.training.training_step import Models
from jaxrl.types import Group, Prompt, Sample, SampleKey

if TYPE_CHECKING:
    from jaxrl.loop import Loop
    from jaxrl.mechanisms.turns.pool import EnvironmentPool
    from jaxrl.run.mesh_machine import MeshMachine
    from jaxrl.run.teacher_endpoint import EndpointTeacher
    from jaxrl.scheduling.layouts.latency_profile import Profile
    from jaxrl.sharding.compiled import CompiledPrograms


def train(
    config: Config,
    say: Callable[[str], None] = print,
    stop: Stop | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> RunOutcome:
    """Runs (or resumes) the training that `config` describes; arguments and errors are those of `run_training`."""
    batch_rule(config)  # refuses settings, before the folder is touched
    return run_training("train", config, _start, say, stop, progress)


def _start(start: Training) -> RunOutcome:
    from jaxrl.run.build import read_tokenizer_and_model, refuse_too_large, with_planned_update
    from jaxrl.run.memory import layout_sizes

    environments = _environments(start)
    problems, held_out = _problems(start, environments)
    pool = _rewards(start, [*problems, *held_out])
    start.beat("looking for devices, reading tokenizer and model")
    start.open_devices()
    host, memory, count = start.host, start.devices.memory, start.devices.count
    config, notes, training_devices, rollout_devices = host.place_rollout(start.earlier)
    start.config, start.said = config, [*start.said, *notes]
    refuse_devices(config, count)
    start.changes = [] if start.earlier is None else differences(start.earlier, config)
    start.tokenizer, start.model = read_tokenizer_and_model(config)
    host.read_model(start.model)
    teacher = None
    if config.algorithm.teacher.path:
        from jaxrl.run.teacher import read_teacher

        teacher = read_teacher(config, start.tokenizer, start.model)
    refuse_too_large(config, start.model, count, memory)
    prompts, validation = _prompts(start, problems, held_out, environments)
    profile = host.checked_profile() if any(each.reads_profile(config) for each in enabled(config)) else None
    start.said += filter(None, [*(each.note(config) for each in enabled(config)), uncorrected(config)])
    layout_sizes(config, start.model, rollout_devices, memory.reported)  # refuses pools that are too small
    trained = with_planned_update(config, start.model, training_devices, memory)
    start.find_checkpoints(needs_ref=config.needs_ref, needs_critic=config.has_critic)
    if Judge.is_on(config):
        from jaxrl.mechanisms.judge.device import read_judge

        read_judge(config)
    start.beat("starting the reward workers")
    pool.warm()
    asked, state = None, None
    if not start.is_complete:
        asked = _load(start, trained, teacher)
        state = start.restored()
    run = Run(
        config=config,
        weights=lambda: host.params,
        scoring=pool,
        text_of=lambda sample: start.tokenizer.decode(sample.token_ids.tolist()),
        rule=batch_rule(config),
        prompts=prompts,
        validation=validation if config.trainer.test_freq or config.trainer.val_before_train else (),
        total_steps=start.total_steps,
        stop_token_ids=stop_ids(start.tokenizer, start.model.eos_token_ids),
        num_devices=count,
        stop=start.stop,
        beat=start.beat,
    )
    return start.go(partial(_train, start, run, environments, profile, asked, rollout_devices, state))


# -- before jax is loaded ----------------------------------------------------------------------------------------------


def _environments(start: Training) -> EnvironmentPool | None:
    """The processes of the run's environments, which begin to start."""
    if not start.config.environment.is_on:
        return None
    from jaxrl.mechanisms.turns.pool import EnvironmentPool

    pool = EnvironmentPool(start.config, log=start.run_dir.early_file("environments.log"))
    start.beat("starting the environments")
    return start.stack.enter_context(closing(pool))


def _problems(start: Training, environments: EnvironmentPool | None) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Training and held-out problems. Raises ValueError for data that the reward could not score for any response."""
    config = start.config
    start.beat("reading the data")
    problems = load_train(config, environments)
    refuse_sources(config, problems)
    held_out = load_validation(config, problems, environments)
    nothing = replace(Sample.empty(SampleKey(0, 0, 0)), finish_reason="stop")

    def request(of: Problem) -> ScoreRequest:
        prompt = Prompt(0, of.index, (), of.question, of.source, of.answer, of.extra, of.question)
        return ScoreRequest.of(prompt, nothing)

    if any(domain.kind == "code" for domain in domains(config.reward).values()):
        for problem in chain(problems, held_out):
            refuse_tests(config, problem.where, request(problem))
    if "judge" in config.reward.kinds:
        from jaxrl.mechanisms.judge.verdicts import refuse_fields

        refuse_fields(config, map(request, chain(problems, held_out)))
    return problems, held_out


def _rewards(start: Training, problems: Sequence[Problem]) -> RewardPool:
    start.beat("reading the reward function")
    log = start.run_dir.early_file("rewards.log")  # a reward file may print while it is imported
    rows = (each.extra if each.answer is None else {*each.extra, "answer"} for each in problems)
    scorer = build_scorer(start.config, rows)
    if path := start.config.reward.path:
        from jaxrl.config.functions import read_user_file

        start.reward_file = sha256(read_user_file("reward.path", path).text.encode()).hexdigest()
    pool = start.stack.enter_context(closing(build_pool(start.config, scorer, log=log)))
    if start.config.reward.judge.endpoint:
        from jaxrl.mechanisms.judge.endpoint import join_endpoint

        join_endpoint(start.config, pool)
    return pool


# -- data and weights --------------------------------------------------------------------------------------------------


def _prompts(
    start: Training, problems: Sequence[Problem], held_out: Sequence[Problem], environments: EnvironmentPool | None
) -> tuple[PromptSource, list[Prompt]]:
    """Prompts to train on, and held-out ones; sets `total_steps`."""
    config = start.config
    if config.has_teacher:
        from jaxrl.run.teacher import refuse_context

        refuse_context(config, problems)
    prompts = PromptSource(problems, start.tokenizer, config, environments)
    validation = validation_prompts(config, start.tokenizer, held_out, environments)
    start.total_steps = total_steps(config, prompts.num_prompts)
    if start.earlier is not None:
        start.refuse_other_data(prompts)
    return prompts, validation


def _load(start: Training, trained: Config, teacher: Any) -> EndpointTeacher | None:
    from jaxrl.run.host import LoadRequest

    config, steps, asked = start.config, start.total_steps, None
    start.beat("loading the weights")
    if config.algorithm.teacher.endpoint:
        from jaxrl.run.teacher import endpoint_teacher

        asked = endpoint_teacher(config, start.model, start.tokenizer, start.beat)
    updates = (steps - config.critic_warmup) * config.updates_per_step
    critic_updates = steps * config.critic_updates_per_step if config.has_critic else 0
    request = LoadRequest(trained, start.init_from, updates, critic_updates, teacher)
    start.said += filter(None, [start.host.load(request, start.tokenizer)])
    return asked


# -- the rollout, and the loop -----------------------------------------------------------------------------------------


def _train(
    start: Training,
    run: Run,
    environments: EnvironmentPool | None,
    profile: Profile | None,
    asked: EndpointTeacher | None,
    rollout_devices: int,
    state: Mapping[str, Any] | None,
    stack: ExitStack,
) -> Mapping[str, str]:
    start.beat("building the engine")
    machine = _open_rollout(start, run, profile, asked, stack)
    if environments is not None:
        run.conversation = environments.conversation(start.tokenizer, start.said)
    beside: list[CompiledPrograms] = []  # whose programs are compiled beside the first step
    _report_to(start, run, beside)
    loop = run.loop()
    if state is not None:
        loop.load_host_state(state)
    start.begin()
    if run.config.rollout.warmup and start.step < start.total_steps:
        beside += _warm_up(start, loop, machine, rollout_devices, stack)
    start.stop.save_first(start.record.view.message)
    loop.run()
    start.step = loop.step
    return carried(loop.rule.name, loop.num_carried)


def _open_rollout(
    start: Training, run: Run, profile: Profile | None, asked: EndpointTeacher | None, stack: ExitStack
) -> MeshMachine:
    from jaxrl.run.build import build_engines
    from jaxrl.run.mesh_machine import MeshMachine

    config, host, record = run.config, start.host, start.record
    assert record.journal is not None, "only a simulated run goes without"
    assert record.timeline is not None, "only a simulated run goes without"
    run.journal, run.timeline, run.layout_log = record.journal, record.timeline, record.layouts
    run.executors = executors = host.build_workers()
    arrival = None
    if config.rollout.order == "arrival":
        from jaxrl.run.arrival import ArrivalOrder

        arrival = ArrivalOrder(executors.first_done, run.journal)
        run.mechanisms = (arrival,)
    run.workers = build_engines(config, executors, start.tokenizer, profile, arrival)
    here: Any = host  # mechanisms that need devices of this process are refused where it has none
    devices = here.rollout_mesh, executors, stack, here.trainer, here.teacher
    run.machine = machine = MeshMachine(config, *devices, profile, record.timeline)
    run.models = Models(host.trainer, host.critic, host.teacher or asked)
    return machine


def _report_to(start: Training, run: Run, beside: list[CompiledPrograms]) -> None:
    record, journal = start.record, run.journal

    def stepped(step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        record.on_step(step, measured, groups)
        while beside and step < start.total_steps and not start.stop():
            record.view.phase("compiling the rest")  # what is left when a step has ended would only slow the next one
            beside.pop().complete(start.beat)

    def save(step: int, state: Mapping[str, Any]) -> None:
        committed = start.store.latest_step()  # for sure only then: saving waits for the save before
        start.save(step, state)
        if committed is not None and journal is not None:
            journal.cut(committed)

    run.on_phase, run.on_step, run.on_eval, run.save = record.on_phase, stepped, record.on_eval, save
    run.on_progress, run.on_waiting = record.on_progress, record.view.waiting


def _warm_up(
    start: Training, loop: Loop, machine: MeshMachine, rollout_devices: int, stack: ExitStack
) -> Sequence[CompiledPrograms]:
    """Compiles the rollout's programs, and begins with the update's and those of other layouts. Returns those that are
    left for the first step.

    For GPUs the update's are compiled here as well: compiling tries kernels on the device and takes the fastest, and a
    rollout beside it would disturb what is measured. On a CPU nothing is measured, and the first rollout does not wait.
    The programs of other layouts, which may be many and may never run, are compiled beside it everywhere.
    """
    from jaxrl.run.memory import layout_degrees

    record, executors, began = start.record, start.host.workers, time.monotonic()
    programs, rolling = [each.programs for each in start.host.models], machine.rollout_programs
    update = [*programs[:1], *machine.update_programs, *programs[1:]]
    now, later = (rolling, update) if start.devices.backend == "cpu" else ([*update, *rolling], [])

    def progress(state: str) -> None:
        record.beat()
        record.view.detail = state

    assert record.timeline is not None, "only a simulated run goes without"
    with record.timeline.span("loop", "compile"):
        loop.backend.enter_rollout(start.step)
        record.view.phase("compiling")
        count = executors.warm_up(progress, now)
    record.view.message(f"{count} programs ready in {time.monotonic() - began:.0f} s")
    ahead = executors.compile_ahead(layout_degrees(loop.config, rollout_devices), later)
    if ahead is not None:
        record.view.beside = stack.enter_context(closing(ahead)).state
    return later
