"""Everything that a batch needs before its gradients: old log-probabilities, values, masks, advantages. No jax.

The loop prepares a step's batch; the stream trainer prepares groups while others still decode. All of it is known per
group, unless the advantage estimator is one of `config.checks.NEEDS_WHOLE_BATCH`; so groups may be prepared separately
and joined (`joined`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import numpy as np

from jaxrl.config import Config
from jaxrl.training import advantages
from jaxrl.types import Group, SampleKey, TrainBatch


def needs_policy(config: Config, batch: TrainBatch, step: int) -> bool:
    """Whether the log-probabilities of the policy in training must be computed, before update `step`."""
    if config.actor.old_logprobs == "rollout":
        return False
    return config.rollout.stale_tokens == "recompute" or any(own.any() for own in _on_policy(batch, step))


def _on_policy(batch: TrainBatch, step: int) -> list[np.ndarray]:
    """Per sample bool [T]: the tokens of the newest version before update `step`."""
    return [np.asarray(sample.versions) >= step - 1 for sample in batch.samples]


def old_logprobs(
    config: Config, batch: TrainBatch, step: int, current: list[np.ndarray] | None
) -> list[np.ndarray] | None:
    """The denominators of the ratios, per sample float32 [T]; None: all as recorded at sampling.

    Tokens of earlier versions keep the recorded ones, unless `rollout.stale_tokens` is recompute; the others take
    `current`, of the policy before update `step` (None where `needs_policy` is False).
    """
    if current is None or config.rollout.stale_tokens == "recompute":
        return current
    masks = _on_policy(batch, step)
    if all(own.all() for own in masks):
        return current
    each = zip(masks, current, batch.samples, strict=True)
    return [np.where(own, now, sample.rollout_logprobs).astype(np.float32) for own, now, sample in each]


def loss_masks(config: Config, batch: TrainBatch, step: int) -> list[np.ndarray] | None:
    """Per sample float32 [T], 1 at the policy's own tokens, 0 at the others; None: 1 everywhere. With
    `rollout.stale_tokens` mask, tokens of older versions are 0, too."""
    if config.rollout.stale_tokens == "mask":
        return [own.astype(np.float32) for own in _on_policy(batch, step)]
    drawn = [sample.drawn for sample in batch.samples]
    return None if all(own.all() for own in drawn) else [own.astype(np.float32) for own in drawn]


def set_advantages(config: Config, groups: Sequence[Group], batch: TrainBatch) -> None:
    """Writes advantages, and a critic's returns, into a batch of `groups` that has log-probabilities, values and
    masks."""
    policy = batch.old_logprobs or [sample.rollout_logprobs for sample in batch.samples]
    batch.advantages, batch.returns = advantages.compute(
        groups, config.algorithm, policy, batch.ref_logprobs, batch.loss_masks, batch.values
    )
    if batch.teacher_logprobs is not None and not config.algorithm.teacher.top_k:
        batch.advantages = advantages.with_teacher(
            batch.advantages, batch.samples, policy, batch.teacher_logprobs, config.algorithm.teacher.coef
        )


def prepared(
    config: Config,
    groups: Sequence[Group],
    step: int,
    logprobs: Callable[[TrainBatch, Literal["actor", "ref"]], list[np.ndarray]],
    phase: Callable[[str], AbstractContextManager[None]] = nullcontext,
    values: Callable[[TrainBatch], list[np.ndarray]] | None = None,
    teacher: Callable[[TrainBatch], None] | None = None,
) -> TrainBatch:
    """The batch of these groups, with everything that gradients of update `step` need: `logprobs` of the policy or the
    reference and a critic's `values`, per sample float32 [T], of before the update. `teacher` writes its own into the
    batch; `phase` is entered around the parts that take time."""
    batch = TrainBatch.of(groups)
    with phase("old_log_prob"):
        current = logprobs(batch, "actor") if needs_policy(config, batch, step) else None
        batch.old_logprobs = old_logprobs(config, batch, step, current)
    with phase("ref"):
        if config.needs_ref:
            batch.ref_logprobs = logprobs(batch, "ref")
    if teacher is not None:
        with phase("teacher"):
            teacher(batch)
    if values is not None:
        with phase("values"):
            batch.values = values(batch)
    batch.loss_masks = loss_masks(config, batch, step)
    with phase("adv"):
        set_advantages(config, groups, batch)
    return batch


def minibatches(groups: Sequence[Group], batch: TrainBatch, num_prompts: int) -> Iterator[TrainBatch]:
    """The samples of `num_prompts` complete groups at a time, of a batch of `groups`."""
    ends = [0, *itertools.accumulate(len(group.samples) for group in groups)]
    for first in range(0, len(groups), num_prompts):
        last = min(first + num_prompts, len(groups))
        yield batch.select(list(range(ends[first], ends[last])))


def joined(groups: Sequence[Group], parts: Sequence[TrainBatch]) -> TrainBatch:
    """The batch of `groups`, from parts that were prepared separately and have each of its samples once."""
    whole = TrainBatch.of(groups)
    places: dict[SampleKey, tuple[TrainBatch, int]] = {}
    for part in parts:
        places |= {sample.key: (part, i) for i, sample in enumerate(part.samples)}
    found = [places[sample.key] for sample in whole.samples]
    assert len(found) == len(places) == sum(map(len, parts)), "each sample is in one part"
    whole.advantages = [part.advantages[i] for part, i in found]
    if any(part.old_logprobs is not None for part in parts):
        whole.old_logprobs = [
            part.samples[i].rollout_logprobs if part.old_logprobs is None else part.old_logprobs[i] for part, i in found
        ]
    for name in ("ref_logprobs", "teacher_logprobs", "teacher_ids", "teacher_top_logprobs"):
        if any(getattr(part, name) is not None for part in parts):
            setattr(whole, name, [getattr(part, name)[i] for part, i in found])  # what one part has, all have
    if any(part.loss_masks is not None for part in parts):
        whole.loss_masks = [
            np.ones(len(part.samples[i]), np.float32) if part.loss_masks is None else part.loss_masks[i]
            for part, i in found
        ]
    return whole
