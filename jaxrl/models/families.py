"""The families of models that the decoder computes: a table with a row for each.

A row says how a family differs from Llama, as fields of `jaxrl.models.config.ModelConfig`. The decoder knows switches
and no family, so a model whose switches exist is a row (docs/your-model.md).

Source: transformers 5.24, `configuration_*.py` and `modeling_*.py` of each family, with their defaults. Departures:
entries that transformers ignores are refused where they would be read as a switch (`attention_bias`, `mlp_bias`), and
so is attention in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrl.models.fields import MAX_ID, Fields

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_EXPERTS = 2**14
_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def layer_types(fields: Fields, num_layers: int, usual: Callable[[int], bool], window: int | None) -> dict[str, Any]:
    """The window, and the layers that have it, from `layer_types`. Where the file has no list, `usual` says whether
    a layer has a window; `window`: the family's own, None: there is none."""
    given = fields.get("layer_types", [SLIDING if usual(i) and window else FULL for i in range(num_layers)])
    given = [{"attention": FULL}.get(x, x) if isinstance(x, str) else x for x in given] if given else given
    if not isinstance(given, list) or len(given) < num_layers or any(x not in (FULL, SLIDING) for x in given):
        fields.wrong("layer_types", f"a list with {FULL} or {SLIDING} for each of the {num_layers} layers")
    given = given[:num_layers]
    if SLIDING not in given:
        return {}
    if not window:
        fields.refuse(f"layer_types with {SLIDING}", "there is no window: see sliding_window and use_sliding_window")
    return {"sliding_window": window, "layer_types": tuple(given) if FULL in given else ()}


def write_layer_types(config: Any) -> dict[str, Any]:
    one = SLIDING if config.sliding_window else FULL
    types = [*config.layer_types] or [one] * config.num_layers
    return {"layer_types": types, "sliding_window": config.sliding_window or 4096}  # these files always have one


def window_of(fields: Fields, default: int | None) -> int | None:
    """`sliding_window`; a null switches it off."""
    if fields.raw.get("sliding_window", default) is None:
        return None
    return fields.integer("sliding_window", default, high=MAX_ID)


def _everywhere(default: int | None) -> Callable[[Fields, int], dict[str, Any]]:
    """All layers have the window of `sliding_window`, or `default` where the file does not give one."""
    return lambda fields, _: {"sliding_window": window_of(fields, default) or 0}


def _write_window(config: Any) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window or None}


def _gemma3(fields: Fields, num_layers: int) -> dict[str, Any]:
    if fields.get("attn_logit_softcapping"):
        fields.refuse("attn_logit_softcapping", "transformers does not compute it in Gemma 3: set it to null")
    pattern = fields.integer("sliding_window_pattern", 6, high=MAX_ID)
    return layer_types(fields, num_layers, lambda i: (i + 1) % pattern != 0, window_of(fields, 4096))


def _qwen(fields: Fields, num_layers: int) -> dict[str, Any]:
    first = fields.integer("max_window_layers", 28, low=0, high=MAX_ID)
    window = window_of(fields, 4096) if fields.flag("use_sliding_window") else None
    return layer_types(fields, num_layers, lambda i: i >= first, window)


def _write_qwen(config: Any) -> dict[str, Any]:
    if not config.sliding_window:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, **write_layer_types(config)}


def _smollm3(fields: Fields, num_layers: int) -> dict[str, Any]:
    interval = fields.integer("no_rope_layer_interval", 4, high=MAX_ID)
    given = fields.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)])
    if not isinstance(given, list) or len(given) < num_layers or any(x not in (0, 1) for x in given):
        fields.wrong("no_rope_layers", f"a list with 1 (rope) or 0 (none) for each of the {num_layers} layers")
    turns = tuple(bool(x) for x in given[:num_layers])
    window = window_of(fields, None) if fields.flag("use_sliding_window") else None
    found = layer_types(fields, num_layers, lambda i: not turns[i], window)
    return found | ({} if all(turns) else {"rope_layers": turns})


def _write_smollm3(config: Any) -> dict[str, Any]:
    turns = config.rope_layers or (True,) * config.num_layers
    return {"no_rope_layers": [int(x) for x in turns], **_write_qwen(config)}


def _granite_hybrid(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Granite 4 without experts and without state-space layers."""
    if fields.integer("num_local_experts", 8, low=0, high=MAX_ID):
        fields.refuse(f"num_local_experts {fields.get('num_local_experts', 8)}", "it must be 0: no mixture of experts")
    if "layer_types" not in fields.raw:
        fields.refuse("layer_types left out, which means state-space layers", "all layers must have attention")
    found = layer_types(fields, num_layers, lambda i: False, None)
    kind = fields.get("position_embedding_type")
    return found | ({} if kind == "rope" else {"rope_layers": (False,) * num_layers})


def _write_granite_hybrid(config: Any) -> dict[str, Any]:
    kind = None if config.rope_layers else "rope"
    return {"layer_types": ["attention"] * config.num_layers, "position_embedding_type": kind}


class Experts(NamedTuple):
    """How config.json describes a mixture of experts: the key of their number, the defaults of that number and of the
    experts per token, and whether a token's weights always sum to one (else `norm_topk_prob` decides)."""

    key: str
    number: int
    chosen: int
    normalised: bool


def read_experts(fields: Fields, experts: Experts) -> dict[str, Any]:
    for key in ("mlp_only_layers", "router_jitter_noise"):
        if given := fields.get(key):
            fields.refuse(f"{key} {given}", "all layers must have experts, and their routers no noise")
    if (step := fields.get("decoder_sparse_step", 1)) != 1:
        fields.refuse(f"decoder_sparse_step {step}", "all layers must have experts: 1")
    count = fields.integer(experts.key, experts.number, high=MAX_EXPERTS)
    return {
        "num_experts": count,
        "num_experts_per_tok": fields.integer("num_experts_per_tok", experts.chosen, high=count),
        "norm_topk_prob": experts.normalised or fields.flag("norm_topk_prob"),
    }


def write_experts(config: Any, experts: Experts) -> dict[str, Any]:
    own = {experts.key: config.num_experts, "num_experts_per_tok": config.num_experts_per_tok}
    return own if experts.normalised else own | {"norm_topk_prob": config.norm_topk_prob}


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from Llama.

    `keys` are fields of `ModelConfig` that config.json gives as a number, by the key and what it is where the file
    leaves it out; a null is 0, which switches the field off. `layers`: (config.json, number of layers) -> the fields in
    which layers differ; `write_layers` is the way back.

    `modules` are names of a layer's modules in files, where they are not Llama's. `qkv` and `gate_up` are one matrix
    each. With experts also `router`, and an expert's modules; `{expert}` is its number where each has its own tensors.
    `mlp_norm_gguf` is what GGUF files call the norm before the MLP.
    """

    architecture: str  # its class in transformers
    reward_model: str = ""  # the class of its models with one label; empty: the same with `SequenceClassification`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of `ModelConfig` that all its models have
    keys: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    biases: tuple[str, ...] = ()  # of the keys `attention_bias` (queries, keys, values, output) and `mlp_bias`
    sizes: Mapping[str, str] = field(default_factory=dict)  # keys of sizes that it has under another name than Llama
    # of keys that all families read, where not Llama's; with `head_dim` it need not be hidden_size / heads
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "hidden_act"  # the key of the MLP's activation
    layers: Callable[[Fields, int], dict[str, Any]] = lambda fields, num_layers: {}
    write_layers: Callable[[Any], dict[str, Any]] = lambda config: {}
    # where ropes differ, the thetas of layers with full attention and with a window, and the key of the latter
    local_rope: tuple[float, float, str] | None = None
    partial_rope: bool = False  # a part of each head may be rotated
    longrope: bool = False  # is its rope's one type
    extra: Mapping[str, Any] = field(default_factory=dict)  # further keys that config.json is written with
    modules: Mapping[str, str] = field(default_factory=dict)
    experts: Experts | None = None  # of mixtures
    bare_experts: bool = False  # files have experts' matrices as [in, out], gate and up column by column in turn

    @property
    def reward_architecture(self) -> str:
        return self.reward_model or self.architecture.replace("CausalLM", "SequenceClassification")


def _everywhere_if_used(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {"sliding_window": (window_of(fields, 4096) or 0) if fields.flag("use_sliding_window") else 0}


def _write_used_window(config: Any) -> dict[str, Any]:
    return {"use_sliding_window": bool(config.sliding_window), **_write_window(config)}


_EXPERTS = {"router": "mlp.gate", **{name: f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")}}
_GEMMA: dict[str, Any] = {"norms": "both", "norm_plus_one": True, "scale_embedding": True}
_GEMMA_DEFAULTS = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", biases=("attention_bias", "mlp_bias")),
    "qwen2": Family(
        "Qwen2ForCausalLM", fixed={"qkv_bias": True}, defaults=_QWEN, layers=_qwen, write_layers=_write_qwen
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        biases=("attention_bias",),
        defaults=_QWEN | {"head_dim": 128},
        layers=_qwen,
        write_layers=_write_qwen,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        fixed={"norms": "after", "qk_norm": True, "qk_norm_over_heads": True},
        biases=("attention_bias",),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        fixed={"norms": "after", "qk_norm": True, "qk_norm_over_heads": True},
        biases=("attention_bias",),
        defaults={"rms_norm_eps": 1e-5},
        layers=lambda fields, n: layer_types(fields, n, lambda i: (i + 1) % 4 != 0, window_of(fields, 4096)),
        write_layers=write_layer_types,
        local_rope=(5e5, 5e5, ""),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        biases=("attention_bias", "mlp_bias"),
        defaults={
            **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768},
            **{"rope_theta": 2e6, "tie_word_embeddings": True},
        },
        layers=_smollm3,
        write_layers=_write_smollm3,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
        layers=_everywhere(4096),
        write_layers=_write_window,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
        layers=lambda fields, n: layer_types(fields, n, lambda i: True, window_of(fields, 4096)),
        write_layers=write_layer_types,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        fixed=_GEMMA,
        keys={
            "query_pre_attn_scalar": ("query_pre_attn_scalar", 256),
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        biases=("attention_bias",),
        defaults=_GEMMA_DEFAULTS | {"max_position_embeddings": 8192},
        activation="hidden_activation",
        layers=lambda fields, n: layer_types(fields, n, lambda i: i % 2 == 0, window_of(fields, 4096)),
        write_layers=write_layer_types,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        reward_model="Gemma3TextForSequenceClassification",
        fixed=_GEMMA | {"qk_norm": True},
        keys={
            "query_pre_attn_scalar": ("query_pre_attn_scalar", 256),
            "final_logit_softcapping": ("final_logit_softcapping", 0.0),
        },
        biases=("attention_bias",),
        defaults=_GEMMA_DEFAULTS | {"max_position_embeddings": 131072},
        activation="hidden_activation",
        layers=_gemma3,
        write_layers=write_layer_types,
        local_rope=(1e6, 1e4, "rope_local_base_freq"),
    ),
    "phi3": Family(  # Phi-3, 3.5 and 4
        "Phi3ForCausalLM",
        defaults={
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
            "original_max_position_embeddings": 4096,
        },
        layers=_everywhere(None),
        write_layers=_write_window,
        partial_rope=True,
        longrope=True,
        modules={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        keys={name: (name, 1.0) for name in _MULTIPLIERS},
        biases=("attention_bias", "mlp_bias"),
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        keys={name: (name, 1.0) for name in _MULTIPLIERS},
        biases=("attention_bias",),
        sizes={"intermediate_size": "shared_intermediate_size"},
        layers=_granite_hybrid,
        write_layers=_write_granite_hybrid,
        extra={"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 1},
        modules={"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        fixed={"qk_norm": True},
        biases=("attention_bias",),
        sizes={"intermediate_size": "moe_intermediate_size"},
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "intermediate_size": 768},
        layers=_everywhere_if_used,
        write_layers=_write_used_window,
        modules=_EXPERTS,
        experts=Experts("num_experts", 128, 8, normalised=False),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        fixed={"qk_norm": True, "qk_norm_over_heads": True},
        keys={"clip_qkv": ("clip_qkv", 0.0)},
        biases=("attention_bias",),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_attention_heads": 16},
        modules=_EXPERTS,
        experts=Experts("num_experts", 64, 8, normalised=False),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        defaults={
            **{"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            "rope_theta": 1e6,
        },
        layers=_everywhere(None),
        write_layers=_write_window,
        modules={
            "router": "block_sparse_moe.gate",
            **{"gate": "block_sparse_moe.experts.{expert}.w1", "up": "block_sparse_moe.experts.{expert}.w3"},
            "down": "block_sparse_moe.experts.{expert}.w2",
        },
        experts=Experts("num_local_experts", 8, 2, normalised=True),
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        keys={name: (name, 1.0) for name in _MULTIPLIERS},
        biases=("attention_bias",),
        modules={
            "router": "block_sparse_moe.router.layer",
            **{"gate_up": "block_sparse_moe.input_linear", "down": "block_sparse_moe.output_linear"},
        },
        experts=Experts("num_local_experts", 8, 2, normalised=True),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        fixed={"attention_sinks": True, "expert_bias": True},
        keys={"swiglu_limit": ("swiglu_limit", 7.0), "swiglu_alpha": ("swiglu_alpha", 1.702)},
        biases=("attention_bias",),
        defaults={
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
            **{"max_position_embeddings": 131072, "rope_theta": 150_000.0, "attention_bias": True},
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
                "truncate": False,
            },
        },
        layers=lambda fields, n: layer_types(fields, n, lambda i: i % 2 == 0, window_of(fields, 128)),
        write_layers=write_layer_types,
        modules={
            **{"router": "mlp.router", "gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"},
            "mlp_norm_gguf": "post_attention_norm",
        },
        experts=Experts("num_local_experts", 128, 4, normalised=True),
        bare_experts=True,
    ),
}
