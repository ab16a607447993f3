"""What a training step does with a batch: log-probabilities, advantages, gradients, updates. Imports no jax.

Purpose: `learn` is the training half of a step of the loop (`jaxrl.loop`), over a trainer that is real or simulated.
What gradients need besides is in `jaxrl.train.batch_preparation`. With a critic its values come before the advantages,
and its updates, towards the returns, before those of the policy; neither reads what the other's updates write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from jaxrl.config import Config
from jaxrl.record import metrics as numbers
from jaxrl.train import batch_preparation
from jaxrl.types import Group, TrainBatch

_SKIPPED = "skipped_updates"
_COUNTED = (_SKIPPED, "recompiles")  # of the updates of a step; all else is their mean
_VARIANCE_EPS = 1e-5  # verl's


class Trainer(Protocol):
    """`jaxrl.train.step.Trainer`, or a simulation."""

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"]) -> list[np.ndarray]: ...

    def accumulate(self, batch: TrainBatch) -> None: ...

    def apply(self) -> dict[str, float]: ...


class Critic(Protocol):
    """`jaxrl.train.critic.Critic`, or a simulation."""

    def token_values(self, batch: TrainBatch) -> list[np.ndarray]: ...

    def accumulate(self, batch: TrainBatch) -> None: ...

    def apply(self) -> dict[str, float]: ...


class Teacher(Protocol):
    """`jaxrl.train.teacher.Teacher`."""

    def annotate(self, batch: TrainBatch) -> None: ...


@dataclass(frozen=True, slots=True)
class Models:
    """What learns: the policy, and a critic where the advantages need one; and a teacher that does not."""

    policy: Trainer
    critic: Critic | None = None
    teacher: Teacher | None = None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """A step's batch, and the metrics of each update by model (`actor`, `critic`; without those that had none)."""

    batch: TrainBatch
    updates: dict[str, list[dict[str, float]]]

    def metrics(self) -> dict[str, float]:
        """Of the step: means over the updates of a model, and sums of counts."""
        measured: dict[str, float] = {}
        for updates in self.updates.values():
            for name in updates[-1]:
                total = np.sum if name.partition("/")[2] in _COUNTED else np.mean
                measured[name] = float(total([update[name] for update in updates]))
        return measured | critic_metrics(self.batch) | teacher_metrics(self.batch)

    def skipped(self) -> dict[str, tuple[int, int]]:
        """By model: its updates, and those of them that changed nothing. A simulated one tells of none."""
        return {
            model: (len(updates), int(sum(update[f"{model}/{_SKIPPED}"] for update in updates)))
            for model, updates in self.updates.items()
            if f"{model}/{_SKIPPED}" in updates[-1]
        }


def critic_metrics(batch: TrainBatch) -> dict[str, float]:
    """`critic/values`, `critic/returns`, and `critic/vf_explained_var`: 1 - var(returns - values) / var(returns), over
    the tokens that are learnt from; nothing where there is no critic or no token."""
    if batch.values is None or batch.returns is None:
        return {}
    values, returns = (_learnt(batch, each) for each in (batch.values, batch.returns))
    measured = numbers.spread("critic/values", values) | numbers.spread("critic/returns", returns)
    if values.size > 1:
        unexplained = (returns - values).var(ddof=1) / (returns.var(ddof=1) + _VARIANCE_EPS)
        measured["critic/vf_explained_var"] = float(1 - unexplained)
    return measured


def teacher_metrics(batch: TrainBatch) -> dict[str, float]:
    """`actor/teacher_kl`: the mean of log π_old - log π_teacher over the tokens that are learnt from; nothing where
    there is no teacher or no token."""
    if batch.teacher_logprobs is None:
        return {}
    ours = batch.old_logprobs or [sample.rollout_logprobs for sample in batch.samples]
    gap = _learnt(batch, ours) - _learnt(batch, batch.teacher_logprobs)
    return {"actor/teacher_kl": float(gap.mean())} if gap.size else {}


def _learnt(batch: TrainBatch, values: Sequence[np.ndarray]) -> np.ndarray:
    """The values at all tokens of a batch that are learnt from, as float64."""
    if batch.loss_masks is not None:
        values = [own[np.asarray(mask) > 0] for own, mask in zip(values, batch.loss_masks, strict=True)]
    return np.concatenate(values).astype(np.float64)


def learn(
    config: Config,
    models: Models,
    begun: Sequence[TrainBatch],
    groups: list[Group],
    step: int,
    phase: Callable[[str], AbstractContextManager[None]],
    beat: Callable[[], None],
) -> UpdateResult:
    """Update `step`: `ppo_epochs` passes of minibatches of whole groups; those of the critic first.

    Args:
      models: the critic learns as well, and alone for the first `trainer.critic_warmup` steps.
      begun: parts of the batch of which the policy has the gradients already.
      phase: around the parts that take time, by their names. beat: called after each update.
    """
    trainer, critic = models.policy, models.critic
    parts = list(begun)
    taken = {prompt.key for part in parts for prompt in part.prompts}
    others = [group for group in groups if group.prompt.key not in taken]
    values = None if critic is None else critic.token_values
    teacher = None if models.teacher is None else models.teacher.annotate
    rest = batch_preparation.prepared(config, others, step, trainer.token_logprobs, phase, values, teacher)
    batch = batch_preparation.joined(groups, [*parts, rest]) if parts else rest
    updates: dict[str, list[dict[str, float]]] = {}
    if critic is not None:
        updates["critic"] = []
        with phase("update_critic"):
            for _ in range(config.critic_epochs):
                for part in batch_preparation.minibatches(groups, batch, config.critic_mini_batch_prompts):
                    critic.accumulate(part)
                    updates["critic"].append(critic.apply())
                    beat()
    if step > config.critic_warmup:
        updates["actor"] = []
        with phase("update_actor"):
            for _ in range(config.actor.ppo_epochs):
                for part in batch_preparation.minibatches(groups, batch, config.mini_batch_prompts):
                    is_begun = not updates["actor"] and bool(parts)  # `rest` is what is left of the first minibatch
                    trainer.accumulate(rest if is_begun else part)
                    updates["actor"].append(trainer.apply())
                    beat()
    return UpdateResult(batch, updates)
