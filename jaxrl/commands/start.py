"""`jaxrl train` up to the first import of jax: what can be refused at once is refused here, and nothing is written.

The order of a start, here and in `jaxrl.commands.train`, stands in docs/architecture.md, "Starting a run".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jaxrl.config import Config, ConfigError
from jaxrl.data.problems import Problem
from jaxrl.data.prompts import load_train, load_validation, refuse_sources
from jaxrl.mechanisms.table import batch_rule, environments, join_pools, refuse_requests
from jaxrl.record.integrity import refuse_damaged
from jaxrl.record.progress import StartupProgress
from jaxrl.record.run_dir import FollowerRunDir, RunDir
from jaxrl.record.run_record import RunOutcome
from jaxrl.record.sinks import sink_package
from jaxrl.record.watchdog import Watchdog
from jaxrl.rewards.domains import build_scorer, refuse_tests
from jaxrl.rewards.pool import build_pool
from jaxrl.rewards.request import ScoreRequest
from jaxrl.runtime.cache_folder import with_cache_folder
from jaxrl.runtime.hosts.environment import COORDINATOR
from jaxrl.runtime.stop import Stop, end
from jaxrl.train.steps import find_step
from jaxrl.types import Prompt, Sample, SampleKey

if TYPE_CHECKING:
    from jaxrl.runtime.hosts.world import World


def launched(config: Config, arguments: Sequence[str], stop: Stop | None, *, writes: bool = True) -> int:
    """Runs a command on several hosts, each process of which does what this one would do without a launcher.

    Args:
      arguments: `train`, or another command that takes a configuration, and all that it was given.
      writes: whether it writes to the run directory.

    Returns:
      The exit status.
    """
    from jaxrl.runtime.hosts.launch import launch

    if writes:
        _refuse_no_folder(config)
        batch_rule(config)  # refused once, and not on every host
    return launch(config, arguments, stop or Stop(), writes=writes)


def _refuse_rows(config: Config, problems: Sequence[Problem]) -> None:
    """Raises ValueError for data that the reward cannot score, whatever is answered."""
    nothing = replace(Sample.empty(SampleKey(0, 0, 0)), finish_reason="stop")

    def request(of: Problem) -> ScoreRequest:
        prompt = Prompt(0, of.index, (), of.question, of.source, of.answer, of.extra, of.question)
        return ScoreRequest.of(prompt, nothing)

    for problem in problems:
        refuse_tests(config, problem.where, request(problem))
    refuse_requests(config, map(request, problems))


def _refuse_no_folder(config: Config) -> None:
    if not config.trainer.run_dir:
        raise ConfigError("trainer.run_dir is missing: give the folder that the run writes to and resumes from")


def start(
    config: Config,
    say: Callable[[str], None] = print,
    stop: Stop | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> RunOutcome:
    """Runs (or resumes) the training that `config` describes; raises ValueError for what a user can mend.

    Args:
      say: shows a line; of several processes, the first one says what there is to say.
      stop: the signals of the program; without one they are the caller's.
      progress: shows a line of what takes long before the first step; called from another thread.
    """
    stop = stop or Stop()
    if config.hosts.num == 1 and not (config.hosts.coordinator or os.environ.get(COORDINATOR)):
        return _start(config, say, stop, None, progress)
    from jaxrl.runtime.hosts.world import open_world  # loads jax

    with open_world(config.hosts, stop) as world:
        return _start(config, say, stop, world, progress)


def _start(
    config: Config,
    say: Callable[[str], None],
    stop: Stop,
    world: World | None,
    progress: Callable[[str], None],
) -> RunOutcome:
    """`world`: of several processes, of which process 0 writes the run's files; None: this one is alone."""
    began_s = time.monotonic()
    _refuse_no_folder(config)
    rule = batch_rule(config)
    with ExitStack() as stack:
        folder, process = config.trainer.run_dir, 0 if world is None else world.process
        run_dir = stack.enter_context(closing(FollowerRunDir(folder, process) if process else RunDir(folder)))
        stages = stack.enter_context(closing(StartupProgress(progress if run_dir.leads else _silent)))
        watchdog = _watchdog(config, world, stages)
        stack.enter_context(closing(watchdog))
        run_dir.refuse_other_kind(simulated=False)
        earlier = run_dir.earlier
        refuse_damaged(run_dir)
        if config.trainer.init_from:
            find_step(config.trainer.init_from, option="trainer.init_from")
        config = with_cache_folder(config)
        acting = environments(config, log=run_dir.early_file("environments.log"))
        if acting is not None:
            watchdog.beat("starting the environments")
            stack.enter_context(closing(acting))
        watchdog.beat("reading the data")
        problems = list(load_train(config, acting))
        refuse_sources(config, problems)
        held_out = load_validation(config, problems, acting)
        _refuse_rows(config, [*problems, *held_out])
        for name in config.trainer.logger:
            sink_package(name)
        watchdog.beat("reading the reward function")
        log = run_dir.early_file("rewards.log")  # a reward file may print while it is imported
        pool = stack.enter_context(closing(build_pool(config, build_scorer(config), log=log)))
        join_pools(config, pool)

        watchdog.beat("looking for devices, reading tokenizer and model")
        from jaxrl.commands.train import Run, Start  # loads jax, which takes a second: a refusal does not wait for it
        from jaxrl.runtime.hosts.process_group import ProcessGroup

        told = say if run_dir.leads else _silent
        group = ProcessGroup(world, stop, watchdog.beat)
        begun = Start(
            config,
            rule,
            run_dir,
            earlier,
            problems,
            held_out,
            pool,
            acting,
            stop,
            watchdog,
            told,
            began_s,
            group,
            stages,
        )
        return Run(begun).go()


def _watchdog(config: Config, world: World | None, stages: StartupProgress) -> Watchdog:
    """The run's watchdog. Of several processes it ends all, and what it hears of progress counts for them too."""
    timeout_s = config.trainer.hang_timeout_s
    if world is None or world.num_processes == 1:
        return Watchdog(timeout_s, partial(end, status=1), lambda doing: stages.begin(doing) if doing else None)
    barrier = world.barrier

    def heard(doing: str) -> None:
        if doing:
            barrier.at(doing)
            stages.begin(doing)
        else:
            barrier.beat()

    return Watchdog(timeout_s, barrier.fail, heard, lambda: barrier.waits)


def _silent(line: str) -> None:
    """Another process says it."""
