"""One training step: log-probabilities, advantages, gradients, updates. Imports no jax.

`training_step` is the training half of a step of the loop (`jaxrl.loop`), over a trainer that is real, remote or
simulated. `jaxrl.training.batch_preparation` computes what gradients need. With a critic its values come before the
advantages, and its updates, towards the returns, before the policy's. Neither reads what the other's updates write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from jaxrl.config import Config
from jaxrl.record import metrics as numbers
from jaxrl.training import batch_preparation
from jaxrl.types import Group, TrainBatch

_SKIPPED = "skipped_updates"
_COUNTED = (_SKIPPED, "recompiles")  # summed over the updates of a step; all else is averaged
_VARIANCE_EPS = 1e-5  # verl's


class Trainer(Protocol):
    """`jaxrl.training.trainer.MeshTrainer` here or on other hosts, or a simulated one: a policy or a critic."""

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"]) -> list[np.ndarray]: ...

    def token_values(self, batch: TrainBatch) -> list[np.ndarray]: ...

    def train_step(self, batch: TrainBatch) -> dict[str, float]: ...


class Teacher(Protocol):
    """`jaxrl.training.teacher.MeshTeacher` here or on other hosts, or one at an endpoint."""

    def annotate(self, batch: TrainBatch) -> None: ...


@dataclass(frozen=True, slots=True)
class Models:
    """The policy; a critic where the advantages need one; and a teacher, which is not trained."""

    policy: Trainer
    critic: Trainer | None = None
    teacher: Teacher | None = None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """A step's batch, and the metrics of each update by model (`actor`, `critic`; only those that had updates)."""

    batch: TrainBatch
    updates: dict[str, list[dict[str, float]]]

    def metrics(self) -> dict[str, float]:
        """Metrics of the step: means over the updates of a model, and sums of counts."""
        measured: dict[str, float] = {}
        for updates in self.updates.values():
            for name in updates[-1]:
                total = np.sum if name.partition("/")[2] in _COUNTED else np.mean
                measured[name] = float(total([update[name] for update in updates]))
        return measured | critic_metrics(self.batch) | teacher_metrics(self.batch)

    def skipped(self) -> dict[str, tuple[int, int]]:
        """By model: its updates, and how many of them changed nothing. A simulated model is not listed."""
        return {
            model: (len(updates), int(sum(update[f"{model}/{_SKIPPED}"] for update in updates)))
            for model, updates in self.updates.items()
            if f"{model}/{_SKIPPED}" in updates[-1]
        }


def critic_metrics(batch: TrainBatch) -> dict[str, float]:
    """`critic/values`, `critic/returns`, and `critic/vf_explained_var`: 1 - var(returns - values) / var(returns), over
    the tokens with loss mask 1; nothing without a critic or without such a token."""
    if batch.values is None or batch.returns is None:
        return {}
    values, returns = (_masked_tokens(batch, each) for each in (batch.values, batch.returns))
    measured = numbers.spread("critic/values", values) | numbers.spread("critic/returns", returns)
    if values.size > 1:
        unexplained = (returns - values).var(ddof=1) / (returns.var(ddof=1) + _VARIANCE_EPS)
        measured["critic/vf_explained_var"] = float(1 - unexplained)
    return measured


def teacher_metrics(batch: TrainBatch) -> dict[str, float]:
    """`actor/teacher_kl`: the mean of log π_old - log π_teacher over the tokens with loss mask 1; nothing without a
    teacher or without such a token."""
    if batch.teacher_logprobs is None:
        return {}
    ours = batch.old_logprobs or [sample.rollout_logprobs for sample in batch.samples]
    gap = _masked_tokens(batch, ours) - _masked_tokens(batch, batch.teacher_logprobs)
    return {"actor/teacher_kl": float(gap.mean())} if gap.size else {}


def _masked_tokens(batch: TrainBatch, values: Sequence[np.ndarray]) -> np.ndarray:
    """The values at all tokens of a batch with loss mask 1, as float64."""
    if batch.loss_masks is not None:
        values = [own[np.asarray(mask) > 0] for own, mask in zip(values, batch.loss_masks, strict=True)]
    return np.concatenate(values).astype(np.float64)


def training_step(
    config: Config,
    models: Models,
    started: Sequence[TrainBatch],
    groups: list[Group],
    step: int,
    phase: Callable[[str], AbstractContextManager[None]],
    beat: Callable[[], None],
) -> UpdateResult:
    """Update `step`: `ppo_epochs` passes of minibatches of complete groups, the critic's first, which is trained alone
    for the first `trainer.critic_warmup` steps. `started`: parts of the batch whose gradients the policy's trainer
    holds already. `phase` is entered around the parts that take time, `beat` called after each update."""
    trainer, critic = models.policy, models.critic
    known = {prompt.key for part in started for prompt in part.prompts}
    others = [group for group in groups if group.prompt.key not in known]
    values = None if critic is None else critic.token_values
    teacher = None if models.teacher is None else models.teacher.annotate
    rest = batch_preparation.prepared(config, others, step, trainer.token_logprobs, phase, values, teacher)
    batch = batch_preparation.joined(groups, [*started, rest]) if started else rest
    updates: dict[str, list[dict[str, float]]] = {}
    if critic is not None:
        updates["critic"] = []
        with phase("update_critic"):
            for _ in range(config.critic_epochs):
                for part in batch_preparation.minibatches(groups, batch, config.critic_mini_batch_prompts):
                    updates["critic"].append(critic.train_step(part))
                    beat()
    if step > config.critic_warmup:
        updates["actor"] = []
        with phase("update_actor"):
            for _ in range(config.actor.ppo_epochs):
                for part in batch_preparation.minibatches(groups, batch, config.mini_batch_prompts):
                    is_started = bool(started) and not updates["actor"]  # `rest` completes the first minibatch
                    updates["actor"].append(trainer.train_step(rest if is_started else part))
                    beat()
    return UpdateResult(batch, updates)
