"""Options for what rollout and trainer compute differently (`algorithm.rollout_correction`), with verl's names.

Source: verl's page on rollout correction; Liu et al. 2025, "When Speed Kills Stability". Departures: `rollout_is` is
none by default; `rollout_rs` is a list; verl's `bypass_mode` is `actor.old_logprobs=rollout`, and its `loss_type` is
`actor.loss_mode`. docs/rollout-rules.md has verl's presets, by their names, in these options.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Gt

from jaxrl.schema.declared import Or, shown
from jaxrl.schema.section import Section

Criterion = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]

_SECTION = "algorithm.rollout_correction"

MOST_K3 = 0.01
"""`rollout_corr/k3_kl`, nats a token, above which a quantised rollout is another policy: what verl's presets with k3
let pass."""


class RolloutCorrectionSection(Section):
    """Importance sampling and rejection, where rollout and trainer compute different probabilities."""

    rollout_is: Annotated[
        Literal["none", "token", "sequence"],
        "What has the weight min(π_old / π_rollout, threshold) in the policy loss; none: nothing, token: each token "
        "its own, sequence: each sample, the product over its tokens.",
    ] = "none"
    rollout_is_threshold: Annotated[
        float,
        Gt(0),
        Or(math.inf, "no truncation"),
        "The most that a weight may be; .inf: weights are not truncated.",
    ] = 2.0
    rollout_rs: Annotated[
        list[Criterion],
        "What is left out of the losses (rejection); token_*: tokens, seq_*: samples by the sum, mean or maximum over "
        "their tokens; with l = log(π_old / π_rollout), k1: by -l, k2: by l²/2, k3: by e^l - 1 - l.",
    ] = []
    rollout_rs_threshold: Annotated[
        list[str],
        "For each of rollout_rs, or for all, what is kept; k1: ratios from `lower_upper`, such as 0.5_2.0, or up to "
        "one number and down to its reciprocal, k2 and k3: values up to a number, such as '0.01'.",
    ] = []

    @property
    def is_on(self) -> bool:
        return self.rollout_is != "none" or bool(self.rollout_rs)

    @property
    def criteria(self) -> dict[str, tuple[float, float]]:
        """The ranges that `rollout_rs` keeps, by name: the least and the largest value; of k1 logarithms of ratios.

        Raises ValueError for names given twice, or thresholds that do not fit them.
        """
        names, given = self.rollout_rs, self.rollout_rs_threshold
        if len(set(names)) < len(names):
            raise ValueError(f"{_SECTION}.rollout_rs names {next(n for n in names if names.count(n) > 1)} twice")
        if names and len(given) not in (1, len(names)):
            raise ValueError(
                f"{_SECTION}.rollout_rs_threshold must have one entry, or one for each of rollout_rs ({len(names)}), "
                f"found {len(given)}"
            )
        return {name: _bounds(name, given[i % len(given)]) for i, name in enumerate(names)}

    def problems(self, config: Any) -> Iterator[str]:
        try:
            _ = self.criteria
        except ValueError as error:
            yield str(error)
        actor = config.actor
        if self.rollout_is != "none" and actor.old_logprobs == "rollout" and actor.loss_mode != "reinforce":
            yield (
                f"{_SECTION}.rollout_is={self.rollout_is} needs actor.old_logprobs=recompute, found rollout: the ratio "
                f"of actor.loss_mode={actor.loss_mode} is then taken to what the rollout recorded, which corrects for "
                "the same once already (with actor.loss_mode=reinforce there is no ratio)"
            )

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        if self.rollout_is == "none":
            yield frozenset({"rollout_is_threshold"}), f"{_SECTION}.rollout_is is none"
        if not self.rollout_rs:
            yield frozenset({"rollout_rs_threshold"}), f"{_SECTION}.rollout_rs is empty"


def uncorrected(config: Any) -> str | None:
    """The warning about a quantised rollout whose mismatch nothing corrects."""
    if not config.rollout.quantized or config.algorithm.rollout_correction.is_on:
        return None
    if config.actor.old_logprobs == "rollout" and config.actor.loss_mode != "reinforce":
        return None  # the ratio is taken to what the rollout recorded
    return (
        f"{config.rollout.quantized}: the loss does not correct for what that changes; {_SECTION}.rollout_is=token "
        "weights each token by min(π_old / π_rollout, 2)"
    )


def _bounds(name: str, text: str) -> tuple[float, float]:
    is_ratio = name.endswith("k1")
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) in ((1, 2) if is_ratio else (1,)) and all(0 < number < math.inf for number in numbers):
        low, high = (numbers[0], numbers[-1]) if len(numbers) == 2 else (1 / numbers[0], numbers[0])
        if not is_ratio:
            return -math.inf, high
        if low < high:
            return math.log(low), math.log(high)
    rule = "two ratios above 0 as lower_upper, or one above 1" if is_ratio else "a number above 0"
    raise ValueError(f"{_SECTION}.rollout_rs_threshold for {name} must be {rule}, found {shown(text)}")
