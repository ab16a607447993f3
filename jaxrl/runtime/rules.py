"""The batch rule and the batcher that a configuration asks for, or why its settings exclude each other.

Purpose: the switches of docs/rollout-rules.md as one `BatchRule`, and the options of continuous batching, for real and
simulated runs alike. That page says what each does and which of them combine.
"""

from __future__ import annotations

from jaxrl.config import Config, ConfigError
from jaxrl.config.functions import read_user_file, user_function
from jaxrl.config.options import FilterGroupsSection
from jaxrl.config.rollouts import PartialRolloutSection, SpeculationSection
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches
from jaxrl.scheduling.rounds.buffer_filter import BufferFilter
from jaxrl.scheduling.rounds.composition import composition_problem
from jaxrl.scheduling.rounds.group_filter import FILTER_ARGUMENTS, KeepsGroup, user_filter
from jaxrl.scheduling.rounds.partial_rollout import PartialRollout
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.scheduling.rounds.tail_batching import TailBatching
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.draft_rule import DraftConfig, StepCosts, Window, default_verify_tokens


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


def carried(name: str, num_prompts: int) -> dict[str, str]:
    """The summary's entry about prompts that were begun and not trained on; empty if there are none."""
    return {"prompts begun and not trained on": f"{num_prompts} ({name})"} if num_prompts else {}
