"""The batch rule and the batcher that a configuration asks for, or why its settings exclude each other.

Purpose: the switches of docs/rollout-rules.md as one `BatchRule`, and the options of continuous batching, for real and
simulated runs alike. That page says what each does and which of them combine.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.config import Config, ConfigError
from jaxrl.config.functions import read_user_file, user_function
from jaxrl.config.hosts import with_workers_of_hosts
from jaxrl.mechanisms.dynamic_sampling.options import FilterGroupsSection
from jaxrl.mechanisms.partial_rollout.buffer_filter import BufferFilter
from jaxrl.mechanisms.partial_rollout.options import PartialRolloutSection
from jaxrl.mechanisms.partial_rollout.rule import PartialRollout
from jaxrl.mechanisms.speculation.options import SpeculationSection
from jaxrl.mechanisms.tail_batching.rule import TailBatching
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches
from jaxrl.scheduling.rounds.composition import composition_problem
from jaxrl.scheduling.rounds.group_filter import FILTER_ARGUMENTS, KeepsGroup, user_filter
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.draft_rule import DraftConfig, StepCosts, Window, default_verify_tokens
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.paced import PacedWorkers
from jaxrl.scheduling.tokens.progress import PlanTimes
from jaxrl.scheduling.tokens.workers import Ticks, Workers, step_ticks

LOOKAHEAD_PLANS = 4
"""Plans of a worker until it hears of what ended in another one: that one reports once it has collected its plan,
process 0 merges once it has collected its own, and this one looks once it has collected its own; and one to spare."""


def batch_rule(config: Config) -> BatchRule:
    """A new rule, with nothing carried. Raises ConfigError for settings that exclude each other."""
    problem = composition_problem(config)
    if problem is not None:
        raise ConfigError(problem)
    rollout = config.rollout
    try:
        batch = BatchSettings(
            config.data.train_batch_size,
            rollout.n,
            config.reward.score_when,
            config.algorithm.filter_groups,
            rollout.max_active_requests,
            version_lag=int(config.trainer.one_step_off),
            max_response_length=config.data.max_response_length,
            gen_batch_size=config.data.gen_batch_size,
            keeps_group=_group_filter(config.algorithm.filter_groups),
        )
        if rollout.tail_batching.enable:
            return TailBatching(batch, rollout.tail_batching)
        if rollout.partial_rollout.enable:
            return PartialRollout(batch, rollout.partial_rollout, _buffer_filter(rollout.partial_rollout))
        return FreshBatches(batch, rollout.over_provisioning)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _buffer_filter(options: PartialRolloutSection) -> BufferFilter | None:
    if not options.buffer_filter_path:
        return None
    names = "rollout.partial_rollout.buffer_filter_path", "rollout.partial_rollout.buffer_filter_name"
    file = read_user_file(names[0], options.buffer_filter_path)
    return user_function(names, file, options.buffer_filter_name, ("groups", "policy_version"))


def _group_filter(options: FilterGroupsSection) -> KeepsGroup | None:
    if not options.enable or not options.path:
        return None
    names = "algorithm.filter_groups.path", "algorithm.filter_groups.name"
    file = read_user_file(names[0], options.path)
    function = user_function(names, file, options.name, FILTER_ARGUMENTS)
    return user_filter(function, f"{names[0]}: {file.path}: {options.name}")


def draft_config(config: Config, platform: str, costs: StepCosts | None = None) -> DraftConfig | None:
    """When plans verify drafts, by `rollout.speculation`; None: never.

    Args:
      platform: of the rollout's devices (`cpu`, `gpu`, ...).
      costs: what steps take; None: not known.
    """
    spec = config.rollout.speculation
    if not spec.enable:
        return None
    return DraftConfig(draft_window(spec), spec.verify_tokens or default_verify_tokens(platform), spec.max_batch, costs)


def draft_window(options: SpeculationSection) -> Window:
    """How the windows of `rollout.speculation` move."""
    return Window(options.min_window, options.window_step, options.max_window)


def batcher_config(config: Config, drafts: DraftConfig | None = None) -> BatcherConfig:
    """What continuous batching takes from section `rollout`; `drafts`: of `draft_config`, where requests may have a
    history."""
    return BatcherConfig(
        decode_steps=config.rollout.decode_steps,
        max_model_len=config.max_model_length,
        spread_samples=config.rollout.sample_placement == "spread",
        drafts=drafts,
    )


def lookahead(config: Config, ticks: Ticks = step_ticks) -> int | None:
    """Ticks after which what a round commands takes effect (`jaxrl.scheduling.tokens.order`): those of
    `LOOKAHEAD_PLANS` plans of the most steps and prefill tokens. None where it takes effect at once: with one worker,
    and where requests move between workers, which ranking groups and the stream trainer do."""
    rollout = config.rollout
    num_workers = with_workers_of_hosts(rollout.num_workers, config.hosts.num)
    if num_workers == 1 or rollout.ranking_groups.enable or config.trainer.stream.enable:
        return None
    rows, steps, prefill = rollout.max_num_seqs, rollout.decode_steps, rollout.max_num_batched_tokens
    fullest = PlanTimes(0, steps, 0.0, prefill, rows, rows * config.max_model_length / 2, was_queued=True)
    return LOOKAHEAD_PLANS * ticks(0, fullest)


def workers_of(
    config: Config, engines: Sequence[Engine], ticks: Ticks = step_ticks, process: int = 0
) -> Workers | PacedWorkers:
    """The workers of a process; `engines`: its own, in the order of their numbers. Every process has equally many."""
    rollout, ahead = config.rollout, lookahead(config, ticks)
    if ahead is None:
        return Workers(engines, rollout.deal, ticks)
    count, first = with_workers_of_hosts(rollout.num_workers, config.hosts.num), process * len(engines)
    return PacedWorkers(dict(enumerate(engines, first)), ahead, count, rollout.deal, ticks)


def carried(name: str, num_prompts: int) -> dict[str, str]:
    """The summary's entry about prompts that were begun and not trained on; empty if there are none."""
    return {"prompts begun and not trained on": f"{num_prompts} ({name})"} if num_prompts else {}
