"""Tail batching from its options."""

from jaxrl.config import Config
from jaxrl.mechanisms.tail_batching.rule import TailBatching
from jaxrl.scheduling.rounds.race import BatchSettings


def rule(config: Config, batch: BatchSettings) -> TailBatching:
    """A new rule, with an empty queue. Raises ValueError for impossible limits."""
    return TailBatching(batch, config.rollout.tail_batching)
