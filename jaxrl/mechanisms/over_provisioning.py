"""Over-provisioning: launch more than is needed, keep the first to end, and discard the rest.

A round launches ceil(prompt_factor · P0) prompts × ceil(response_factor · R0) responses, and the first P0 × R0 are the
batch. Prompts that lose leave the system as `filtered`, so it trains on fewer long responses than the data holds.

Source: RollPacker §3 and APRIL §2 name it as the baseline that they improve on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from jaxrl.scheduling.mechanism import UNFINISHED, Mechanism
from jaxrl.scheduling.rounds.batches import FreshBatches, launched
from jaxrl.scheduling.rounds.round import BatchSettings, RaceLimits
from jaxrl.schema.limits import Factor
from jaxrl.schema.section import Section

if TYPE_CHECKING:
    from jaxrl.config import Config


class OverProvisioning(FreshBatches, Mechanism):
    """Launches new prompts every round, more than a batch needs. Raises ValueError for impossible limits."""

    class Options(Section):
        """A baseline: launch more than is needed, keep what ends first, discard the rest for good."""

        enable: Annotated[bool, "Switch over-provisioning on."] = False
        prompt_factor: Annotated[Factor, "Prompts of a round, as a multiple of data.train_batch_size."] = 1.25
        response_factor: Annotated[Factor, "Samples per prompt of a round, as a multiple of rollout.n."] = 1.25

    name = title = "over-provisioning"
    option = "rollout.over_provisioning"
    decides = frozenset({UNFINISHED})
    races = True
    begins_ahead = False  # its batch depends on which responses end first

    def __init__(self, batch: BatchSettings, options: Options) -> None:
        num_prompts, num_responses = launched(options.prompt_factor, options.response_factor, batch)
        super().__init__(batch, RaceLimits(batch, num_responses, num_prompts - batch.num_prompts))

    @classmethod
    def drops_slowest(cls, config: Config) -> bool:
        return True

    @classmethod
    def batch_rule(cls, config: Config, batch: BatchSettings) -> Self:
        return cls(batch, config.rollout.over_provisioning)
