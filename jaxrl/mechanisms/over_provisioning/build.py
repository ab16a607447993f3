"""Over-provisioning from its options."""

from jaxrl.config import Config
from jaxrl.mechanisms.over_provisioning.rule import OverProvisioning
from jaxrl.scheduling.rounds.race import BatchSettings


def rule(config: Config, batch: BatchSettings) -> OverProvisioning:
    """A new rule. Raises ValueError for impossible limits."""
    return OverProvisioning(batch, config.rollout.over_provisioning)
