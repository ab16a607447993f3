"""The options `rollout.*`, but those of `rollout.layout`: how samples are drawn, on what, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from jaxrl.config.declared import Cap, Names, Or
from jaxrl.config.devices import MAX_DEVICES
from jaxrl.config.layout import LayoutSection

FloatType = Literal["float32", "bfloat16", "float64"]
AtEnd = Literal["flush", "leave"]

MAX_PROMPTS = Cap(65536, "prompts and their samples are kept in memory until their step is over")
MAX_SAMPLES = Cap(65536, "a prompt's samples are kept in memory until the last one is scored")
MAX_LENGTH = Cap(16777216, "every row of a batch has room for the longest sequence")
MAX_FACTOR = Cap(100, "a round would launch that many batches at once")
_TEMPERATURE = Interval(ge=0.001, le=100)  # beyond, logits overflow, or all tokens are equally likely
_GREEDY = Or(0, "the likeliest token")


@dataclass(frozen=True)
class ValSamplingSection:
    """How the samples of an evaluation are drawn."""

    n: Annotated[int, Ge(1), MAX_SAMPLES, "Samples per evaluation prompt."] = 1
    temperature: Annotated[
        float, _TEMPERATURE, _GREEDY, "Sampling temperature of the evaluation; 0: the likeliest token."
    ] = 0.0
    top_k: Annotated[int, Ge(-1), "Draw from so many of the likeliest tokens; 0 or -1: from all."] = 0
    top_p: Annotated[
        float, Interval(gt=0, le=1), "Draw from the likeliest tokens that together have this probability; 1: from all."
    ] = 1.0


@dataclass(frozen=True)
class TailBatchingSection:
    """Short rounds with speculation, and long rounds of the prompts that came last in them."""

    enable: Annotated[bool, "Switch tail batching on."] = False
    prompt_factor: Annotated[
        float, Ge(1), MAX_FACTOR, "Prompts of a short round, as a multiple of data.train_batch_size."
    ] = 1.25
    response_factor: Annotated[
        float, Ge(1), MAX_FACTOR, "Samples per prompt of a short round, as a multiple of rollout.n."
    ] = 1.25
    max_age_steps: Annotated[int, Ge(0), "The most steps from a prompt's first launch to its batch; 0: no bound."] = 0
    at_end: Annotated[
        AtEnd, "What becomes of the queue when training ends; flush: the last rounds empty it, leave: it stays."
    ] = "flush"


@dataclass(frozen=True)
class PartialRolloutSection:
    """A round stops at enough complete prompts, and the next round goes on with the others."""

    enable: Annotated[bool, "Switch active partial rollout on."] = False
    over_provision: Annotated[
        float, Ge(1), MAX_FACTOR, "Prompts under way, as a multiple of data.train_batch_size."
    ] = 2.0
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


@dataclass(frozen=True)
class OverProvisioningSection:
    """A baseline: launch more than is needed, keep what ends first, discard the rest for good."""

    enable: Annotated[bool, "Switch over-provisioning on."] = False
    prompt_factor: Annotated[
        float, Ge(1), MAX_FACTOR, "Prompts of a round, as a multiple of data.train_batch_size."
    ] = 1.25
    response_factor: Annotated[
        float, Ge(1), MAX_FACTOR, "Samples per prompt of a round, as a multiple of rollout.n."
    ] = 1.25


@dataclass(frozen=True)
class SpeculationSection:
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


@dataclass(frozen=True)
class RankingGroupsSection:
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


@dataclass(frozen=True)
class RolloutSection:
    """How samples are drawn, and on what."""

    n: Annotated[int, Ge(1), MAX_SAMPLES, "Samples per prompt: the group size."] = 8
    num_devices: Annotated[
        int,
        Ge(0),
        MAX_DEVICES,
        "Devices of the rollout's own, the last ones (needs trainer.one_step_off); 0: rollout and training take turns "
        "on the same devices.",
    ] = 0
    num_workers: Annotated[
        int,
        Ge(1),
        MAX_DEVICES,
        "Workers that the rollout's devices are cut into, all of one size: each has an engine, a KV pool and a layout "
        "of its own.",
    ] = 1
    deal: Annotated[
        Literal["tokens", "prompts"],
        "The worker of a new sample; tokens: the one with the fewest tokens outstanding, prompts: all samples of a "
        "prompt go to the worker that got its first, which is chosen so.",
    ] = "tokens"
    temperature: Annotated[float, _TEMPERATURE, _GREEDY, "Sampling temperature; 0: the likeliest token."] = 1.0
    top_k: Annotated[int, Ge(-1), "Draw from so many of the likeliest tokens; 0 or -1: from all."] = 0
    top_p: Annotated[
        float, Interval(gt=0, le=1), "Draw from the likeliest tokens that together have this probability; 1: from all."
    ] = 1.0
    min_p: Annotated[
        float,
        Interval(ge=0, lt=1),
        "Draw from tokens with at least this share of the likeliest token's probability; 0: from all.",
    ] = 0.0
    stop: Annotated[list[str], "Strings that end a response."] = field(default_factory=list)
    tensor_model_parallel_size: Annotated[
        int | Literal["auto"],
        Ge(1),
        MAX_DEVICES,
        "Devices that share one copy of the weights (tp); the devices of the rollout divided by it are dp; auto: the "
        "tp with which rollout.layout.profile predicts the fastest rollout of a batch.",
    ] = 1
    dtype: Annotated[FloatType, "Type of the rollout's weights, activations and KV cache."] = "float32"
    block_size: Annotated[int, Ge(1), Cap(4096, "a row leaves up to a block unused"), "Tokens per KV block."] = 16
    max_num_seqs: Annotated[
        int,
        Ge(1),
        Cap(16384, "every row has its KV blocks, its logits and a place in every plan, and programs for every size"),
        "Samples that decode at once, per dp group.",
    ] = 32
    max_num_batched_tokens: Annotated[
        int,
        Ge(1),
        Cap(2**22, "the activations of all of them exist at once"),
        "Prefill tokens per plan, per dp group.",
    ] = 512
    decode_steps: Annotated[
        int, Ge(1), Cap(4096, "the host sees nothing of a plan before its last step"), "Decode steps per plan."
    ] = 16
    sample_placement: Annotated[
        Literal["together", "spread"],
        "The dp group of a prompt's samples; together: the one that has the prompt's KV, while it has room, spread: "
        "each sample goes where most room is.",
    ] = "together"
    attention: Annotated[
        Literal["auto", "reference", "pallas"],
        "What reads the KV cache; auto: the Pallas kernels on GPU, the reference elsewhere.",
    ] = "auto"
    num_blocks: Annotated[
        int, Ge(0), "KV blocks per dp group; 0: what the memory leaves, at most what rollout.max_num_seqs can use."
    ] = 0
    memory_fraction: Annotated[
        float,
        Interval(gt=0, le=1),
        "Share of the memory that JAX was given on a device, for weights and KV pool together. Of a GPU, JAX is given "
        "0.75 unless the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.",
    ] = 0.85
    warmup: Annotated[
        bool,
        "Compile every program before it is needed: the rollout's before the first step, the update's then as well, or "
        "on CPUs beside the first rollout.",
    ] = True
    max_active_requests: Annotated[int, Ge(0), "The most samples under way at once, with any rule; 0: no limit."] = 0
    stale_tokens: Annotated[
        Literal["recorded", "recompute", "mask"],
        "Tokens that earlier versions wrote; recorded: their ratio is taken to the log-probability recorded at "
        "sampling, recompute: to that of the policy before the update, as for all others, mask: they are not learnt "
        "from.",
    ] = "recorded"
    tail_batching: TailBatchingSection = field(default_factory=TailBatchingSection)
    partial_rollout: PartialRolloutSection = field(default_factory=PartialRolloutSection)
    over_provisioning: OverProvisioningSection = field(default_factory=OverProvisioningSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    ranking_groups: RankingGroupsSection = field(default_factory=RankingGroupsSection)
    layout: LayoutSection = field(default_factory=LayoutSection)
    val_kwargs: ValSamplingSection = field(default_factory=ValSamplingSection)

    @property
    def tp(self) -> int:
        """`tensor_model_parallel_size`. Raises ValueError while that is auto: the start of a run chooses first."""
        if self.tensor_model_parallel_size == "auto":
            raise ValueError("rollout.tensor_model_parallel_size is auto, and must be a number here: nothing chose one")
        return self.tensor_model_parallel_size
