"""Over-provisioning: launch more than is needed, keep what ends first, discard the rest for good.

A round launches ceil(prompt_factor · P0) prompts × ceil(response_factor · R0) responses, and the first P0 × R0 are the
batch. Prompts that lose leave the system as `filtered`, so it trains on fewer long responses than the data holds.

Source: RollPacker §3 and APRIL §2 name it as the baseline that they improve on.
"""

from __future__ import annotations

from jaxrl.mechanisms.over_provisioning.options import OverProvisioningSection
from jaxrl.scheduling.rounds.batches import FreshBatches, launched
from jaxrl.scheduling.rounds.race import BatchSettings, RaceLimits


class OverProvisioning(FreshBatches):
    """New prompts every round, more than a batch needs. Raises ValueError for impossible limits."""

    name = "over-provisioning"
    begins_ahead = False  # its batch depends on which responses end first

    def __init__(self, batch: BatchSettings, options: OverProvisioningSection) -> None:
        num_prompts, num_responses = launched(
            "rollout.over_provisioning", options.prompt_factor, options.response_factor, batch
        )
        super().__init__(batch, RaceLimits(batch, num_responses, num_prompts - batch.num_groups))
