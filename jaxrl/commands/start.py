"""`jaxrl train` up to the first import of jax: what can be refused at once is refused here, and nothing is written.

The order of a start, here and in `jaxrl.commands.train`, stands in docs/architecture.md, "Starting a run".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain

from jaxrl.commands.opening import Opened, open_run
from jaxrl.config import Config
from jaxrl.config.domains import domains
from jaxrl.data.problems import Problem
from jaxrl.data.prompts import load_train, load_validation, refuse_sources
from jaxrl.mechanisms import batch_rule
from jaxrl.mechanisms.judge.endpoint import join_endpoint
from jaxrl.mechanisms.judge.verdicts import refuse_fields
from jaxrl.record.run_record import RunOutcome
from jaxrl.rewards.domains import build_scorer, refuse_tests
from jaxrl.rewards.pool import build_pool
from jaxrl.rewards.request import ScoreRequest
from jaxrl.runtime.stop import Stop
from jaxrl.types import Prompt, Sample, SampleKey


def _refuse_rows(config: Config, *problems: Sequence[Problem]) -> None:
    """Raises ValueError for data that the reward cannot score, whatever is answered."""
    nothing = replace(Sample.empty(SampleKey(0, 0, 0)), finish_reason="stop")

    def request(of: Problem) -> ScoreRequest:
        prompt = Prompt(0, of.index, (), of.question, of.source, of.answer, of.extra, of.question)
        return ScoreRequest.of(prompt, nothing)

    if any(domain.kind == "code" for domain in domains(config.reward).values()):
        for problem in chain(*problems):
            refuse_tests(config, problem.where, request(problem))
    refuse_fields(config, map(request, chain(*problems)))


def start(
    config: Config,
    say: Callable[[str], None] = print,
    stop: Stop | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> RunOutcome:
    """Runs (or resumes) the training that `config` describes, with arguments and errors as in `open_run`."""
    batch_rule(config)  # its settings may be refused
    return open_run("train", config, _start, say, stop, progress)


def _start(opened: Opened) -> RunOutcome:
    config, run_dir, watchdog, stack = opened.config, opened.run_dir, opened.watchdog, opened.stack
    acting = None
    if config.environment.is_on:
        from jaxrl.mechanisms.turns.pool import EnvironmentPool

        acting = EnvironmentPool(config, log=run_dir.early_file("environments.log"))
        watchdog.beat("starting the environments")
        stack.enter_context(closing(acting))
    watchdog.beat("reading the data")
    problems = load_train(config, acting)
    refuse_sources(config, problems)
    held_out = load_validation(config, problems, acting)
    _refuse_rows(config, problems, held_out)
    watchdog.beat("reading the reward function")
    log = run_dir.early_file("rewards.log")  # a reward file may print while it is imported
    pool = stack.enter_context(closing(build_pool(config, build_scorer(config), log=log)))
    join_endpoint(config, pool)

    watchdog.beat("looking for devices, reading tokenizer and model")
    from jaxrl.commands.train import RolloutTraining  # loads jax, which takes a second: a refusal does not wait for it

    return RolloutTraining(opened, batch_rule(config), problems, held_out, pool, acting).go()
