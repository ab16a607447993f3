"""`jaxrl eval` and `jaxrl export`: a model or a run's last checkpoint, scored on held-out prompts or written for
others.

pass@k is the unbiased estimate 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv:2107.03374, equation 1) from n
samples of which c are right; avg@k is the mean over all samples; maj@k scores the most frequent extracted answer of
the first k samples (ties: the one that came first). A sample counts as right when its reward is at least 1.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from jaxrl.assemble import abstract, build_engine, build_executor, load_tokenizer_and_model, prepare_jax
from jaxrl.backend import RolloutBackend
from jaxrl.config import Config, ConfigError, from_mapping
from jaxrl.data import validation_prompts
from jaxrl.journal import Journal
from jaxrl.models import decoder
from jaxrl.models.loading import config_of, load_model, resolve_path
from jaxrl.models.safetensors import export_hf
from jaxrl.rewards.pool import build_pool
from jaxrl.rewards.scorers import build_scorer
from jaxrl.scheduling.round import Round
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.text import stop_ids
from jaxrl.timeline import Timeline
from jaxrl.tokenizer import Tokenizer
from jaxrl.train.checkpoint import restore_params_only
from jaxrl.types import Group, Sample, SamplingParams

RIGHT = 1.0
"""The reward from which on a sample counts as right."""


def evaluate(config: Config, checkpoint: str | None = None, out: str | None = None) -> dict[str, float]:
    """Draws `rollout.val_kwargs.n` samples per held-out prompt and scores them; returns the figures by name."""
    config = replace(config, rollout=replace(config.rollout, num_devices=0))  # nothing is trained: all devices
    mesh = make_mesh(prepare_jax(config))
    tokenizer, model, params = load_tokenizer_and_model(config, mesh)
    if checkpoint:
        params = restore_params_only(checkpoint, abstract(params))
    prompts = validation_prompts(config, tokenizer)
    if not prompts:
        raise ConfigError("no held-out prompts: give data.val_files, or a data.task with data.val_size above 0")
    executor = build_executor(config, model, Layout(mesh, config.rollout.tensor_model_parallel_size))
    val = config.rollout.val_kwargs
    sampling = SamplingParams(
        temperature=val.temperature,
        top_k=max(val.top_k, 0),
        top_p=val.top_p,
        max_tokens=config.data.max_response_length,
        stop_token_ids=stop_ids(tokenizer, model),
        stop_strings=tuple(config.rollout.stop),
    )
    pool = build_pool(config, build_scorer(config))
    with tempfile.TemporaryDirectory() as scratch, Timeline(Path(scratch) / "timeline.json") as timeline:
        journal = Journal(Path(scratch) / "journal.jsonl", -1)
        engine = build_engine(config, executor, tokenizer)
        backend = RolloutBackend(engine, executor, pool, tokenizer, journal, timeline, lambda: params)
        try:
            pool.warm()
            backend.enter_rollout(0)
            current = Round(prompts, val.n)
            backend.begin(0, sampling)
            while not current.done:
                for command in current.handle(backend.wait()):
                    backend.apply(command)
        finally:
            pool.close()
            journal.close()
    groups = current.groups()
    if out:
        _write_samples(Path(out), groups)
    return figures(groups)


def figures(groups: Sequence[Group]) -> dict[str, float]:
    """num_prompts, avg@n, pass@k and maj@k for k = 1, 2, 4, ... n, mean_length (tokens) and clip_ratio."""
    n = len(groups[0].samples)
    right = np.array([[(s.reward or 0.0) >= RIGHT for s in g.samples] for g in groups])
    samples = [sample for group in groups for sample in group.samples]
    result = {"num_prompts": float(len(groups)), f"avg@{n}": float(right.mean())}
    ks = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
    result |= {f"pass@{k}": float(np.mean([pass_at_k(n, int(c), k) for c in right.sum(axis=1)])) for k in ks}
    result |= {f"maj@{k}": float(np.mean([_majority_right(g.samples[:k]) for g in groups])) for k in ks}
    result["mean_reward"] = float(np.mean([s.reward or 0.0 for s in samples]))
    result["mean_length"] = float(np.mean([len(s) for s in samples]))
    result["clip_ratio"] = float(np.mean([s.finish_reason == "length" for s in samples]))
    return result


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold a right one when `correct` of n are right."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _majority_right(samples: Sequence[Sample]) -> float:
    """Whether the most frequent answer is right. Samples without an extracted answer vote for nothing."""
    answers = [sample.reward_info.get("extracted") for sample in samples]
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    winner = max(votes, key=lambda answer: votes[answer])  # of equals, the first that was seen
    return float((samples[answers.index(winner)].reward or 0.0) >= RIGHT)


def _write_samples(path: Path, groups: Sequence[Group]) -> None:
    with open(path, "w") as file:
        for group in groups:
            for sample in group.samples:
                line = {
                    "prompt": group.prompt.text,
                    "answer": group.prompt.answer,
                    "response": sample.text,
                    "reward": sample.reward,
                    "info": dict(sample.reward_info),
                    "length": len(sample),
                    "finish_reason": sample.finish_reason,
                }
                file.write(json.dumps(line, default=str) + "\n")


def export(source: str, folder: str, dtype: str) -> list[Path]:
    """Writes a run's last checkpoint, or any model that loads, as a Hugging Face folder; returns the files.

    The folder is written whole under another name first: an export that fails leaves nothing half done.
    """
    target = Path(folder)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} must be empty or absent: an export never overwrites")
    mesh = make_mesh()
    run_config = Path(source) / "config.yaml"
    if run_config.exists():
        config = from_mapping(yaml.safe_load(run_config.read_text()))
        path = resolve_path(config.model.path)
        model = config_of(path)
        shapes = _abstract_params(model, mesh, config.actor.param_dtype)
        params: Any = restore_params_only(source, shapes)
    else:
        path = resolve_path(source)
        model, params = load_model(path, mesh)
    tokenizer = Tokenizer.from_path(path.removeprefix("random:"))
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    export_hf(params, model, draft, dtype=jnp.dtype(dtype))
    tokenizer.save(draft)
    if target.exists():
        target.rmdir()
    draft.rename(target)
    return sorted(target.iterdir())


def _abstract_params(model: Any, mesh: Any, dtype: str) -> Any:

    shapes = jax.eval_shape(lambda key: decoder.init(model, key, dtype), jax.random.key(0))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        train_shardings(model, mesh),
    )
