"""Which rules combine (docs/rollout-rules.md): the settings that exclude each other, each with the reason."""

from __future__ import annotations

from jaxrl.config.options import Config


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
    return None
