"""What a batch needs before its gradients: the ratios' denominators, values, masks, advantages. numpy only, no jax.

Purpose: the loop does it for a step's batch, and what computes gradients beside a rollout for the groups that it gets
while others decode. All of it is known per group, unless the estimator of the advantages is one
of `config.checks.NEEDS_WHOLE_BATCH`; so groups may be prepared apart and put together again (`joined`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import numpy as np

from jaxrl.config import Config
from jaxrl.train import advantages
from jaxrl.types import Group, Sample, SampleKey, TrainBatch


def needs_policy(config: Config, batch: TrainBatch, step: int) -> bool:
    """Whether the log-probabilities of the policy in training must be computed, before update `step`."""
    if config.actor.old_logprobs == "rollout":
        return False
    if config.rollout.stale_tokens == "recompute":
        return True
    return any(on_policy_mask(sample.versions, step - 1).any() for sample in batch.samples)


def old_logprobs(
    config: Config, batch: TrainBatch, step: int, current: list[np.ndarray] | None
) -> list[np.ndarray] | None:
    """The denominators of the ratios: recorded at sampling for tokens that an earlier version wrote, unless
    `rollout.stale_tokens` is recompute; for the others those of the current policy, if the config asks for that.

    Args:
      current: of the policy before update `step`; None where `needs_policy` says so.

    Returns:
      Per sample float32 [T]; None: all as recorded.
    """
    if current is None or config.rollout.stale_tokens == "recompute":
        return current
    if all(on_policy_mask(sample.versions, step - 1).all() for sample in batch.samples):
        return current
    recorded = [sample.rollout_logprobs for sample in batch.samples]
    return old_logprobs_by_version(recorded, current, batch.samples, step - 1)


def loss_masks(config: Config, batch: TrainBatch, step: int) -> list[np.ndarray] | None:
    """Per sample float32 [T], 1 at tokens to learn from in update `step`; None: all.

    The model's are learnt from, and where `rollout.stale_tokens` is mask, those of the newest version.
    """
    if config.rollout.stale_tokens == "mask":
        return [on_policy_mask(sample.versions, step - 1).astype(np.float32) for sample in batch.samples]
    drawn = [sample.drawn for sample in batch.samples]
    return None if all(own.all() for own in drawn) else [own.astype(np.float32) for own in drawn]


def on_policy_mask(versions: np.ndarray, policy_version: int) -> np.ndarray:
    """bool [T]: the tokens that `policy_version` (the rollout's newest) wrote, for training that masks the others."""
    return np.asarray(versions) >= policy_version


def old_logprobs_by_version(
    recorded: Sequence[np.ndarray], current: Sequence[np.ndarray], samples: Iterable[Sample], policy_version: int
) -> list[np.ndarray]:
    """The denominators of the ratios: recorded at sampling for tokens of earlier versions, recomputed under the current
    policy for the others.

    Args:
      recorded: per sample float [T], `rollout_logprobs`.
      current: per sample float [T], recomputed under the policy before the update.
      samples: their versions decide.
      policy_version: the rollout's newest.

    Returns:
      Per sample float32 [T].
    """
    return [
        np.where(on_policy_mask(sample.versions, policy_version), now, then).astype(np.float32)
        for then, now, sample in zip(recorded, current, samples, strict=True)
    ]


def set_advantages(config: Config, groups: Sequence[Group], batch: TrainBatch) -> None:
    """Writes the advantages of a batch of `groups`, whose log-probabilities, values and masks are there, a teacher's
    part in them; and the returns, where there is a critic."""
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
    """The batch of these groups, with all that gradients of update `step` need.

    Args:
      logprobs: of the policy before the update, or of the reference; per sample float32 [T].
      phase: around the parts that take time, by their names.
      values: of the critic before the update, per sample float32 [T]; None: there is none.
      teacher: writes what it thinks of a batch's tokens into it; None: there is none.
    """
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
    """The samples of `num_prompts` whole groups at a time, of a batch of `groups`."""
    ends = [0, *itertools.accumulate(len(group.samples) for group in groups)]
    for first in range(0, len(groups), num_prompts):
        last = min(first + num_prompts, len(groups))
        yield batch.select(list(range(ends[first], ends[last])))


def joined(groups: Sequence[Group], parts: Sequence[TrainBatch]) -> TrainBatch:
    """The batch of `groups`, from parts that were prepared apart and that have each of its samples once.

    Where some parts have recomputed denominators and others recorded ones, all stand in the result.
    """
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
            setattr(whole, name, [_there(getattr(part, name))[i] for part, i in found])
    if any(part.loss_masks is not None for part in parts):
        whole.loss_masks = [
            np.ones(len(part.samples[i]), np.float32) if part.loss_masks is None else part.loss_masks[i]
            for part, i in found
        ]
    return whole


def _there(values: list[np.ndarray] | None) -> list[np.ndarray]:
    assert values is not None, "what one part has, all have"
    return values
