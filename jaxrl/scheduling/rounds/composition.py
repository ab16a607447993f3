"""Which rules combine (docs/rollout-rules.md): the settings that exclude each other, each with the reason."""

from __future__ import annotations

from jaxrl.config.checks import NEEDS_WHOLE_BATCH
from jaxrl.config.options import Config
from jaxrl.schema.devices import possible_workers


def composition_problem(config: Config) -> str | None:
    """Why settings of batch rules do not go together, as a sentence, or None if they do."""
    rollout, score_when = config.rollout, config.reward.score_when
    switches = {
        "tail batching": rollout.tail_batching,
        "partial rollout": rollout.partial_rollout,
        "over-provisioning": rollout.over_provisioning,
    }
    racing = [name for name, section in switches.items() if section.enable]
    if len(racing) > 1:
        return f"{' and '.join(racing)} exclude each other: each decides what becomes of unfinished responses"
    if score_when == "rollout" and rollout.partial_rollout.enable:
        return (
            "partial rollout scores a prompt's samples when all of them have ended, whatever comes later: "
            "reward.score_when must be 'sample' or 'group' (which mean the same there), found 'rollout'"
        )
    if score_when == "rollout" and config.algorithm.filter_groups.enable and racing:
        return (
            f"dynamic sampling with {racing[0]} needs rewards during the rollout, which say when it ends: "
            "reward.score_when must be 'sample' or 'group', found 'rollout'"
        )
    if config.trainer.one_step_off and rollout.stale_tokens == "mask":
        return (
            "rollout.stale_tokens=mask excludes trainer.one_step_off: every token there is of an earlier version, so "
            "nothing would be left to learn from"
        )
    level = config.algorithm.rollout_correction.rollout_is
    if config.trainer.one_step_off and rollout.stale_tokens == "recorded" and level != "none":
        return (
            f"algorithm.rollout_correction.rollout_is={level} with trainer.one_step_off needs "
            "rollout.stale_tokens=recompute, found recorded: every token there is of an earlier version, so its ratio "
            "is taken to what was recorded at sampling, and every weight would be 1"
        )
    if rollout.ranking_groups.enable and (problem := _ranking_problem(config)) is not None:
        return problem
    return _stream_problem(config) if config.trainer.stream.enable else None


def is_timeless(config: Config) -> bool:
    """Whether a round brings the same batch whichever of its responses end first; so a clock may decide where and when
    they run."""
    rollout = config.rollout
    races = rollout.tail_batching.enable or rollout.partial_rollout.enable or rollout.over_provisioning.enable
    return not (races or config.algorithm.filter_groups.enable)


def begins_ahead(config: Config) -> bool:
    """Whether workers that are done with a round may begin with the next one, and so weights of two versions exist."""
    return config.rollout.ranking_groups.enable and is_timeless(config)


def _ranking_problem(config: Config) -> str | None:
    """Why prompts cannot be ranked."""
    option, rollout = "rollout.ranking_groups.enable", config.rollout
    needs = []
    if not config.trainer.one_step_off:
        needs.append(
            "trainer.one_step_off: workers that are done with a step's rollout go on with the next one's, while the "
            "update runs"
        )
    if not rollout.num_devices:
        needs.append(
            "rollout.num_devices: workers take the next step's weights while others still draw the present one's, so "
            "the rollout needs devices of its own"
        )
    if rollout.num_workers < 2:
        needs.append(f"rollout.num_workers to be at least 2, found {rollout.num_workers}: they share the groups")
    if needs:
        return f"{option} needs {'; and '.join(needs)}"
    if rollout.tail_batching.enable:
        return (
            f"{option} excludes rollout.tail_batching: both decide which prompts share a round's workers, the one by "
            "the last rollout's lengths and the other by those of this one"
        )
    if rollout.layout.adapts:
        return (
            f"{option} excludes rollout.layout.planner and rollout.layout.switch: groups are shared out by what "
            "workers of one layout take for them"
        )
    if rollout.max_active_requests:
        return (
            f"{option} excludes rollout.max_active_requests ({rollout.max_active_requests} samples): prompts are "
            "ranked when all of a round start together"
        )
    return None


def _stream_problem(config: Config) -> str | None:
    """Why gradients cannot be computed beside the rollout."""
    option, estimator = "trainer.stream.enable", config.algorithm.adv_estimator
    num_workers, own = config.rollout.num_workers, config.rollout.num_devices
    if estimator in NEEDS_WHOLE_BATCH:
        return (
            f"{option} excludes algorithm.adv_estimator={estimator}: its advantages have statistics over the whole "
            "batch, so no gradient can be computed before the rollout has ended"
        )
    if config.reward.score_when == "rollout":
        return (
            f"{option} needs rewards during the rollout, to compute gradients beside it: reward.score_when must be "
            "'sample' or 'group', found 'rollout'"
        )
    if config.mini_batch_prompts < config.data.train_batch_size:
        return (
            f"{option} needs one update per pass over the batch, because all gradients beside the rollout are of the "
            f"same weights: actor.ppo_mini_batch_size ({config.mini_batch_prompts} prompts) must be 0 or "
            f"data.train_batch_size ({config.data.train_batch_size} prompts)"
        )
    if own:
        return (
            f"{option} excludes rollout.num_devices ({own}): update and rollout have devices of their own there, and "
            "run side by side already"
        )
    if num_workers % 2:
        return (
            f"{option} needs rollout.num_workers to be even, found {num_workers}: half of the rollout's workers are "
            "freed, each of them whole"
        )
    devices = config.trainer.num_devices
    if devices and 2 not in possible_workers(devices):
        return (
            f"{option} needs two halves of the devices that are meshes like the whole: trainer.num_devices ({devices}) "
            "must be a power of two"
        )
    return None
