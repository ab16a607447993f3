"""The options `rollout.over_provisioning.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxrl.schema.limits import Factor


@dataclass(frozen=True)
class OverProvisioningSection:
    """A baseline: launch more than is needed, keep what ends first, discard the rest for good."""

    enable: Annotated[bool, "Switch over-provisioning on."] = False
    prompt_factor: Annotated[Factor, "Prompts of a round, as a multiple of data.train_batch_size."] = 1.25
    response_factor: Annotated[Factor, "Samples per prompt of a round, as a multiple of rollout.n."] = 1.25
