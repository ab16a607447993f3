"""One-step-off of a real run, from its options."""

from contextlib import closing

from jaxrl.mechanisms.one_step_off.concurrent_phases import ConcurrentPhases
from jaxrl.mechanisms.one_step_off.session import OneStepOff
from jaxrl.mechanisms.parts import RunParts


def build(parts: RunParts) -> OneStepOff | None:
    """The mechanism; None: it is off. With devices of the rollout's own, rollout and update run at the same time."""
    if not parts.config.trainer.one_step_off:
        return None
    beside = parts.stack.enter_context(closing(ConcurrentPhases())) if parts.config.rollout.num_devices else None
    return OneStepOff(beside, parts.timeline.phase)
