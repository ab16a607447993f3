"""`jaxrl eval`: a model or a run's last checkpoint, scored on held-out prompts.

pass@k is the unbiased estimate 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv:2107.03374, equation 1) from n
samples of which c are right; avg@k is the mean over all samples; maj@k is how often a prompt's most frequent answer is
right. A sample counts as right when its reward is at least 1.

A sample's answer is the value that its scorer calls `extracted`, or `pred` as verl's do. The verifier decides whether
two answers are the same (`jaxrl.rewards.math.equal`: `0.5` and `1/2` vote together) in worker processes, within
`reward.math_timeout_s`; two answers that it fails to compare are different.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import IO

import numpy as np

from jaxrl.config import Config, ConfigError, DataSection
from jaxrl.data.prompts import validation_prompts
from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.device import read_judge
from jaxrl.mechanisms.judge.endpoint import join_endpoint
from jaxrl.mechanisms.turns.pool import EnvironmentPool
from jaxrl.mechanisms.turns.rule import trajectory_metrics
from jaxrl.record.files import to_json, writing_whole
from jaxrl.record.metrics import RIGHT
from jaxrl.record.run_dir import inputs_of, refuse_overwriting
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.reward_pool import RewardPool, build_pool
from jaxrl.rewards.scorers import MathScorer
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.run.build import LoneWorker, share_notes, use_compilation_cache
from jaxrl.run.mesh_machine import MeshMachine
from jaxrl.run.run import Run
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.training.steps import whole_step
from jaxrl.types import Group, Prompt, RunFailed, Sample, SampleKey

Ballots = list[list[int]]
"""For each prompt and sample: the number of its answer among the prompt's, the same for equal ones; -1: it has none."""


def evaluate(
    config: Config,
    checkpoint: str | None = None,
    out: str | None = None,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Draws `rollout.val_kwargs.n` samples per held-out prompt and scores them; returns the figures by name.
    `checkpoint`: a run directory or a checkpoint, whose parameters replace those of `model.path`.

    Raises ValueError for what a user can mend, and RunFailed where every reward failed, so that the figures would say
    nothing about the model; `out` is written all the same.
    """
    if out:
        refuse_overwriting(out, "--out", inputs_of(config))
    said: list[str] = []  # shown once nothing is refused any more
    place = whole_step(checkpoint, say=said.append) if checkpoint else None
    if place is None:
        said.append(f"parameters of model.path ({config.model.path}); --checkpoint scores a run's last ones instead")
    worker = LoneWorker.open(config, said.append, [place])
    config, mesh, tokenizer = worker.config, worker.mesh, worker.tokenizer
    said += share_notes(config, mesh.devices.ravel().tolist())
    if Judge.is_on(config):
        read_judge(config)
    with ExitStack() as stack:
        acting = stack.enter_context(closing(EnvironmentPool(config))) if config.environment.is_on else None
        prompts = validation_prompts(config, tokenizer, environments=acting)
        if not prompts:
            raise ConfigError("no held-out prompts: give data.val_files, or a data.task with data.val_size above 0")
        rows = (each.extra if each.answer is None else {*each.extra, "answer"} for each in prompts)
        scorer = build_scorer(config, rows)
        pool = stack.enter_context(closing(build_pool(config, scorer)))
        join_endpoint(config, pool)
        pool.warm()
        params = worker.weights(place)
        # open from here on: that it cannot be written is known before the evaluation, not after it
        file = stack.enter_context(writing_whole(out)) if out else None
        use_compilation_cache(config)
        for line in said:
            say(line)
        executors = WorkerSet(mesh, [worker.executor()])
        total = len(prompts) * config.rollout.val_kwargs.n
        run = Run(
            config=config,
            workers=LocalWorkers([worker.engine(executors.executors[0])]),
            executors=executors,
            machine=MeshMachine(config, mesh, executors, stack),
            weights=lambda: params,
            scoring=pool,
            text_of=lambda sample: tokenizer.decode(sample.token_ids.tolist()),
            conversation=None if acting is None else acting.conversation(tokenizer),
            stop_token_ids=worker.stop_token_ids,
            on_progress=lambda busy, rows, tokens, done, launched: progress(done, total),
        )
        groups, errors = _responses(run, prompts)
        if file is not None:
            _write_samples(file, groups, config.data)
    say_failed(errors, total, say)
    return figures(groups, ballots(config, groups))


def _responses(run: Run, prompts: Sequence[Prompt]) -> tuple[list[Group], list[str]]:
    backend = run.backend(evaluates=True)
    backend.enter_rollout(0)
    current = Round.of(prompts, run.config.rollout.val_kwargs.n)
    info = RoundInfo(0, 1, "eval")
    backend.begin(info, run.config.sampling(run.stop_token_ids, evaluates=True))
    errors: list[str] = []
    while not current.done:
        event = backend.wait()
        if isinstance(event, Verdict) and event.status != "ok":
            errors.append(event.failure)
        event = event.unshaped if isinstance(event, Verdict) else event
        backend.apply(current.handle(event))
    groups = current.groups()
    for each in run.mechanisms:
        if each.group_rewards is not None:
            each.group_rewards(groups, info)
    return groups, errors


def say_failed(errors: Sequence[str], num_samples: int, say: Callable[[str], None]) -> None:
    """Tells how many rewards failed, each of which counts as 0; RunFailed if all did."""
    if not errors:
        return
    text = f"{len(errors)} of {num_samples} rewards failed; the last one: {errors[-1]}"
    if len(errors) == num_samples:
        raise RunFailed(text)
    say(f"{text}. Each of them counts as 0")


def figures(groups: Sequence[Group], votes: Ballots) -> dict[str, float]:
    """num_prompts, avg@n, pass@k and maj@k for k = 1, 2, 4, ... n, mean_length (tokens) and clip_ratio; without maj@k
    where no sample names an answer, and with why trajectories ended where they have turns."""
    n = len(groups[0].samples)
    right = np.array([[(s.reward or 0.0) >= RIGHT for s in g.samples] for g in groups])
    samples = [sample for group in groups for sample in group.samples]
    result = {"num_prompts": float(len(groups)), f"avg@{n}": float(right.mean())}
    ks = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
    result |= {f"pass@{k}": float(np.mean([pass_at_k(n, int(c), k) for c in right.sum(axis=1)])) for k in ks}
    result |= majorities(groups, votes, ks)
    result["mean_reward"] = float(np.mean([s.reward or 0.0 for s in samples]))
    result["mean_length"] = float(np.mean([len(s) for s in samples]))
    result["clip_ratio"] = float(np.mean([s.finish_reason == "length" for s in samples]))
    return result | trajectory_metrics(samples)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold a right one when `correct` of n are right."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _write_samples(file: IO[bytes], groups: Sequence[Group], data: DataSection) -> None:
    """A line for each response, with its problem's own columns as `data.*_key` names them: `jaxrl score` reads such a
    file with the same configuration, and finds what the scorers need."""
    for group in groups:
        prompt = group.prompt
        own = {data.prompt_key: prompt.question, data.answer_key: prompt.answer, data.source_key: prompt.source}
        for sample in group.samples:
            line = {
                "prompt": prompt.text,
                "answer": prompt.answer,
                "response": sample.text,
                "reward": sample.reward,
                "info": dict(sample.reward_info),
                "length": len(sample),
                "finish_reason": sample.finish_reason,
                "source": prompt.source,
            }
            line |= {name: value for name, value in own.items() if name and value}
            line |= {name: value for name, value in prompt.extra.items() if name not in line}
            file.write(to_json(line, default=str).encode() + b"\n")


def ballots(config: Config, groups: Sequence[Group]) -> Ballots:
    """Which answers of each prompt are the same, asked in worker processes where their texts differ."""
    named = [[_named(sample) for sample in group.samples] for group in groups]
    found: Ballots = [[] for _ in groups]
    with ExitStack() as stack:
        pool: RewardPool | None = None
        if any(len({*answers} - {None}) > 1 for answers in named):
            by_math = config.replace(reward=config.reward.replace(kind="math", domains={}, parts={}))
            pool = build_pool(by_math, MathScorer("none"), where=lambda key: "two answers that maj@k compares")
            stack.enter_context(closing(pool))
            pool.warm()
        counts = [_count(answers) for answers in named]

        def proceed(i: int, same: bool | None) -> None:
            try:
                answer, other = counts[i].send(same)
            except StopIteration as done:
                found[i] = done.value
                return
            assert pool is not None
            pool.submit(Prompt(0, i, (), "", "", other), replace(Sample.empty(SampleKey(0, i, 0)), text=answer))

        for i in range(len(groups)):
            proceed(i, None)
        while pool is not None and pool.num_pending:
            for verdict in pool.wait():
                proceed(verdict.key.prompt_index, verdict.reward >= RIGHT)
    return found


def majorities(groups: Sequence[Group], found: Ballots, ks: Sequence[int]) -> dict[str, float]:
    """maj@k: the share of prompts whose most frequent answer among k samples (ties: the first) is right. Prompts of a
    source whose scorer names no answers are left out, and the figures if that is all."""
    naming = {group.prompt.source for group, votes in zip(groups, found, strict=True) if max(votes) >= 0}
    counted = [(g.samples, votes) for g, votes in zip(groups, found, strict=True) if g.prompt.source in naming]
    return {f"maj@{k}": float(np.mean([_is_right(*each, k) for each in counted])) for k in ks if counted}


def _is_right(samples: Sequence[Sample], votes: Sequence[int], k: int) -> bool:
    cast = Counter(vote for vote in votes[:k] if vote >= 0)  # in the order in which they were seen, which decides ties
    return bool(cast) and (samples[votes.index(cast.most_common(1)[0][0])].reward or 0.0) >= RIGHT


def _named(sample: Sample) -> str | None:
    info = sample.reward_info
    answer = info.get("extracted") if info.get("extracted") is not None else info.get("pred")
    return answer if answer is None or isinstance(answer, str) else to_json(answer, default=str)


def _count(answers: Sequence[str | None]) -> Generator[tuple[str, str], bool | None, list[int]]:
    """Numbers the answers, equal ones alike. Yields two of which it must know whether they are equal."""
    numbers: dict[str, int] = {}
    different: list[str] = []
    for answer in answers:
        if answer is None or answer in numbers:
            continue
        for number, other in enumerate(different):
            if (yield answer, other):
                numbers[answer] = number
                break
        else:
            numbers[answer] = len(different)
            different.append(answer)
    return [-1 if answer is None else numbers[answer] for answer in answers]
