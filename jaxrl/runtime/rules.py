"""The rules that a configuration asks for, or why its settings do not go together.

Purpose: the switches `rollout.tail_batching`, `rollout.partial_rollout`, `rollout.over_provisioning`,
`algorithm.filter_groups` and `trainer.one_step_off` as one `BatchRule`, for real and simulated runs alike. What each
does and what composes with what: docs/rollout-rules.md.
"""

from __future__ import annotations

from jaxrl.config import Config, ConfigError
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches, check_composition
from jaxrl.scheduling.rounds.partial_rollout import PartialRollout, PartialRolloutConfig
from jaxrl.scheduling.rounds.race import DynamicSampling
from jaxrl.scheduling.rounds.tail_batching import TailBatching, TailBatchingConfig


def batch_rule(config: Config) -> BatchRule:
    """A new rule, with nothing carried. Raises ConfigError for settings that exclude each other."""
    _refuse(config)
    try:
        return _build(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def carried(name: str, num_prompts: int) -> dict[str, str]:
    """What the summary of a run says of prompts that were begun and not trained on; nothing where there are none."""
    return {"prompts begun and not trained on": f"{num_prompts} ({name})"} if num_prompts else {}


def _refuse(config: Config) -> None:
    rollout, one_step_off = config.rollout, config.trainer.one_step_off
    partial = rollout.partial_rollout
    reason = check_composition(
        tail_batching=rollout.tail_batching.enable,
        partial_rollout=partial.enable,
        over_provisioning=rollout.over_provisioning.enable,
        one_step_off=one_step_off,
        dynamic_sampling=config.algorithm.filter_groups.enable,
        score_when=config.reward.score_when,
        group_size=rollout.n,
        max_staleness=None if partial.max_staleness < 0 else partial.max_staleness,
    )
    if reason is None and one_step_off and rollout.stale_tokens == "mask":
        reason = (
            "rollout.stale_tokens=mask excludes trainer.one_step_off: every token there is of an earlier version, so "
            "nothing would be left to learn from"
        )
    if reason is not None:
        raise ConfigError(reason)


def _build(config: Config) -> BatchRule:
    rollout, num_groups, size = config.rollout, config.data.train_batch_size, config.rollout.n
    score_when, max_active = config.reward.score_when, rollout.max_active_requests
    filtering = config.algorithm.filter_groups
    sampling = None
    if filtering.enable:
        sampling = DynamicSampling(filtering.max_unscored_groups, filtering.max_num_gen_batches)
    if rollout.tail_batching.enable:
        tail = rollout.tail_batching
        return TailBatching(
            TailBatchingConfig(
                num_groups,
                size,
                tail.prompt_factor,
                tail.response_factor,
                tail.max_age_steps,
                tail.at_end,
                tail.keep_finished,
                score_when,
                sampling,
                max_active,
            )
        )
    if rollout.partial_rollout.enable:
        partial = rollout.partial_rollout
        return PartialRollout(
            PartialRolloutConfig(
                num_groups,
                size,
                over_provision=partial.over_provision,
                max_staleness=None if partial.max_staleness < 0 else partial.max_staleness,
                max_restarts=partial.max_restarts,
                version_lag=int(config.trainer.one_step_off),
                at_end=partial.at_end,
                dynamic_sampling=sampling,
                max_active_requests=max_active,
            )
        )
    over = rollout.over_provisioning
    return FreshBatches(
        num_groups,
        size,
        prompt_factor=over.prompt_factor if over.enable else 1.0,
        response_factor=over.response_factor if over.enable else 1.0,
        score_when=score_when,
        dynamic_sampling=sampling,
        max_active_requests=max_active,
    )
