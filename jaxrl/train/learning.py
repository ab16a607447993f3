"""What a training step does with a batch: log-probabilities, advantages, gradients, updates. Imports no jax.

Purpose: `learn` is the training half of a step of the loop (`jaxrl.loop`), over a trainer that is real or simulated.
What gradients need besides is in `jaxrl.train.preparation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from jaxrl.config import Config
from jaxrl.train import preparation
from jaxrl.types import Group, TrainBatch

SKIPPED = "actor/skipped_updates"
_COUNTED = (SKIPPED, "actor/recompiles")  # of the updates of a step; all else is their mean


class Trainer(Protocol):
    """`jaxrl.train.step.Trainer`, or a simulation."""

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"]) -> list[np.ndarray]: ...

    def accumulate(self, batch: TrainBatch) -> None: ...

    def apply(self) -> dict[str, float]: ...


class Stream(Protocol):
    """Gradients beside a round.

    `expect`: groups of update `step` will be offered in the round that comes; None: none will. `offer`: gives scored
    groups that will be in the batch of update `step`, seen before or not; asked only where there is use for them.
    `close`: from here on the trainer's minibatch has the gradients of what it returns. `abandon`: drops what was taken,
    with the round. `offer` and `close`, and the backend's `wait`, raise `Interrupted` where gradients could not be
    computed."""

    def expect(self, step: int | None, /) -> None: ...

    def offer(self, groups: Callable[[], Sequence[Group]], step: int, /) -> None: ...

    def close(self) -> list[TrainBatch]: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Learnt:
    """A step's batch, the metrics of each of its updates, and the share of its prompts that were streamed; None: there
    is no stream."""

    batch: TrainBatch
    updates: list[dict[str, float]]
    streamed_share: float | None

    def metrics(self) -> dict[str, float]:
        """Of the step: means over the updates, and sums of counts."""
        values = {name: [update[name] for update in self.updates] for name in self.updates[-1]}
        measured = {name: float((np.sum if name in _COUNTED else np.mean)(each)) for name, each in values.items()}
        return measured if self.streamed_share is None else measured | {"actor/streamed_share": self.streamed_share}


def learn(
    config: Config,
    trainer: Trainer,
    stream: Stream | None,
    groups: list[Group],
    step: int,
    phase: Callable[[str], AbstractContextManager[None]],
    beat: Callable[[], None],
) -> Learnt:
    """Update `step`: `ppo_epochs` passes of minibatches of whole groups.

    Args:
      stream: has the gradients of some groups already; None: nothing has.
      phase: around the parts that take time, by their names. beat: called after each update.
    """
    parts: list[TrainBatch] = []
    if stream is not None:
        with phase("stream"):  # what it has begun ends first
            parts = stream.close()
    taken = {prompt.key for part in parts for prompt in part.prompts}
    others = [group for group in groups if group.prompt.key not in taken]
    rest = preparation.prepared(config, others, step, trainer.token_logprobs, phase)
    batch = preparation.joined(groups, [*parts, rest]) if parts else rest
    updates: list[dict[str, float]] = []
    with phase("update_actor"):
        for _ in range(config.actor.ppo_epochs):
            for part in preparation.minibatches(groups, batch, config.mini_batch_prompts):
                begun = not updates and bool(parts)  # then `rest` is what is left of the first minibatch
                trainer.accumulate(rest if begun else part)
                updates.append(trainer.apply())
                beat()
    return Learnt(batch, updates, None if stream is None else 1 - len(others) / len(groups))
