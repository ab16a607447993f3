"""One-step-off of a simulated run."""

from jaxrl.mechanisms.one_step_off.session import OneStepOff
from jaxrl.mechanisms.simulated_parts import SimulatedParts
from jaxrl.sim.clock import SimulatedConcurrently


def build(parts: SimulatedParts) -> OneStepOff | None:
    """The mechanism; None: it is off."""
    if not parts.config.trainer.one_step_off:
        return None
    beside = SimulatedConcurrently(parts.clock) if parts.config.rollout.num_devices else None
    return OneStepOff(beside, parts.phases.phase)
