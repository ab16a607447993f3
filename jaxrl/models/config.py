"""The shape of a decoder: `ModelConfig`, read from and written as a Hugging Face `config.json`.

`jaxrl.models.families` says how each family differs from Llama. What the decoder does not compute (another activation,
another kind of rope) is refused. Values are read as transformers 5 reads them, with its defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxrl.models.families import FAMILIES, SLIDING, Family, read_experts, write_experts
from jaxrl.models.fields import MAX_ID, Fields, read_model_file
from jaxrl.models.rope import DEFAULT_THETA, Rope, RopeScaling, read_rope, read_ropes
from jaxrl.models.weights import FileRows, Init, Weight, leaves
from jaxrl.schema.declared import shown
from jaxrl.schema.limits import BYTES, Quantization

if TYPE_CHECKING:
    import jax

    from jaxrl.models.lora import Lora

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

_DEFAULT_EPS = 1e-6
_LARGEST_FACTOR = 1e6


class LayerKind(NamedTuple):
    """The properties in which a model's layers may differ."""

    window: int  # positions that a query sees, its own included; 0: all
    rope: Rope | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder. Hashable, so that compiled functions can be cached by it.

    With `lora` its layers have adapters, and all other weights are frozen, their matrices perhaps quantised. With
    `scalar_head` it is a reward model (`...ForSequenceClassification` with one label): in place of the vocabulary head
    it has one number, read at a text's last token that is not `pad_token_id`.

    The switches (named as in config.json where it has them):

    - `norms`: of attention and MLP each `before` (of their inputs), `after` (of their outputs) or `both`;
      `norm_plus_one`: the scale is one plus the weight.
    - `qk_norm`: of queries and keys, each head by itself, or with `qk_norm_over_heads` all heads together.
    - `qkv_bias`, `o_bias`, `mlp_bias`; `hidden_act`.
    - `scale_embedding`: by the square root of hidden_size. `embedding_multiplier`, `residual_multiplier`: of the
      embedding, and of the outputs of attention and MLP. Logits are divided by `logits_scaling`.
    - Scores are multiplied by `attention_multiplier`, or if that is 0 by `query_pre_attn_scalar` ** -0.5, or if that is
      0 by head_dim ** -0.5. Soft-capped, by `attn_logit_softcapping` and `final_logit_softcapping`, x is
      cap * tanh(x / cap); 0 is off.
    - `partial_rotary_factor`: the share of each head that rope turns.
    - `sliding_window`: positions that a query sees, its own included; 0: all. `layer_types` says which layers have it;
      empty: all. `sliding_rope`: rope of the layers with a window; None: that of the others. `rope_layers`: whether a
      layer has rope; empty: all have. `attention_sinks`: each head has a score that no value belongs to.
    - `clip_qkv`: the most that an entry of queries, keys and values may be, either way; 0: any.
    - `num_experts`: the MLPs of `intermediate_size` of each layer, of which a token takes `num_experts_per_tok`, each
      times its share of the router's softmax, or with `norm_topk_prob` of that over the chosen alone; 0: each layer has
      one MLP (`jaxrl.models.experts`). `expert_bias`: of router and experts. With `swiglu_limit` their gate and up stay
      within it, and the gate's sigmoid has `swiglu_alpha`.
    """

    family: str
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
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    norms: Literal["before", "after", "both"] = "before"
    norm_plus_one: bool = False
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    scale_embedding: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    attention_multiplier: float = 0.0
    query_pre_attn_scalar: float = 0.0
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    partial_rotary_factor: float = 1.0
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()
    sliding_rope: Rope | None = None
    rope_layers: tuple[bool, ...] = ()
    attention_sinks: bool = False
    clip_qkv: float = 0.0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    expert_bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.702
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
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(
                f"partial_rotary_factor ({self.partial_rotary_factor}) turns {self.rotary_dim} of head_dim "
                f"{self.head_dim}: they must be even and not 0"
            )
        if self.rope_scaling.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                count, pairs = len(getattr(self.rope_scaling, name)), self.rotary_dim // 2
                if count != pairs:
                    raise ValueError(f"{name} has {count} numbers; it must have {pairs}, one a pair")

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face folder (config.json, and generation_config.json where there is one) or a dict."""
        if isinstance(source, Mapping):
            return read_config(Fields(source, "config"), Fields({}, "config"))
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        generation_path = path.with_name("generation_config.json")
        generation = read_model_file(generation_path) if generation_path.exists() else {}
        return read_config(Fields(read_model_file(path), str(path)), Fields(generation, str(generation_path)))

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json, readable by transformers 4 and 5."""
        row = FAMILIES[self.family]
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        rope = self.rope_scaling.to_hf()
        out = {
            "architectures": [row.reward_architecture if self.scalar_head else row.architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            row.activation: self.hidden_act,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling.kind == "none" else rope,
            "rope_parameters": {"rope_theta": self.rope_theta, **rope},
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": 0.02,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if eos and len(eos) == 1 else eos,
            "pad_token_id": self.pad_token_id,
        }
        out |= {key: out[name] for name, key in row.sizes.items()}
        out |= {key: type(usual)(getattr(self, name)) or None for name, (key, usual) in row.keys.items()}
        out |= row.extra
        out |= {} if row.experts is None else write_experts(self, row.experts)
        out |= self._layers_to_hf(row, rope)
        if self.family != "qwen2":
            out["attention_bias"] = self.o_bias
        if "mlp_bias" in row.biases:
            out["mlp_bias"] = self.mlp_bias
        if self.scalar_head:
            out |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        self._check_name(out)
        return out

    def _layers_to_hf(self, row: Family, rope: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if row.partial_rope:
            out["partial_rotary_factor"] = self.partial_rotary_factor
            out["rope_parameters"] = {"rope_theta": self.rope_theta, **rope, **out}
        if self.rope_scaling.kind == "longrope":
            out["original_max_position_embeddings"] = self.rope_scaling.original_max_position_embeddings
        if row.local_rope is not None:
            local = self.sliding_rope or Rope(row.local_rope[1])
            ropes = {"full_attention": self.rope.to_hf(), "sliding_attention": local.to_hf()}
            out |= {"rope_scaling": None, "rope_parameters": ropes}
            if key := row.local_rope[2]:
                out[key] = local.theta
        return out | row.write_layers(self)

    def _check_name(self, content: Mapping[str, Any]) -> None:
        """Refuses a config that its family's config.json cannot express."""
        plain = self.base
        read = ModelConfig.from_hf(content)
        wrong = [each.name for each in fields_of(plain) if getattr(plain, each.name) != getattr(read, each.name)]
        if wrong:
            raise ValueError(
                f"a {self.family} model with {', '.join(f'{n}={getattr(self, n)}' for n in wrong)} has no Hugging Face "
                f"name: its config.json would be read as {', '.join(f'{n}={getattr(read, n)}' for n in wrong)}"
            )

    @property
    def rope(self) -> Rope:
        """The rope of the layers without one of their own."""
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def rotary_dim(self) -> int:
        """The size of the part of a head that rope turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def query_factor(self) -> float:
        """The factor of queries beside head_dim ** -0.5."""
        scale = self.attention_multiplier or (self.query_pre_attn_scalar or self.head_dim) ** -0.5
        factor = scale * self.head_dim**0.5
        return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor

    def kind(self, layer: int) -> LayerKind:
        slides = self.sliding_window and (not self.layer_types or self.layer_types[layer] == SLIDING)
        rope = self.sliding_rope if slides and self.sliding_rope is not None else self.rope
        turns = not self.rope_layers or self.rope_layers[layer]
        return LayerKind(self.sliding_window if slides else 0, rope if turns else None)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of the layers, in order of first use; one where all layers are alike."""
        return tuple(dict.fromkeys(map(self.kind, range(self.num_layers))))

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for, rope scaling included: linear scaling multiplies
        `max_position_embeddings`, yarn the context that it started from; with longrope it is the context before it was
        stretched (`jaxrl.models.rope`)."""
        scaling, given = self.rope_scaling, self.max_position_embeddings
        if self.sliding_rope is not None:
            return given  # these files give the stretched length
        match scaling.kind:
            case "longrope":
                return scaling.original_max_position_embeddings
            case "linear":
                return max(given, round(given * scaling.factor))
            case "yarn":
                return max(given, round(scaling.original_max_position_embeddings * scaling.factor))
            case _:
                return given

    @property
    def base(self) -> ModelConfig:
        """The same model without adapters and quantisation."""
        return replace(self, lora=None, quantization="none")

    def weights(self) -> dict[str, Any]:
        """The table of weights: the training form's tree with a `Weight` at each leaf, adapters behind the rest."""
        table = _weights(self)
        if self.lora is None:
            return table
        from jaxrl.models.lora import adapters
        from jaxrl.models.quantized import quantized

        layers = table["layers"]
        return table | {"layers": quantized(self.quantization, layers) | adapters(self.lora, layers)}

    def dtypes(self, param_dtype: str, dtype: str) -> dict[str, Any]:
        """The type of each weight in training, in a tree like that of `weights()`, from `actor.param_dtype` and
        `actor.dtype`. Trained weights and norms are in `param_dtype`; weights that adapters leave frozen are in the
        narrower of the two, since layers would compute with them in `dtype` anyway."""

        def one(name: str, weight: Weight) -> str:
            if weight.dtype or self.lora is None:
                return weight.dtype or param_dtype
            from jaxrl.models.lora import is_trained

            trained = is_trained(name) or weight.is_norm
            return param_dtype if trained else min(param_dtype, dtype, key=BYTES.__getitem__)

        def each(table: Mapping[str, Any]) -> dict[str, Any]:
            return {name: each(x) if isinstance(x, dict) else one(name, x) for name, x in table.items()}

        return each(self.weights())

    def merged(self, name: str, layer: Mapping[str, Any]) -> jax.Array:
        """A weight of one layer as the layer computes with it: with its adapter, if it has one."""
        matrix = self.whole(name, layer)
        if self.lora is None:
            return matrix
        from jaxrl.models.lora import merged

        return merged(self.lora, name, matrix, layer)

    def whole(self, name: str, layer: Mapping[str, Any]) -> jax.Array:
        """A weight of one layer in the shape of the plain table, in float32 if it is quantised; without its adapter."""
        if self.quantization == "none":
            return layer[name]
        from jaxrl.models.quantized import ABSMAX, dequantize

        if name + ABSMAX not in layer:
            return layer[name]
        matrix = dequantize(layer[name], layer[name + ABSMAX])
        return matrix.T.reshape(_weights(self)["layers"][name].layer_shape)

    def num_params(self) -> int:
        """The number of parameters that the weights stand for; tied embeddings count once."""
        return sum(math.prod(weight.shape) for weight in leaves(replace(self, quantization="none").weights()))

    def num_active_params(self) -> int:
        """The parameters that a token is multiplied with: of a mixture's experts only the chosen ones."""
        return self.num_params() - self.num_expert_params() // max(self.num_experts, 1) * (
            self.num_experts - self.num_experts_per_tok
        )

    def num_expert_params(self) -> int:
        return sum(math.prod(weight.shape) for weight in leaves(self.base.weights()) if weight.has_experts)


def _weights(sizes: ModelConfig) -> dict[str, Any]:
    V, E = sizes.vocab_size, sizes.hidden_size
    tree: dict[str, Any] = {
        "embed": Weight((V, E), ("vocab", "embed"), "normal", "model.embed_tokens.weight", "token_embd.weight", (V, E)),
        "layers": _attention(sizes) | (_experts(sizes) if sizes.num_experts else _mlp(sizes)),
        "final_norm": Weight((E,), ("embed",), _norm_init(sizes), "model.norm.weight", "output_norm.weight", (E,)),
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
    fused, whole = FAMILIES[sizes.family].modules.get("qkv"), (H + 2 * K) * D
    table = _norms(sizes, "attn", ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm"))
    row = 0
    for name, dim, heads in (("q", "heads", H), ("k", "kv_heads", K), ("v", "kv_heads", K)):
        names = (f"{fused or f'self_attn.{name}_proj'}.weight", f"attn_{'qkv' if fused else name}.weight")
        one = _stacked(sizes, (E, heads, D), ("embed", dim, "head_dim"), "normal", names, (heads * D, E))
        table[name] = replace(one, file_rows=FileRows(row, whole)) if fused else one
        row += heads * D
    out_names = ("self_attn.o_proj.weight", "attn_output.weight")
    table["o"] = _stacked(sizes, (H, D, E), ("heads", "head_dim", "embed"), "normal", out_names, (E, H * D))
    if sizes.qkv_bias:
        for name, dim, heads in (("q", "heads", H), ("k", "kv_heads", K), ("v", "kv_heads", K)):
            names = (f"self_attn.{name}_proj.bias", f"attn_{name}.bias")
            table[f"{name}_bias"] = _stacked(sizes, (heads, D), (dim, "head_dim"), "zeros", names, (heads * D,))
    if sizes.o_bias:
        names = ("self_attn.o_proj.bias", "attn_output.bias")
        table["o_bias"] = _stacked(sizes, (E,), ("embed",), "zeros", names, (E,))
    for name, dim, heads in (("q", "heads", H), ("k", "kv_heads", K)) if sizes.qk_norm else ():
        shape, dims = ((heads, D), (dim, "head_dim")) if sizes.qk_norm_over_heads else ((D,), ("head_dim",))
        table[f"{name}_norm"] = _norm(sizes, shape, dims, f"self_attn.{name}_norm", f"attn_{name}_norm")
    if sizes.attention_sinks:
        table["sinks"] = _stacked(sizes, (H,), ("heads",), "zeros", ("self_attn.sinks", "attn_sinks.weight"), (H,))
    return table


def _mlp(sizes: ModelConfig) -> dict[str, Weight]:
    E, F, modules = sizes.hidden_size, sizes.intermediate_size, FAMILIES[sizes.family].modules
    fused = modules.get("gate_up")

    def matrix(name: str) -> Weight:
        shape, dims = ((F, E), ("mlp", "embed")) if name == "down" else ((E, F), ("embed", "mlp"))
        if not fused or name == "down":
            names = (f"{modules.get(name, f'mlp.{name}_proj')}.weight", f"ffn_{name}.weight")
            return _stacked(sizes, shape, dims, "normal", names, shape[::-1])
        one = _stacked(sizes, shape, dims, "normal", (f"{fused}.weight", "ffn_up.weight"), shape[::-1])
        return replace(one, file_rows=FileRows(F if name == "up" else 0, 2 * F))

    table, names = _mlp_norms(sizes), ("gate", "up", "down")
    table |= {name: matrix(name) for name in names}
    for name in names if sizes.mlp_bias else ():
        size, dim = (E, "embed") if name == "down" else (F, "mlp")
        in_files = (f"mlp.{name}_proj.bias", f"ffn_{name}.bias")
        table[f"{name}_bias"] = _stacked(sizes, (size,), (dim,), "zeros", in_files, (size,))
    return table


def _mlp_norms(sizes: ModelConfig) -> dict[str, Weight]:
    before = "post_attention_layernorm" if sizes.norms == "before" else "pre_feedforward_layernorm"
    in_gguf = FAMILIES[sizes.family].modules.get("mlp_norm_gguf", "ffn_norm")
    return _norms(sizes, "mlp", (before, in_gguf), ("post_feedforward_layernorm", "post_ffw_norm"))


def _experts(sizes: ModelConfig) -> dict[str, Weight]:
    X, E, F = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    row, table = FAMILIES[sizes.family], _mlp_norms(sizes)
    suffixes = ("", "_bias") if row.bare_experts else (".weight", ".bias")

    def one(name: str, shape: tuple[int, ...], dims: tuple[str, ...], part: int = 0) -> Weight:
        is_fused = "gate_up" in row.modules and name != "down"
        names = row.modules["gate_up" if is_fused else name], f"ffn_{name}_exps"
        in_files = names[0] + suffixes[len(dims) == 1], names[1] + (".weight", ".bias")[len(dims) == 1]
        hf_shape = shape if row.bare_experts else shape[::-1]
        init: Init = "normal" if len(dims) == 2 else "zeros"
        weight = _stacked(sizes, shape, dims, init, in_files, hf_shape)
        rows = FileRows(part, 2 * F, 2) if row.bare_experts else FileRows(part * F, 2 * F)
        return replace(
            weight,
            shape=(sizes.num_layers, X, *shape),
            dims=("layers", "experts", *dims),
            transpose=weight.transpose and not row.bare_experts,
            file_rows=rows if is_fused else None,
        )

    router = row.modules["router"]
    in_files = (f"{router}.weight", "ffn_gate_inp.weight")
    table["router"] = _stacked(sizes, (E, X), ("embed", "routes"), "normal", in_files, (X, E))
    table |= {name: one(name, (E, F), ("embed", "mlp"), part) for part, name in enumerate(("gate", "up"))}
    table["down"] = one("down", (F, E), ("mlp", "embed"))
    if sizes.expert_bias:
        in_files = (f"{router}.bias", "ffn_gate_inp.bias")
        table["router_bias"] = _stacked(sizes, (X,), ("routes",), "zeros", in_files, (X,))
        table |= {f"{name}_bias": one(name, (F,), ("mlp",), part) for part, name in enumerate(("gate", "up"))}
        table["down_bias"] = one("down", (E,), ("embed",))
    return table


def _norms(sizes: ModelConfig, part: str, before: tuple[str, str], after: tuple[str, str]) -> dict[str, Weight]:
    """The norms before or after attention (or the MLP), with their names in files."""
    E, table = sizes.hidden_size, dict[str, Weight]()
    if sizes.norms != "after":
        table[f"{part}_norm"] = _norm(sizes, (E,), ("embed",), *before)
    if sizes.norms != "before":
        table[f"{part}_post_norm"] = _norm(sizes, (E,), ("embed",), *after)
    return table


def _norm(sizes: ModelConfig, shape: tuple[int, ...], dims: tuple[str, ...], *names: str) -> Weight:
    in_files = (f"{names[0]}.weight", f"{names[1]}.weight")
    return _stacked(sizes, shape, dims, _norm_init(sizes), in_files, (math.prod(shape),))


def _norm_init(sizes: ModelConfig) -> Init:
    return "less_one" if sizes.norm_plus_one else "ones"


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


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    family, scalar_head = _family(fields)
    row = FAMILIES[family]
    _check(fields, family, row)

    def size(name: str, default: int | None = None) -> int:
        return fields.integer(row.sizes.get(name, name), row.defaults.get(name, default), high=LARGEST[name])

    heads, hidden, vocab_size = size("num_attention_heads", 32), size("hidden_size"), size("vocab_size")
    if hidden % heads and fields.get("head_dim") is None and "head_dim" not in row.defaults:
        raise ValueError(f"{fields.file}: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    max_positions, num_layers = size("max_position_embeddings", 2048), size("num_hidden_layers")
    # a null means one key/value head per query head in all families, the key's absence only in some
    kv_heads = heads if "num_key_value_heads" in fields.raw else row.defaults.get("num_key_value_heads", heads)
    kv_heads = fields.integer("num_key_value_heads", kv_heads, high=LARGEST["num_key_value_heads"])
    switches: dict[str, Any] = dict(row.fixed) | {name: _number(fields, *key) for name, key in row.keys.items()}
    if row.experts is not None:
        switches |= read_experts(fields, row.experts)
    if "attention_bias" in row.biases:
        has_bias = fields.flag("attention_bias", row.defaults.get("attention_bias", False))
        switches["qkv_bias"] = switches["o_bias"] = has_bias
    act = fields.raw.get(row.activation, row.defaults.get("hidden_act", "silu"))
    if act not in ("silu", "swish", "gelu_pytorch_tanh"):
        fields.refuse(f"{row.activation} {shown(act)}", "the MLP's activation must be 'silu' or 'gelu_pytorch_tanh'")
    switches["hidden_act"] = "silu" if act == "swish" else act
    switches["mlp_bias"] = "mlp_bias" in row.biases and fields.flag("mlp_bias")
    switches |= row.layers(fields, num_layers) | _read_ropes(fields, row, max_positions)
    if "sliding_window" not in switches:
        switches.pop("sliding_rope", None)
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
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size("head_dim", hidden // heads),
            rms_norm_eps=fields.number("rms_norm_eps", row.defaults.get("rms_norm_eps", _DEFAULT_EPS), high=1.0),
            tie_word_embeddings=fields.flag("tie_word_embeddings", row.defaults.get("tie_word_embeddings", False)),
            **switches,
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


def _number(fields: Fields, key: str, default: float) -> float:
    """A multiplier or a cap; a null switches a cap off."""
    if key.endswith(("softcapping", "clip_qkv")) and not fields.raw.get(key, default):
        return 0.0
    if isinstance(default, int):
        return fields.integer(key, default, high=MAX_ID)
    return fields.number(key, default, high=_LARGEST_FACTOR)


def _read_ropes(fields: Fields, row: Family, max_positions: int) -> dict[str, Any]:
    if row.local_rope is not None:
        rope, local = read_ropes(fields, max_positions, *row.local_rope)
        return {"rope_theta": rope.theta, "rope_scaling": rope.scaling, "sliding_rope": local}
    theta = row.defaults.get("rope_theta", DEFAULT_THETA)
    names = ["original_max_position_embeddings"]
    if "rope_parameters" not in fields.raw:
        names.append("rope_scaling")
    usual = {name: row.defaults[name] for name in names if name in row.defaults}
    fields = Fields(usual | dict(fields.raw), fields.file)
    rope = read_rope(fields, max_positions, theta, row.partial_rope, row.longrope)
    found: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
    if row.partial_rope:
        inner = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        given = Fields({"partial_rotary_factor": fields.get("partial_rotary_factor")} | inner, fields.file)
        found["partial_rotary_factor"] = given.number("partial_rotary_factor", 1.0, high=1.0)
    return found


def _family(fields: Fields) -> tuple[str, bool]:
    """(the family, whether it is a reward model). The family is that of `architectures`, or of `model_type` where that
    is missing; both must agree."""
    named, kind = fields.get("architectures", []), fields.get("model_type")
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        fields.wrong("architectures", f'a list of names, as ["{FAMILIES["llama"].architecture}"]')
    if kind is not None and not isinstance(kind, str):
        fields.wrong("model_type", f"one of {', '.join(FAMILIES)}")
    models = {row.architecture: family for family, row in FAMILIES.items()}
    reward_models = {row.reward_architecture: family for family, row in FAMILIES.items()}
    scalar_head = bool(named) and named[0] in reward_models
    family = (models | reward_models).get(named[0]) if named else kind
    if family not in FAMILIES:
        value = f"architectures {shown(named)}" if named else f"model_type {shown(kind)}"
        fields.refuse(value, f"supported are {', '.join(models)}")
    if kind not in (None, family):
        fields.refuse(
            f"architectures {shown(named)} with model_type {shown(kind)}", f"the model_type of {named[0]} is {family!r}"
        )
    if family == "mistral" and fields.get("layer_types") is not None:
        family = "ministral"  # as transformers reads it
    return family, scalar_head


def _check(fields: Fields, family: str, row: Family) -> None:
    """Refuses what the decoder would otherwise leave out in silence."""
    if fields.flag("attention_bias") and "attention_bias" not in row.biases and family != "qwen2":
        fields.refuse(f"attention_bias true with model_type {family!r}", "models of this type have none")
    if fields.flag("mlp_bias") and "mlp_bias" not in row.biases:
        fields.refuse(f"mlp_bias true with model_type {family!r}", "models of this type have none")
    for key, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        if fields.flag(key, causal) is not causal:
            fields.refuse(f"{key} {str(not causal).lower()}", "attention must be causal")
    if fields.get("quantization_config") is not None:
        from jaxrl.models.coded_files import read_blocks

        read_blocks(fields)
