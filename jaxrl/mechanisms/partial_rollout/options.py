"""The options `rollout.partial_rollout.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from jaxrl.schema.declared import Names
from jaxrl.schema.limits import AtEnd, Factor


@dataclass(frozen=True)
class PartialRolloutSection:
    """A round stops at enough complete prompts, and the next round goes on with the others."""

    enable: Annotated[bool, "Switch active partial rollout on."] = False
    over_provision: Annotated[Factor, "Prompts under way, as a multiple of data.train_batch_size."] = 2.0
    max_staleness: Annotated[int, Ge(-1), "Versions that a trained token may lag behind the policy; -1: no cap."] = -1
    max_restarts: Annotated[
        int, Ge(0), "The most times that a sample may lose its tokens and start again; rounds wait for it in time."
    ] = 1
    at_end: Annotated[
        AtEnd, "What becomes of the buffer when training ends; flush: the last rounds empty it, leave: it stays."
    ] = "flush"
    buffer_filter_path: Annotated[
        str,
        Names("file"),
        "A Python file with a function that says what becomes of buffered prompts in a round; empty: none.",
    ] = ""
    buffer_filter_name: Annotated[str, "The function in buffer_filter_path, called with groups and policy_version."] = (
        "buffer_filter"
    )
