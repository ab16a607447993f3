"""What one-step-off goes with (RollPacker §6.7)."""

from collections.abc import Sequence

from jaxrl.config import Config
from jaxrl.mechanisms.room import Room


def _problem(config: Config, racing: Sequence[str]) -> str | None:
    stale, correction = config.rollout.stale_tokens, config.algorithm.rollout_correction
    if stale == "mask":
        return (
            "rollout.stale_tokens=mask excludes trainer.one_step_off: every token there is of an earlier version, so "
            "nothing would be left to learn from"
        )
    asked = f"rollout_is={correction.rollout_is}" if correction.rollout_is != "none" else "rollout_rs"
    if stale == "recorded" and correction.is_on and config.actor.old_logprobs == "recompute":
        return (
            f"algorithm.rollout_correction.{asked} with trainer.one_step_off needs rollout.stale_tokens=recompute, "
            "found recorded: every token there is of an earlier version, so its ratio is taken to what was recorded at "
            "sampling, every weight would be 1, and nothing would be rejected"
        )
    return None


ROOM = Room("one-step-off", "trainer.one_step_off", lambda config: config.trainer.one_step_off, problem=_problem)
