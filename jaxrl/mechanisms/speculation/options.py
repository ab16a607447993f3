"""The options `rollout.speculation.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Interval

from jaxrl.schema.declared import MAX_INT, Cap, Checked


@dataclass(frozen=True)
class SpeculationSection(Checked):
    """Drafts from a prompt's earlier responses, verified several tokens a step; the tokens stay the same."""

    enable: Annotated[bool, "Switch history speculation on."] = False
    epochs: Annotated[
        int, Ge(1), Cap(64, "every response of them is kept in memory"), "Draft from a prompt's last so many rollouts."
    ] = 1
    max_prefix: Annotated[
        int, Interval(ge=1, le=64), "The last tokens of a response that are looked for in its prompt's history."
    ] = 7
    min_prefix: Annotated[int, Interval(ge=1, le=64), "The fewest of these tokens, where more are not found."] = 3
    min_window: Annotated[int, Interval(ge=1, le=256), "Tokens that a row drafts at first, and after a rejection."] = 2
    window_step: Annotated[
        int, Interval(ge=0, le=256), "By how many tokens the window grows when all drafted tokens were accepted."
    ] = 2
    max_window: Annotated[int, Interval(ge=1, le=256), "The most tokens that a row drafts in a step."] = 32
    verify_tokens: Annotated[
        int,
        Ge(0),
        Cap(65536, "the activations of all of them exist at once"),
        "Drafted tokens that a step may verify, per dp group; its rows share them. 0: what suits the devices.",
    ] = 0
    max_batch: Annotated[
        int,
        Ge(0),
        "The most rows of a dp group with which a plan verifies drafts; 0: what rollout.layout.profile says of the "
        "present rate of acceptance, and without a profile as many as verify_tokens allows.",
    ] = 0
    max_bytes: Annotated[
        int, Ge(1), "Bytes of host memory for history and its indexes; the oldest responses go first."
    ] = 1 << 30
    num_indexes: Annotated[
        int,
        Ge(0),
        Cap(16384, "each has room for the longest history"),
        "Prompts whose history is on the devices at once, per dp group; 0: one for each row.",
    ] = 0

    def problem(self, config: Any) -> str | None:
        option, data, n = "rollout.speculation", config.data, config.rollout.n
        for least, most in (("min_prefix", "max_prefix"), ("min_window", "max_window")):
            if getattr(self, least) > getattr(self, most):
                return (
                    f"{option}.{least} ({getattr(self, least)} tokens) must be at most {option}.{most} "
                    f"({getattr(self, most)} tokens)"
                )
        text = n * self.epochs * (data.max_response_length + self.max_prefix + 1)
        prefixes = self.max_prefix - self.min_prefix + 1
        if self.enable and text * prefixes > MAX_INT:
            return (
                f"{option}: rollout.n ({n}) × {option}.epochs ({self.epochs}) responses of data.max_response_length "
                f"({data.max_response_length} tokens) with {prefixes} lengths of prefixes ({option}.min_prefix to "
                f"{option}.max_prefix) must be at most {MAX_INT} entries of an index, found {text * prefixes}"
            )
        return None
