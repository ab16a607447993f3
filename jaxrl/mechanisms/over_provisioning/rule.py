"""Over-provisioning: launch more than is needed, keep what ends first, discard the rest for good.

A round launches ceil(prompt_factor · P0) prompts × ceil(response_factor · R0) responses, and the first P0 × R0 are the
batch. Prompts that lose leave the system as `filtered`.

Source: RollPacker §3 and APRIL §2 name it as the baseline that they improve on.
"""

from __future__ import annotations

from jaxrl.mechanisms.over_provisioning.options import OverProvisioningSection
from jaxrl.scheduling.rounds.batches import FreshBatches, provisioned
from jaxrl.scheduling.rounds.race import BatchSettings, RaceLimits

_OPTION = "rollout.over_provisioning"


class OverProvisioning(FreshBatches):
    """New prompts every round, more than a batch needs.

    Args:
      batch: P0, R0, and what else rules share.
      options: `rollout.over_provisioning`.

    Raises ValueError for impossible limits.
    """

    begins_ahead = False  # its batch depends on which responses end first

    def __init__(self, batch: BatchSettings, options: OverProvisioningSection) -> None:
        num_prompts = provisioned(f"{_OPTION}.prompt_factor", options.prompt_factor, batch.num_groups)
        num_responses = provisioned(f"{_OPTION}.response_factor", options.response_factor, batch.group_size)
        super().__init__(batch, RaceLimits(batch, num_responses, num_prompts - batch.num_groups))
