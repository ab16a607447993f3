"""The options `rollout.*`, but those of `rollout.layout`: how samples are drawn, on what, and by which rule."""

from typing import Annotated, Literal

from annotated_types import Ge, Interval
from pydantic import Field

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.mechanisms.over_provisioning import OverProvisioning
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.ranking_groups import RankingGroups
from jaxrl.mechanisms.speculation import Speculation
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.schema.declared import Cap, Or
from jaxrl.schema.devices import MAX_DEVICES
from jaxrl.schema.limits import BYTES, MAX_HOSTS, MAX_SAMPLES, Narrow, OpenFloatType
from jaxrl.schema.section import Section

_TEMPERATURE = Interval(ge=0.001, le=100)  # beyond, logits overflow, or all tokens are equally likely
_GREEDY = Or(0, "the likeliest token")


class ValSamplingSection(Section):
    """How the samples of an evaluation are drawn."""

    n: Annotated[int, Ge(1), MAX_SAMPLES, "Samples per evaluation prompt."] = 1
    temperature: Annotated[
        float, _TEMPERATURE, _GREEDY, "Sampling temperature of the evaluation; 0: the likeliest token."
    ] = 0.0
    top_k: Annotated[int, Ge(-1), "Draw from this many of the likeliest tokens; 0 or -1: from all."] = 0
    top_p: Annotated[
        float, Interval(gt=0, le=1), "Draw from the likeliest tokens that together have this probability; 1: from all."
    ] = 1.0


class RolloutSection(Section):
    """How samples are drawn, and on what."""

    n: Annotated[int, Ge(1), MAX_SAMPLES, "Samples per prompt: the group size."] = 8
    num_devices: Annotated[
        int,
        Ge(0),
        MAX_DEVICES,
        "Devices of the rollout's own, the last of each host (needs trainer.one_step_off); 0: rollout and training "
        "take turns on the same devices.",
    ] = 0
    num_workers: Annotated[
        int,
        Ge(1),
        MAX_DEVICES,
        "Workers that the rollout's devices are cut into, all of one size: each has its own engine, KV pool and "
        "layout.",
    ] = 1
    hosts_per_worker: Annotated[
        int,
        Ge(1),
        MAX_HOSTS,
        "Hosts that a worker spans; more than one for a model that does not fit the devices of one: tp is then all of "
        "a worker's devices.",
    ] = 1
    deal: Annotated[
        Literal["tokens", "prompts"],
        "The worker of a new sample; tokens: the one with the fewest tokens outstanding, prompts: all samples of a "
        "prompt go to the worker that got its first, which is chosen so.",
    ] = "tokens"
    order: Annotated[
        Literal["logical", "arrival"],
        "The order in which results of several workers are taken; logical: that of their plans, the same in every run, "
        "arrival: as they come, so no worker waits for another, and what came when is journalled for a resume.",
    ] = "logical"
    temperature: Annotated[float, _TEMPERATURE, _GREEDY, "Sampling temperature; 0: the likeliest token."] = 1.0
    top_k: Annotated[int, Ge(-1), "Draw from this many of the likeliest tokens; 0 or -1: from all."] = 0
    top_p: Annotated[
        float, Interval(gt=0, le=1), "Draw from the likeliest tokens that together have this probability; 1: from all."
    ] = 1.0
    min_p: Annotated[
        float,
        Interval(ge=0, lt=1),
        "Draw training samples from tokens with at least this share of the likeliest token's probability; 0: from all.",
    ] = 0.0
    stop: Annotated[list[str], "Strings that end a response."] = []
    tensor_model_parallel_size: Annotated[
        Annotated[int, Ge(1), MAX_DEVICES] | Literal["auto"],
        "Devices that share one copy of the weights (tp); the devices of the rollout divided by it are dp; auto: the "
        "tp with which rollout.layout.profile predicts the fastest rollout of a batch.",
    ] = 1
    dtype: Annotated[
        OpenFloatType,
        "Type of the rollout's weights, activations and KV cache (but for rollout.quantization and "
        "rollout.kv_cache_dtype); auto: bfloat16 on GPUs and TPUs, float32 on CPUs.",
    ] = "auto"
    quantization: Annotated[
        Narrow,
        "The rollout's copy of the layers' matrices in a byte a number, with a factor for each output; int8: whole "
        "numbers, fp8: float8_e4m3fn, none: rollout.dtype. The trainer's weights stay as they are.",
    ] = "none"
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        "What the KV cache holds; int8, fp8: a byte a number, with a scale for each position and head, auto: "
        "rollout.dtype.",
    ] = "auto"
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
        "What reads the KV cache; auto: Pallas kernels on GPUs, and on TPUs in decode steps; the reference elsewhere.",
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
    stale_tokens: Annotated[
        Literal["recorded", "recompute", "mask"],
        "Tokens that earlier versions wrote; recorded: their ratio is taken to the log-probability recorded at "
        "sampling, recompute: to that of the policy before the update, as for all others, mask: they are not learnt "
        "from.",
    ] = "recorded"
    tail_batching: TailBatching.Options = Field(default_factory=TailBatching.Options)
    partial_rollout: PartialRollout.Options = Field(default_factory=PartialRollout.Options)
    over_provisioning: OverProvisioning.Options = Field(default_factory=OverProvisioning.Options)
    speculation: Speculation.Options = Field(default_factory=Speculation.Options)
    ranking_groups: RankingGroups.Options = Field(default_factory=RankingGroups.Options)
    layout: AdaptiveLayouts.Options = Field(default_factory=AdaptiveLayouts.Options)
    val_kwargs: ValSamplingSection = Field(default_factory=ValSamplingSection)

    @property
    def tp(self) -> int:
        """`tensor_model_parallel_size`. Raises ValueError while that is auto: the start of a run chooses first."""
        if self.tensor_model_parallel_size == "auto":
            raise ValueError("rollout.tensor_model_parallel_size is auto, and must be a number here: nothing chose one")
        return self.tensor_model_parallel_size

    @property
    def kv_codes(self) -> Narrow:
        """The type of the KV cache's codes; none: numbers of `dtype`."""
        return "none" if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def kv_head_bytes(self, head_dim: int) -> int:
        """Bytes of a key or value of one head at one position, its scale included. `dtype` is not auto."""
        if self.kv_codes == "none":
            return head_dim * BYTES[self.dtype]
        return head_dim * BYTES[self.kv_codes] + BYTES["float32"]

    @property
    def quantized(self) -> str:
        """The options that quantise anything, in words; empty: none does."""
        given = {"quantization": self.quantization, "kv_cache_dtype": self.kv_codes}
        return " and ".join(f"rollout.{name}={kind}" for name, kind in given.items() if kind != "none")

    @property
    def types(self) -> str:
        """The types that it computes with, in words: times were measured with these types and hold for no others."""
        return self.dtype + (f", {self.quantized}" if self.quantized else "")
