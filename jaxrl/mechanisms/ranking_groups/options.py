"""The options `rollout.ranking_groups.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jaxrl.schema.declared import Checked


@dataclass(frozen=True)
class RankingGroupsSection(Checked):
    """Prompts ranked by the lengths of their last responses; workers get long and short ones in turn."""

    enable: Annotated[bool, "Switch ranking groups on."] = False
    num_groups: Annotated[int, Interval(ge=2, le=65536), "Groups that a step's ranked prompts are cut into."] = 8
    outlier_share: Annotated[
        float, Interval(ge=0, le=1), "A response may move if it is among the last so many of its group, as a share."
    ] = 0.1
    min_growth: Annotated[
        float,
        Interval(ge=1, le=100),
        "A response moves if it is longer than the largest median of its group's prompts in their last rollout by this "
        "factor at least, or by the 75th percentile of how much the last epoch's responses grew.",
    ] = 1.1
    move: Annotated[
        Literal["auto", "recompute", "kv"],
        "How a response moves to another worker: its KV computed again, or copied; auto: what is predicted to be "
        "cheaper.",
    ] = "auto"
    two_tier: Annotated[bool, "Groups get as many workers as their lengths need; off: as many as any other."] = True

    def excludes_hosts(self, config: Any) -> tuple[str, str] | None:
        if not self.enable or self.move != "kv":
            return None
        return "rollout.ranking_groups.move (kv)", "the KV of a response stays on its host; use recompute"
