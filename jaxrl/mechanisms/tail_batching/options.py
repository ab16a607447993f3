"""The options `rollout.tail_batching.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from jaxrl.schema.limits import AtEnd, Factor


@dataclass(frozen=True)
class TailBatchingSection:
    """Short rounds with speculation, and long rounds of the prompts that came last in them."""

    enable: Annotated[bool, "Switch tail batching on."] = False
    prompt_factor: Annotated[Factor, "Prompts of a short round, as a multiple of data.train_batch_size."] = 1.25
    response_factor: Annotated[Factor, "Samples per prompt of a short round, as a multiple of rollout.n."] = 1.25
    max_age_steps: Annotated[int, Ge(0), "The most steps from a prompt's first launch to its batch; 0: no bound."] = 0
    at_end: Annotated[
        AtEnd, "What becomes of the queue when training ends; flush: the last rounds empty it, leave: it stays."
    ] = "flush"
