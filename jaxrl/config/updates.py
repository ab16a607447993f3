"""Options of the updates: of the actor, of the critic where there is one (`algorithm.adv_estimator=gae`), and what
`jaxrl sft` and `jaxrl dpo` learn from."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval
from pydantic import Field

from jaxrl.schema.declared import Cap, Or
from jaxrl.schema.devices import MAX_DEVICES
from jaxrl.schema.limits import OpenFloatType
from jaxrl.schema.section import Section

KlEstimate = Literal["kl", "abs", "mse", "low_var_kl"]
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]

MAX_LR = Cap(1, "AdamW moves every weight by about so much per update")
_BELOW_ONE = Cap(0.999999, "a larger one is 1 as a float32, and the update a division by 0")


class OptimSection(Section):
    """The optimizer and its learning rate."""

    name: Annotated[
        Literal["adamw", "muon"],
        "The optimizer; adamw, muon: orthogonalised momentum for the matrices of the layers, scaled to take the same "
        "learning rates, AdamW for all else.",
    ] = "adamw"
    momentum: Annotated[
        float, Interval(ge=0, lt=1), _BELOW_ONE, "Decay of Muon's running mean of a gradient, per update."
    ] = 0.95
    state_dtype: Annotated[
        Literal["float32", "bfloat16", "int8"],
        "Type of the optimizer's moments between updates; float32: as actor.param_dtype, bfloat16: rounded "
        "stochastically, int8: the same in one byte, with a magnitude for each block of up to 256 numbers.",
    ] = "float32"
    lr: Annotated[float, Ge(0), MAX_LR, "Learning rate, at its highest."] = 1e-6
    lr_warmup_steps: Annotated[
        int,
        Ge(0),
        "Optimizer updates over which the learning rate rises; the i-th of n has i / n of it (verl's first has none).",
    ] = 0
    lr_scheduler_type: Annotated[
        Literal["constant", "cosine", "linear"], "How the learning rate changes after its warm-up."
    ] = "constant"
    min_lr_ratio: Annotated[
        float, Interval(ge=0, le=1), "Where cosine and linear end, as a share of the highest learning rate."
    ] = 0.0
    weight_decay: Annotated[float, Ge(0), "Weight decay, of all weights."] = 0.0
    beta1: Annotated[float, Interval(ge=0, lt=1), _BELOW_ONE, "Decay of the gradient's running mean, per update."] = 0.9
    beta2: Annotated[
        float, Interval(ge=0, lt=1), _BELOW_ONE, "Decay of the squared gradient's running mean, per update."
    ] = 0.999


class CriticOptimSection(Section):
    """Options of the critic's optimizer alone; all others are those in actor.optim."""

    lr: Annotated[float, Ge(0), MAX_LR, "Learning rate, at its highest."] = 1e-5
    lr_warmup_steps: Annotated[int, Ge(0), "Optimizer updates over which the learning rate rises."] = 0
    weight_decay: Annotated[float, Ge(0), "Weight decay, of all weights."] = 0.0


class ActorSection(Section):
    """The update of the policy."""

    optim: OptimSection = Field(default_factory=OptimSection)
    dtype: Annotated[
        OpenFloatType, "Type of the forward and backward pass; auto: bfloat16 on GPUs and TPUs, float32 on CPUs."
    ] = "auto"
    param_dtype: Annotated[Literal["float32", "float64"], "Type of master weights, optimizer state and gradients."] = (
        "float32"
    )
    reduce_dtype: Annotated[
        Literal["float32", "bfloat16"],
        "Type in which devices add their gradients of a layer's matrices where actor.dtype is bfloat16; bfloat16 sends "
        "half as much, with an error that grows with the number of devices.",
    ] = "float32"
    numerics: Annotated[
        Literal["fast", "invariant"],
        "How rollout and training compute a token's numbers; invariant: in pieces of one shape, so that the bits of "
        "tokens and log-probabilities do not depend on what else is computed, on CPUs and GPUs; fast: as is fastest.",
    ] = "fast"
    numerics_tp: Annotated[
        int,
        Ge(1),
        MAX_DEVICES,
        "The tensor parallelism up to which invariant numbers are the same bits: products are cut into as many parts "
        "at any tp. Each tp of the rollout must divide it.",
    ] = 1
    ppo_mini_batch_size: Annotated[int, Ge(0), "Prompts per optimizer update; 0: the whole batch."] = 0
    ppo_epochs: Annotated[
        int, Ge(1), Cap(1000, "a step trains on its batch that many times"), "Passes over a batch."
    ] = 1
    ppo_max_token_len_per_gpu: Annotated[int, Ge(1), "Tokens per microbatch and device, padding included."] = 2048
    context_parallel_size: Annotated[
        int,
        Ge(1),
        MAX_DEVICES,
        "Devices that share each row of tokens, in equal parts, so that a sequence may have as many times "
        "ppo_max_token_len_per_gpu tokens; a product of the first prime factors of their number, such as 1, 2, 4 or 8 "
        "of 8.",
    ] = 1
    loss_mode: Annotated[
        Literal["vanilla", "cispo", "reinforce"],
        "The policy loss; vanilla: the clipped surrogate of PPO, cispo: the log-probability times the advantage, "
        "weighted by the clipped ratio, so that every token has a gradient, reinforce: the same without a weight.",
    ] = "vanilla"
    clip_ratio_low: Annotated[float, Interval(ge=0, le=1), "The ratio is clipped below at 1 minus this."] = 0.2
    clip_ratio_high: Annotated[float, Ge(0), "The ratio is clipped above at 1 plus this."] = 0.2
    clip_ratio_c: Annotated[
        float, Gt(1), Or(0, "off"), "Dual clip: bounds the loss of negative advantages at this ratio; 0: off."
    ] = 0.0
    grad_clip: Annotated[float, Ge(0), "The most that the gradient's global norm may be; 0: off."] = 1.0
    use_kl_loss: Annotated[bool, "Add the KL to the reference model to the loss."] = False
    kl_loss_coef: Annotated[float, Ge(0), "Weight of the KL in the loss."] = 0.001
    kl_loss_type: Annotated[KlEstimate, "Estimate of the KL in the loss."] = "low_var_kl"
    entropy_coeff: Annotated[float, "Weight of the entropy bonus in the loss."] = 0.0
    router_aux_loss_coef: Annotated[
        float, Ge(0), "Weight of the loss that evens out the load of a mixture's experts; 0, as usual in RL: off."
    ] = 0.0
    ratio_level: Annotated[Literal["token", "sequence"], "What the ratio is taken over; sequence: GSPO."] = "token"
    old_logprobs: Annotated[
        Literal["rollout", "recompute"],
        "The denominator of the ratio; rollout: as recorded at sampling, recompute: of the policy before the update.",
    ] = "recompute"
    remat: Annotated[
        Literal["auto", "none", "dots", "full"],
        "What the backward pass recomputes; none: nothing, dots: all but products with weights and attention, full: "
        "whole layers, auto: dots where the device's memory allows it, else full.",
    ] = "auto"
    logprob_chunk_tokens: Annotated[
        Annotated[int, Ge(1)] | Literal["auto"],
        "Tokens that have their logits at once, per device; auto: a power of two from 128 to 4096 whose logits take at "
        "most half of what the update leaves of the device's memory, 1024 where that is not known.",
    ] = "auto"
    attention: Annotated[
        Literal["auto", "reference", "pallas"],
        "Implementation of attention in training; auto: a kernel on GPUs where it takes the dtype and the head dim, "
        "tiles in jnp elsewhere, reference: plain jnp, whose scores exist at once, pallas: the kernel, on GPUs only.",
    ] = "auto"
    offload_optimizer: Annotated[
        bool,
        "Keep the optimizer state in host memory, from where an update brings a layer's to the devices at a time; the "
        "weights have the same bits.",
    ] = False
    offload_reference: Annotated[
        bool,
        "Keep the layers of the reference (of a KL term, or of jaxrl dpo) in host memory, from where each comes while "
        "the one before computes; with adapters there is no copy to keep.",
    ] = False


class CriticSection(Section):
    """The update of the critic of algorithm.adv_estimator=gae; all other options are actor's."""

    optim: CriticOptimSection = Field(default_factory=CriticOptimSection)
    ppo_mini_batch_size: Annotated[
        int, Ge(0), "Prompts per optimizer update; 0: as many as in an update of the actor."
    ] = 0
    ppo_epochs: Annotated[
        int,
        Ge(0),
        Cap(1000, "a step trains on its batch that many times"),
        "Passes over a batch; 0: as many as the actor.",
    ] = 0
    cliprange_value: Annotated[
        float,
        Gt(0),
        Or(math.inf, "no clipping"),
        "How far a value may go from that before the step's updates until its loss has no gradient; .inf: any way.",
    ] = 0.5


class SftSection(Section):
    """What `jaxrl sft` learns from: conversations, or prompts with their completions."""

    messages_key: Annotated[
        str, "Column of a whole conversation (a list of messages, or a JSON string); a row without it has a prompt."
    ] = "messages"
    prompt_key: Annotated[str, "Column of the prompt: text, or a list of messages."] = "prompt"
    completion_key: Annotated[str, "Column of what is to be said: text, or a list of messages."] = "completion"
    train_on: Annotated[
        Literal["all", "last"],
        "Which of the assistant's turns are learnt from; all, or the last one of each conversation.",
    ] = "all"


class DpoSection(Section):
    """What `jaxrl dpo` learns from, pairs of which one was preferred, and how."""

    prompt_key: Annotated[
        str,
        "Column of the prompt: text, or a list of messages; a row without it has the prompt at the beginning of both "
        "conversations.",
    ] = "prompt"
    chosen_key: Annotated[str, "Column of what was preferred: text, or a list of messages."] = "chosen"
    rejected_key: Annotated[str, "Column of what was not."] = "rejected"
    loss_type: Annotated[
        Literal["sigmoid", "robust", "ipo"],
        "The loss of a pair; sigmoid: the negative log-likelihood of the preference, robust: the same, corrected for "
        "pairs that are the wrong way round, ipo: the squared distance of the mean log-ratios' difference from "
        "1 / (2 beta).",
    ] = "sigmoid"
    beta: Annotated[float, Gt(0), "How strongly the policy is held to the reference."] = 0.1
    label_smoothing: Annotated[
        float, Interval(ge=0, lt=0.5), "The share of pairs that are taken to be the wrong way round."
    ] = 0.0
    precompute_ref_log_probs: Annotated[
        bool,
        "Compute the reference's log-likelihoods of all pairs before the first step, and keep no copy of its weights.",
    ] = False

    def problems(self, config: Any) -> Iterator[str]:
        if self.chosen_key == self.rejected_key:
            yield f"dpo.chosen_key and dpo.rejected_key must name two columns, found {self.chosen_key!r} twice"

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        if self.loss_type == "ipo":
            yield frozenset({"label_smoothing"}), f"dpo.loss_type is {self.loss_type}"
