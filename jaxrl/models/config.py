"""What a decoder looks like: `ModelConfig`, read from and written as a Hugging Face `config.json`.

Three families share one decoder: Llama (also SmolLM2 and the like), Qwen2 (biases on q, k and v) and Qwen3 (norms on q
and k). Anything that the decoder does not compute (biases elsewhere, a sliding window that is switched on, another
activation, another kind of rope) is refused when the file is read, never ignored.

Values are read as transformers 5 reads them, with its defaults for what a file leaves out; `jaxrl.models.rope` has the
rules for rope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from jaxrl.models.fields import MAX_ID, Fields, read_model_file
from jaxrl.models.lora import Lora, adapters, is_trained, merged
from jaxrl.models.quantized import ABSMAX, dequantize, quantized
from jaxrl.models.rope import DEFAULT_THETA, RopeScaling, read_rope
from jaxrl.models.weights import Init, Weight, leaves
from jaxrl.schema.declared import shown
from jaxrl.schema.limits import BYTES, FloatType, Quantization

if TYPE_CHECKING:
    import jax

Family = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_REWARD_MODELS = {name.replace("CausalLM", "SequenceClassification"): kind for kind, name in ARCHITECTURES.items()}
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": MAX_ID,
}
"""The largest sizes that are read: some ten times those of any published model, so more is a mistake or damage."""

# Defaults for what a family's config.json leaves out.
_DEFAULT_EPS = 1e-6
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_WINDOW, _DEFAULT_WINDOW_START = 4096, 28


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder. Hashable, so that compiled functions can be cached by it.

    With `lora` its layers have adapters, and all other weights are frozen; the matrices among them are perhaps
    quantised (`quantization`, `jaxrl.models.quantized`).

    With `scalar_head` it is a reward model (`...ForSequenceClassification` with one label): in place of the vocabulary
    head it has one number, read at a text's last token that is not `pad_token_id`.

    Example::

        config = ModelConfig(
            family="llama", vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=16,
        )
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = DEFAULT_THETA
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rms_norm_eps: float = _DEFAULT_EPS
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    scalar_head: bool = False
    pad_token_id: int | None = None
    lora: Lora | None = None
    quantization: Quantization = "none"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rope rotates pairs")

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face folder (config.json and, where there is one, generation_config.json) or a dict."""
        if isinstance(source, Mapping):
            return _read(Fields(source, "config"), Fields({}, "config"))
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        generation_path = path.with_name("generation_config.json")
        generation = read_model_file(generation_path) if generation_path.exists() else {}
        return _read(Fields(read_model_file(path), str(path)), Fields(generation, str(generation_path)))

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json, readable by transformers 4 and 5."""
        if (self.qkv_bias, self.qk_norm) != (self.family == "qwen2", self.family == "qwen3"):
            raise ValueError(
                f"a {self.family} model with qkv_bias={self.qkv_bias} and qk_norm={self.qk_norm} has no Hugging Face "
                "name: qkv_bias belongs to qwen2 and qk_norm to qwen3"
            )
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        rope = self.rope_scaling.to_hf()
        architecture = ARCHITECTURES[self.family]
        if self.scalar_head:
            architecture = next(name for name, kind in _REWARD_MODELS.items() if kind == self.family)
        out = {
            "architectures": [architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling.kind == "none" else rope,
            "rope_parameters": {"rope_theta": self.rope_theta, **rope},
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": 0.02,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if eos and len(eos) == 1 else eos,
        }
        if self.family != "llama":
            out["use_sliding_window"] = False
        if self.family != "qwen2":
            out["attention_bias"] = False
        if self.scalar_head:
            out |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": self.pad_token_id}
        return out

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for, prompt and response together, rope scaling included.

        Linear scaling multiplies `max_position_embeddings`, yarn the context that it started from (files of yarn models
        give the stretched length there, or leave the old one); llama3 is part of the number already.
        """
        scaling, given = self.rope_scaling, self.max_position_embeddings
        match scaling.kind:
            case "linear":
                return max(given, round(given * scaling.factor))
            case "yarn":
                return max(given, round(scaling.original_max_position_embeddings * scaling.factor))
            case _:
                return given

    @property
    def base(self) -> ModelConfig:
        """The same without adapters, in plain weights."""
        return replace(self, lora=None, quantization="none")

    def weights(self) -> dict[str, Any]:
        """The table of weights: the training form's tree with a `Weight` at each leaf, adapters behind the rest."""
        table = _weights(self)
        if self.lora is None:
            return table
        layers = table["layers"]
        return table | {"layers": quantized(self.quantization, layers) | adapters(self.lora, layers)}

    def dtypes(self, param_dtype: FloatType, dtype: FloatType) -> dict[str, Any]:
        """The type of each weight in training, in a tree like that of `weights()`.

        What is trained is in `param_dtype`, and so are norms. What adapters leave frozen is in the narrower of the two:
        layers would compute with it in `dtype` anyway.

        Args:
          param_dtype, dtype: `actor.param_dtype` and `actor.dtype`.
        """

        def one(name: str, weight: Weight) -> str:
            trained = self.lora is None or is_trained(name) or weight.init == "ones"
            if weight.dtype:
                return weight.dtype
            return param_dtype if trained else min(param_dtype, dtype, key=BYTES.__getitem__)

        def each(table: Mapping[str, Any]) -> dict[str, Any]:
            return {name: each(x) if isinstance(x, dict) else one(name, x) for name, x in table.items()}

        return each(self.weights())

    def merged(self, name: str, layer: Mapping[str, Any]) -> jax.Array:
        """A weight of one layer as the layer computes with it: with its adapter, if it has one."""
        matrix = self.whole(name, layer)
        return matrix if self.lora is None else merged(self.lora, name, matrix, layer)

    def whole(self, name: str, layer: Mapping[str, Any]) -> jax.Array:
        """A weight of one layer in the shape of the plain table, in float32 if it is quantised; without its adapter."""
        if name + ABSMAX not in layer:
            return layer[name]
        matrix = dequantize(layer[name], layer[name + ABSMAX])
        return matrix.T.reshape(_weights(self)["layers"][name].layer_shape)

    def num_params(self) -> int:
        """How many numbers the weights stand for; tied embeddings count once."""
        return sum(math.prod(weight.shape) for weight in leaves(replace(self, quantization="none").weights()))


def _weights(sizes: ModelConfig) -> dict[str, Any]:
    V, E = sizes.vocab_size, sizes.hidden_size
    tree: dict[str, Any] = {
        "embed": Weight((V, E), ("vocab", "embed"), "normal", "model.embed_tokens.weight", "token_embd.weight", (V, E)),
        "layers": _attention(sizes) | _mlp(sizes),
        "final_norm": Weight((E,), ("embed",), "ones", "model.norm.weight", "output_norm.weight", (E,)),
    }
    if sizes.scalar_head:
        tree["score"] = Weight((E, 1), ("embed", "labels"), "normal", "score.weight", "", (1, E), transpose=True)
    elif not sizes.tie_word_embeddings:
        tree["lm_head"] = Weight(
            (E, V), ("embed", "vocab"), "normal", "lm_head.weight", "output.weight", (V, E), transpose=True
        )
    return tree


def _attention(sizes: ModelConfig) -> dict[str, Weight]:
    E, H, K, D = sizes.hidden_size, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim

    def project_in(heads: int, dim: str, name: str) -> Weight:
        names = (f"self_attn.{name}_proj.weight", f"attn_{name}.weight")
        return _stacked(sizes, (E, heads, D), ("embed", dim, "head_dim"), "normal", names, (heads * D, E))

    def bias(heads: int, dim: str, name: str) -> Weight:
        names = (f"self_attn.{name}_proj.bias", f"attn_{name}.bias")
        return _stacked(sizes, (heads, D), (dim, "head_dim"), "zeros", names, (heads * D,))

    out_names = ("self_attn.o_proj.weight", "attn_output.weight")
    table = {
        "attn_norm": _norm(sizes, E, "embed", "input_layernorm", "attn_norm"),
        "q": project_in(H, "heads", "q"),
        "k": project_in(K, "kv_heads", "k"),
        "v": project_in(K, "kv_heads", "v"),
        "o": _stacked(sizes, (H, D, E), ("heads", "head_dim", "embed"), "normal", out_names, (E, H * D)),
    }
    if sizes.qkv_bias:
        table |= {
            "q_bias": bias(H, "heads", "q"),
            "k_bias": bias(K, "kv_heads", "k"),
            "v_bias": bias(K, "kv_heads", "v"),
        }
    if sizes.qk_norm:
        table |= {
            "q_norm": _norm(sizes, D, "head_dim", "self_attn.q_norm", "attn_q_norm"),
            "k_norm": _norm(sizes, D, "head_dim", "self_attn.k_norm", "attn_k_norm"),
        }
    return table


def _mlp(sizes: ModelConfig) -> dict[str, Weight]:
    E, F = sizes.hidden_size, sizes.intermediate_size

    def matrix(name: str) -> Weight:
        shape, dims = ((F, E), ("mlp", "embed")) if name == "down" else ((E, F), ("embed", "mlp"))
        return _stacked(sizes, shape, dims, "normal", (f"mlp.{name}_proj.weight", f"ffn_{name}.weight"), shape[::-1])

    return {
        "mlp_norm": _norm(sizes, E, "embed", "post_attention_layernorm", "ffn_norm"),
        "gate": matrix("gate"),
        "up": matrix("up"),
        "down": matrix("down"),
    }


def _norm(sizes: ModelConfig, size: int, dim: str, *names: str) -> Weight:
    return _stacked(sizes, (size,), (dim,), "ones", (f"{names[0]}.weight", f"{names[1]}.weight"), (size,))


def _stacked(
    sizes: ModelConfig,
    shape: tuple[int, ...],
    dims: tuple[str, ...],
    init: Init,
    names: tuple[str, str],
    hf_shape: tuple[int, ...],
) -> Weight:
    """A weight of all layers; shape, dims and names (Hugging Face, GGUF) are those of one layer."""
    hf_name, gguf_name = "model.layers.{layer}." + names[0], "blk.{layer}." + names[1]
    shape, dims = (sizes.num_layers, *shape), ("layers", *dims)
    return Weight(shape, dims, init, hf_name, gguf_name, hf_shape, transpose=len(hf_shape) == 2)


def _read(fields: Fields, generation: Fields) -> ModelConfig:
    family, scalar_head = _family(fields)
    _check(fields, family)

    def size(name: str, default: int | None = None) -> int:
        return fields.integer(name, default, high=LARGEST[name])

    heads, hidden, vocab_size = size("num_attention_heads", 32), size("hidden_size"), size("vocab_size")
    if hidden % heads and fields.get("head_dim") is None and family not in _DEFAULT_HEAD_DIM:
        raise ValueError(f"{fields.file}: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    max_positions = size("max_position_embeddings", _DEFAULT_MAX_POSITIONS[family])
    theta, scaling = read_rope(fields, max_positions)
    # a null means one key/value head per query head in all three families, the key's absence only in llama
    kv_heads = heads if family == "llama" or "num_key_value_heads" in fields.raw else 32
    bos = fields.token_ids("bos_token_id", vocab_size)
    generated_eos, own_eos = (each.token_ids("eos_token_id", vocab_size) for each in (generation, fields))
    pad = fields.token_ids("pad_token_id", vocab_size) if scalar_head else ()
    for name, ids in (("bos_token_id", bos), ("pad_token_id", pad)):
        if len(ids) > 1:
            fields.wrong(name, "one token id")
    try:
        return ModelConfig(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", kv_heads),
            head_dim=size("head_dim", _DEFAULT_HEAD_DIM.get(family, hidden // heads)),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=fields.number("rms_norm_eps", _DEFAULT_EPS, high=1.0),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            max_position_embeddings=max_positions,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=generated_eos or own_eos,
            scalar_head=scalar_head,
            pad_token_id=pad[0] if pad else None,
        )
    except ValueError as error:
        if str(error).startswith((fields.file, generation.file)):
            raise
        raise ValueError(f"{fields.file}: {error}") from None


def _family(fields: Fields) -> tuple[Family, bool]:
    """From `architectures`, or from `model_type` where that is missing; both must agree. And whether it is a reward
    model."""
    named, kind = fields.get("architectures", []), fields.get("model_type")
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        fields.wrong("architectures", f'a list of names, as ["{ARCHITECTURES["llama"]}"]')
    if kind is not None and not isinstance(kind, str):
        fields.wrong("model_type", f"one of {', '.join(ARCHITECTURES)}")
    scalar_head = bool(named) and named[0] in _REWARD_MODELS
    known = {name: kind for kind, name in ARCHITECTURES.items()} | _REWARD_MODELS
    family = known.get(named[0]) if named else kind
    if family not in get_args(Family):
        value = f"architectures {shown(named)}" if named else f"model_type {shown(kind)}"
        fields.refuse(value, f"supported are {', '.join(ARCHITECTURES.values())}")
    if kind not in (None, family):
        fields.refuse(
            f"architectures {shown(named)} with model_type {shown(kind)}", f"the model_type of {named[0]} is {family!r}"
        )
    return cast(Family, family), scalar_head


def _check(fields: Fields, family: Family) -> None:
    """Refuse what the decoder would otherwise silently leave out."""
    if (act := fields.raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        fields.refuse(f"hidden_act {shown(act)}", "the MLP's activation must be 'silu'")
    if fields.flag("attention_bias") and family != "qwen2":
        fields.refuse(f"attention_bias true with model_type {family!r}", "only qwen2 has biases, on q, k and v")
    if fields.flag("mlp_bias"):
        fields.refuse("mlp_bias true", "the MLP must have no biases")
    if fields.get("quantization_config") is not None:
        fields.refuse("quantization_config", "weights must be float32, float16 or bfloat16 (or use a GGUF file)")
    if family != "llama":
        _check_window(fields)


def _check_window(fields: Fields) -> None:
    """Refuse a sliding window in any layer."""
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list):
        fields.wrong("layer_types", "a list with the kind of each layer")
    if any(kind != "full_attention" for kind in kinds):
        fields.refuse(f"layer_types {shown(kinds)}", "attention must be full everywhere")
    window = fields.raw.get("sliding_window", _DEFAULT_WINDOW)
    if kinds or not fields.flag("use_sliding_window") or window is None:
        return
    first = fields.integer("max_window_layers", _DEFAULT_WINDOW_START, low=0, high=MAX_ID)
    if first < fields.integer("num_hidden_layers", high=LARGEST["num_hidden_layers"]):
        fields.refuse(f"use_sliding_window true (sliding_window {shown(window)})", "attention must be full everywhere")
