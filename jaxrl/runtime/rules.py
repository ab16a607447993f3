"""The batcher and the workers that a configuration asks for, of real and simulated runs alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxrl.config import Config
from jaxrl.mechanisms.room import WORKERS
from jaxrl.mechanisms.table import rooms_of
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers, Ticks, step_ticks
from jaxrl.scheduling.tokens.plan import VerifyRule
from jaxrl.scheduling.tokens.progress import PlanTimes
from jaxrl.scheduling.tokens.synchronized import SynchronizedWorkers

LOOKAHEAD_PLANS = 4
"""Plans of a worker until it receives what ended in another one: that one sends it once it has collected its plan,
process 0 merges once it has collected its own, and this one looks once it has collected its own; and one to spare."""


def batcher_config(config: Config, verify_rule: Callable[[], VerifyRule] | None = None) -> BatcherConfig:
    """What continuous batching takes from section `rollout`; `verify_rule`: as in `BatcherConfig`."""
    return BatcherConfig(
        decode_steps=config.rollout.decode_steps,
        max_model_len=config.max_model_length,
        spread_samples=config.rollout.sample_placement == "spread",
        verify_rule=verify_rule,
    )


def lookahead(config: Config, ticks: Ticks = step_ticks) -> int | None:
    """Ticks after which what a round commands takes effect (`jaxrl.scheduling.tokens.event_merger`): those of
    `LOOKAHEAD_PLANS` plans of the most steps and prefill tokens. None where it takes effect at once: with one worker in
    one process, and where requests move between workers."""
    rollout = config.rollout
    if (config.num_workers, config.hosts.num) == (1, 1) or any(WORKERS in room.changes for room in rooms_of(config)):
        return None
    if config.num_workers == 1:
        return 1  # no other worker is to be heard of, and at a round's end none is ahead
    rows, steps, prefill = rollout.max_num_seqs, rollout.decode_steps, rollout.max_num_batched_tokens
    fullest = PlanTimes(0, steps, 0.0, prefill, rows, rows * config.max_model_length / 2, was_queued=True)
    return LOOKAHEAD_PLANS * ticks(0, fullest)


def workers_of(
    config: Config, engines: Sequence[Engine], ticks: Ticks = step_ticks, process: int = 0
) -> LocalWorkers | SynchronizedWorkers:
    """The workers of a process; `engines`: its own, in the order of their numbers. Every process has equally many, or
    one with others, of which the first speaks for it."""
    rollout, ahead = config.rollout, lookahead(config, ticks)
    if ahead is None:
        return LocalWorkers(engines, rollout.deal, ticks)
    group, member = divmod(process, rollout.hosts_per_worker)
    numbered = dict(enumerate(engines, group * len(engines)))
    is_shared, speaks = rollout.hosts_per_worker > 1 and config.hosts.launcher != "ray", member == 0
    return SynchronizedWorkers(
        numbered, ahead, config.num_workers, rollout.deal, ticks, is_shared=is_shared, speaks=speaks
    )


def carried(name: str, num_prompts: int) -> dict[str, str]:
    """The summary's entry about prompts that were begun and not trained on; empty if there are none."""
    return {"prompts begun and not trained on": f"{num_prompts} ({name})"} if num_prompts else {}
