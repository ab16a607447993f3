"""`jaxrl eval`: a model or a run's last checkpoint, scored on held-out prompts.

pass@k is the unbiased estimate 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv:2107.03374, equation 1) from n
samples of which c are right; avg@k is the mean over all samples; maj@k: `jaxrl.commands.majority`. A sample counts as
right when its reward is at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import IO

import numpy as np

from jaxrl.commands.majority import Ballots, ballots, majorities
from jaxrl.config import Config, ConfigError, DataSection
from jaxrl.data.prompts import validation_prompts
from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.device import read_judge
from jaxrl.mechanisms.judge.endpoint import join_endpoint
from jaxrl.mechanisms.turns.pool import EnvironmentPool
from jaxrl.mechanisms.turns.rule import trajectory_metrics
from jaxrl.record.files import Removing, to_json, writing_whole
from jaxrl.record.metrics import RIGHT
from jaxrl.record.run_dir import inputs_of, refuse_overwriting
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.reward_pool import build_pool
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.run.build import LoneWorker, share_notes, use_compilation_cache
from jaxrl.run.mesh_machine import MeshMachine
from jaxrl.run.run import Run
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.training.steps import find_step, whole_step
from jaxrl.types import Group, Prompt, RunFailed, SamplingParams


def evaluate(
    config: Config,
    checkpoint: str | None = None,
    out: str | None = None,
    say: Callable[[str], None] = print,
    removing: Removing = nullcontext,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Draws `rollout.val_kwargs.n` samples per held-out prompt and scores them; returns the figures by name.

    Args:
      checkpoint: a run directory or a checkpoint: its parameters instead of those of `model.path`.
      out: a file for every response and its verdict. It is written even where all rewards failed.
      removing: of the process's signals, which may end it while `out` is open.
      progress: called after each plan with how many responses have ended, and how many there are to be.

    Raises:
      ValueError: what a user can mend.
      RunFailed: every reward failed, so that the figures would say nothing about the model.
    """
    if out:
        refuse_overwriting(out, "--out", inputs_of(config))
    said: list[str] = []  # shown once nothing is refused any more
    place = whole_step(checkpoint, say=said.append) if checkpoint else None
    if place is None:
        said.append(_weights_of_model(config))
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
        file = stack.enter_context(writing_whole(out, removing=removing)) if out else None
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


def _weights_of_model(config: Config) -> str:
    """Says that the model itself is scored, and how the run's checkpoint would be, where there is one."""
    text = f"parameters of model.path ({config.model.path})"
    run_dir = config.trainer.run_dir
    if not run_dir:
        return text
    try:
        find_step(run_dir)
    except (OSError, ValueError):
        return text  # there is no checkpoint, and none was asked for
    return f"{text}; --checkpoint {run_dir} scores the run's last checkpoint instead"


def _responses(run: Run, prompts: Sequence[Prompt]) -> tuple[list[Group], list[str]]:
    val = run.config.rollout.val_kwargs
    sampling = SamplingParams(
        temperature=val.temperature,
        top_k=max(val.top_k, 0),
        top_p=val.top_p,
        max_tokens=run.config.data.max_response_length,
        stop_token_ids=run.stop_token_ids,
        stop_strings=tuple(run.config.rollout.stop),
    )
    backend = run.backend(evaluates=True)
    backend.enter_rollout(0)
    current = Round(prompts, val.n)
    info = RoundInfo(0, 1, "eval")
    backend.begin(info, sampling)
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
