"""The options `trainer.stream.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from jaxrl.schema.declared import Checked


@dataclass(frozen=True)
class StreamSection(Checked):
    """The stream trainer: gradients of complete prompts on half of the rollout's devices, while the others decode."""

    enable: Annotated[bool, "Switch the stream trainer on."] = False
    min_done: Annotated[
        float, Interval(gt=0, le=1), "The share of a round's samples that must be done before workers are freed."
    ] = 0.2
    max_done: Annotated[
        float, Interval(gt=0, le=1), "The share of a round's samples after which no worker is freed any more."
    ] = 0.5
    done_step: Annotated[
        float, Interval(gt=0, le=1), "The share of a round's samples between two looks at whether to free workers."
    ] = 0.05
    kv_margin: Annotated[
        float,
        Interval(ge=0, lt=1),
        "Share of the KV pools that stay which the projected peak must leave free.",
    ] = 0.1
    trigger: Annotated[
        Literal["adaptive", "fixed"],
        "When workers are freed; adaptive: at the first look at which the projected peak of KV fits, fixed: at the "
        "first look (to compare).",
    ] = "adaptive"
    counts: Annotated[
        Literal["samples", "prompts"],
        "What min_done, max_done and done_step are shares of: samples that have ended, or prompts that have no sample "
        "under way any more.",
    ] = "samples"
    max_prompts: Annotated[
        int,
        Ge(0),
        "Prompts whose gradients begin together, at most; what has begun when the round ends holds up the update. 0: "
        "all that there are.",
    ] = 2
    pace: Annotated[
        float,
        Ge(0),
        "Tokens whose gradients the devices of a freed dp group are taken to compute while the others decode a step: "
        "decides how much is streamed. 0: 16, on a CPU 4.",
    ] = 0.0
    short_rounds: Annotated[bool, "Free workers in tail batching's short rounds too, not in its long ones alone."] = (
        False
    )

    def problem(self, config: Any) -> str | None:
        if self.min_done > self.max_done:
            return (
                f"trainer.stream.min_done ({self.min_done}) must be at most trainer.stream.max_done "
                f"({self.max_done}): between them workers may be freed"
            )
        return None

    def excludes_hosts(self, config: Any) -> tuple[str, str] | None:
        why = "weights and gradients that go between the halves of the devices cannot cross between hosts"
        return ("trainer.stream.enable", why) if self.enable else None
