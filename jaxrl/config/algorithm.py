"""Options of `algorithm.*`: from rewards to advantages and how a loss is averaged, what rollout and trainer compute
differently (`rollout_correction`), and a teacher, whose log-probabilities of the sampled tokens are learnt.

Source of the rollout's correction: verl's page, and its names; Liu et al. 2025, "When Speed Kills Stability".
Departures: `rollout_is` is none by default; `rollout_rs` is a list; verl's `bypass_mode` is
`actor.old_logprobs=rollout`, and its `loss_type` is `actor.loss_mode`. docs/rollout-rules.md has verl's presets, by
their names, in these options.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval
from pydantic import Field

from jaxrl.config.updates import KlEstimate, LossAggregation
from jaxrl.mechanisms.dynamic_sampling import DynamicSampling
from jaxrl.schema.declared import Cap, Names, Or, shown
from jaxrl.schema.endpoint import PACE, EndpointOptions, endpoint_problem
from jaxrl.schema.limits import MAX_LENGTH, OpenFloatType
from jaxrl.schema.section import Section

AdvantageEstimator = Literal["grpo", "dr_grpo", "grpo_turns", "rloo", "reinforce_plus_plus", "gae", "gdpo", "none"]

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


class TeacherSection(EndpointOptions):
    """On-policy distillation: each sampled token's advantage has what a teacher thinks of it."""

    path: Annotated[
        str,
        Names("folder"),
        "The teacher, as model.path; it must have the policy's tokenizer; empty: none, or the one at the endpoint.",
    ] = ""
    coef: Annotated[
        float,
        Ge(0),
        "Weight of the KL to the teacher: a token's advantage loses this times log π_old - log π_teacher; with "
        "top_k, of the divergence in the loss.",
    ] = 1.0
    top_k: Annotated[
        int,
        Ge(0),
        Cap(4096, "that many ids and numbers are kept of each token"),
        "The teacher's likeliest tokens at each position, over which, with all others as one, the loss has a "
        "divergence; 0: advantages have the KL of the tokens that were drawn.",
    ] = 0
    beta: Annotated[
        float,
        Interval(ge=0, le=1),
        "Of the generalised Jensen-Shannon divergence; 0: KL(teacher || policy), 1: KL(policy || teacher).",
    ] = 0.5
    dtype: Annotated[
        OpenFloatType, "Type of its weights and of its forward pass; auto: bfloat16 on GPUs and TPUs, float32 on CPUs."
    ] = "auto"
    offload: Annotated[
        bool, "Keep its layers in the host's memory, from where each comes while the one before computes."
    ] = False
    context_key: Annotated[
        str, "Column of what the teacher reads besides, such as a solution, or data.answer_key; empty: nothing."
    ] = ""
    context_template: Annotated[
        str, "The question as the teacher reads it, with `{context}` and `{question}` where those go."
    ] = "{question}\n\n{context}"
    max_context_length: Annotated[
        int, Ge(1), MAX_LENGTH, "Tokens by which the teacher's prompt may be longer than data.max_prompt_length."
    ] = 512

    def problems(self, config: Any) -> Iterator[str]:
        if config.algorithm.adv_estimator == "none" and not config.has_teacher:
            yield (
                "algorithm.adv_estimator=none needs algorithm.teacher.path or algorithm.teacher.endpoint: no reward is "
                "learnt from, so nothing but a teacher says what to learn"
            )
        if config.algorithm.adv_estimator == "none" and config.algorithm.use_kl_in_reward:
            yield (
                "algorithm.use_kl_in_reward and algorithm.adv_estimator=none exclude each other: no reward is learnt "
                "from; use actor.use_kl_loss"
            )
        if self.endpoint and (problem := self._endpoint_problem(config)):
            yield problem
        if not config.has_teacher or not self.context_key:
            return
        if missing := [field for field in ("{context}", "{question}") if field not in self.context_template]:
            yield f"algorithm.teacher.context_template must contain {missing[0]}, found {shown(self.context_template)}"
        longest = config.max_model_length + self.max_context_length
        if self.path and config.max_row_length < longest:
            yield (
                f"{config.row_budget} must hold the teacher's longest sequence: "
                f"data.max_prompt_length + data.max_response_length + algorithm.teacher.max_context_length = {longest} "
                "tokens; actor.context_parallel_size parts it among devices"
            )

    def _endpoint_problem(self, config: Any) -> str | None:
        section, temperature = "algorithm.teacher", config.rollout.temperature
        if self.path:
            return f"{section}.path ({self.path}) and {section}.endpoint exclude each other: there is one teacher"
        if temperature != 1:
            return (
                f"{section}.endpoint needs rollout.temperature=1, found {temperature:g}: an endpoint gives the "
                "log-probabilities of its model as it is"
            )
        return endpoint_problem(section, self)

    def excludes_hosts(self, config: Any) -> tuple[str, str] | None:
        if self.path and self.offload:
            return (
                "algorithm.teacher.offload",
                "a host reads a layer as a whole, and keeps only its own part of it; leave it off, and the weights are "
                "split over the devices of all hosts",
            )
        return None

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        if not self.path:
            yield frozenset({"dtype", "offload"}), "algorithm.teacher.path is empty"
        if not self.endpoint:
            yield PACE | {"endpoint_model", "api_key_env"}, "algorithm.teacher.endpoint is empty"
        if not config.has_teacher:
            names = frozenset({"coef", "top_k", "beta", "context_key"})
            yield names, "algorithm.teacher.path and algorithm.teacher.endpoint are empty"
        elif not self.top_k:
            yield frozenset({"beta"}), "algorithm.teacher.top_k is 0"
        if not config.has_teacher or not self.context_key:
            names = frozenset({"context_template", "max_context_length"})
            yield names, "algorithm.teacher.context_key is empty"


class AlgorithmSection(Section):
    """From rewards to advantages, and how a loss is averaged."""

    adv_estimator: Annotated[
        AdvantageEstimator,
        "How advantages follow from rewards; grpo and dr_grpo: minus the mean of the prompt's samples, grpo_turns: "
        "each turn's minus the mean of those of all its samples' turns, added up from a turn on, rloo: minus the mean "
        "of the others, reinforce_plus_plus: each token's return, whitened over the batch, gae: each token's return "
        "above what a critic expects of it, whitened over the batch, gdpo: the sum of several rewards, each "
        "as by grpo, whitened over the batch, none: the distillation loss of algorithm.teacher only.",
    ] = "grpo"
    gamma: Annotated[
        float, Interval(ge=0, le=1), "Discount of a reward per token that it comes later, with adv_estimator gae."
    ] = 1.0
    lam: Annotated[
        float,
        Interval(ge=0, le=1),
        "GAE's λ, with adv_estimator gae; 1: a value is compared with the whole return, 0: with the next reward and "
        "value alone.",
    ] = 1.0
    norm_adv_by_std_in_grpo: Annotated[bool, "Divide GRPO's advantages by the standard deviation of the group."] = True
    gdpo_reward_keys: Annotated[
        list[str],
        "The rewards that adv_estimator gdpo takes apart, two at least; names of reward.parts, own_reward (the "
        "scorer's beside parts), or of numbers that a scorer returns beside its score.",
    ] = []
    gdpo_reward_weights: Annotated[
        list[float], "What each of gdpo_reward_keys counts once it is normalised; none: 1."
    ] = []
    loss_agg_mode: Annotated[
        LossAggregation,
        "How the losses of tokens become one; token-mean: their mean over a minibatch, seq-mean-token-sum and "
        "seq-mean-token-mean: the mean over its samples of each sample's sum or mean.",
    ] = "token-mean"
    use_kl_in_reward: Annotated[bool, "Take the KL to the reference model off the reward."] = False
    kl_penalty: Annotated[KlEstimate, "Estimate of the KL in the reward."] = "kl"
    kl_coef: Annotated[float, Ge(0), "Weight of the KL in the reward."] = 0.001
    filter_groups: DynamicSampling.Options = Field(default_factory=DynamicSampling.Options)
    teacher: TeacherSection = Field(default_factory=TeacherSection)
    rollout_correction: RolloutCorrectionSection = Field(default_factory=RolloutCorrectionSection)
