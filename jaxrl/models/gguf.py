"""GGUF files: the weights and shapes of models as llama.cpp stores them (`FAMILIES` has its architectures).

The `gguf` package reads and dequantises; this module brings the weights into the training form:

- the converter interleaves the rows of q and k of Llama, SmolLM3 and Granite, so that rotary pairs are neighbours; here
  the first half of a head pairs with the second, as in Hugging Face files, so the rows go back;
- it adds one to the norms of Gemma, which multiply by one plus the weight: it is taken off again;
- what llama.cpp has in its code and not in the file is here, too, such as the scale of the largest Gemmas' scores;
- the llama3 kind of rope scaling is stored as a tensor of divisors, from which its constants are recovered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from jaxrl.data.gguf_file import metadata, open_gguf
from jaxrl.models.config import LARGEST, ModelConfig, read_config
from jaxrl.models.decoder import rope_frequencies
from jaxrl.models.families import FAMILIES as FAMILIES_OF_MODELS
from jaxrl.models.families import FULL, MAX_EXPERTS, SLIDING
from jaxrl.models.fields import MAX_ID, Fields
from jaxrl.models.rope import MAX_FACTOR, MAX_THETA, RopeScaling, yarn_attention_factor
from jaxrl.models.safetensors import OpenModel, Tensor, check_tensors
from jaxrl.models.weights import Weight
from jaxrl.schema.declared import shown
from jaxrl.sharding.rules import map_weights

SUPPORTED = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K, Kind.MXFP4)
FAMILIES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "olmo2", "smollm3", "phi3", "granite", "gemma2")},
    **{"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"},
    **{name: name for name in ("olmoe", "granitemoe")},
}
"""llama.cpp's architectures, and what transformers calls the same; OLMo 3 is an olmo2 with windows, and Mixtral a llama
with experts."""

_INTERLEAVED = ("llama", "smollm3", "granite", "mixtral", "granitemoe")
_ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
# The only constants that llama3 scaling has been published with; the divisors in the file are checked against them.
_LLAMA3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


class _Metadata(Fields):
    """Metadata of one file. A key that begins with a dot is relative to the architecture."""

    def __init__(self, reader: GGUFReader, file: str) -> None:
        super().__init__({}, file)
        self.reader = reader
        self.architecture = ""
        self.architecture = self.text("general.architecture", "")

    def name(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def get(self, name: str, default: Any = None) -> Any:
        return metadata(self.reader, self.file, self.name(name), default)

    def wrong(self, name: str, rule: str) -> NoReturn:
        if (found := self.get(name)) is None:
            raise ValueError(f"{self.file}: metadata {self.name(name)} is missing; it must be {rule}")
        raise ValueError(f"{self.file}: metadata {self.name(name)} ({shown(found)}) must be {rule}")

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            self.wrong(key, "a text")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        return None if self.get(key) is None else self.integer(key, low=0, high=vocab_size - 1)


def config_from_gguf(reader: GGUFReader, file: str) -> ModelConfig:
    """The model's config from metadata; the vocabulary's size and tied embeddings follow from tensors."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    meta = _Metadata(reader, file)
    _check_kind(meta)
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{file}: tensor token_embd.weight is missing")
    embedding = [int(n) for n in tensors["token_embd.weight"].shape]
    vocab_size = embedding[1] if len(embedding) == 2 else 0
    if not 0 < vocab_size <= LARGEST["vocab_size"]:
        raise ValueError(
            f"{file}: tensor token_embd.weight has shape {tuple(reversed(embedding))}, which is no embedding"
        )
    content = {"vocab_size": vocab_size, **_like_hf(meta, tensors, vocab_size)}
    config = read_config(Fields(content, file), Fields({}, file))
    if _ROPE_FACTORS in tensors:
        return _with_llama3(config, tensors[_ROPE_FACTORS], file)
    return config


def _check_kind(meta: _Metadata) -> None:
    if (arch := meta.architecture) not in FAMILIES:
        raise ValueError(f"{meta.file}: general.architecture {arch!r} is not supported; use {', '.join(FAMILIES)}")
    if (count := meta.integer("split.count", 0, low=0, high=MAX_ID)) > 1:
        raise ValueError(f"{meta.file}: split.count {count} is not supported; use a single file")
    experts = meta.integer(".expert_count", 0, low=0, high=MAX_ID)
    if experts > 1 and arch != "llama" and FAMILIES_OF_MODELS[FAMILIES[arch]].experts is None:
        raise ValueError(f"{meta.file}: expert_count {experts} is not supported; models of this kind are dense")
    if arch in ("llama", "qwen2", "qwen3") and meta.get(".attention.sliding_window"):
        raise ValueError(f"{meta.file}: attention.sliding_window is not supported; attention must be full everywhere")


def _like_hf(meta: _Metadata, tensors: dict[str, ReaderTensor], vocab_size: int) -> dict[str, Any]:
    """The content that config.json would have, for the family's own rules to read."""

    def size(key: str, name: str, default: int | None = None) -> int:
        return meta.integer(key, default, high=LARGEST[name])

    arch, num_layers = meta.architecture, size(".block_count", "num_hidden_layers")
    heads, hidden = size(".attention.head_count", "num_attention_heads"), size(".embedding_length", "hidden_size")
    head_dim = size(".attention.key_length", "head_dim", hidden // heads)
    rotated = size(".rope.dimension_count", "head_dim", head_dim)
    if rotated != head_dim and arch != "phi3":
        raise ValueError(f"{meta.file}: rope.dimension_count ({rotated}) must equal the head's size ({head_dim})")
    context = size(".context_length", "max_position_embeddings")
    stops = [meta.token_id(f"tokenizer.ggml.{name}_token_id", vocab_size) for name in ("eos", "eot")]
    scaling = RopeScaling() if arch == "phi3" else _rope_scaling(meta, context)
    window = meta.integer(".attention.sliding_window", 0, low=0, high=MAX_ID)
    experts = meta.integer(".expert_count", 0, low=0, high=MAX_EXPERTS)
    family = "mixtral" if arch == "llama" and experts else FAMILIES[arch]
    found: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": size(".feed_forward_length", "intermediate_size"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": size(".attention.head_count_kv", "num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _decimal(meta.number(".attention.layer_norm_rms_epsilon", high=1.0)),
        "rope_theta": round(meta.number(".rope.freq_base", 10_000.0, above=1.0, high=MAX_THETA), 6),
        "rope_scaling": None if scaling.kind == "none" else scaling.to_hf(),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "sliding_window": window or None,
        "bos_token_id": meta.token_id("tokenizer.ggml.bos_token_id", vocab_size),
        "eos_token_id": [*dict.fromkeys(i for i in stops if i is not None)],
    }
    if (row := FAMILIES_OF_MODELS[family].experts) is not None:
        found |= {row.key: experts, "num_experts_per_tok": meta.integer(".expert_used_count", high=experts or 1)}
        found |= {"norm_topk_prob": arch != "olmoe"}  # llama.cpp has it in its code
        if meta.get(key := ".expert_feed_forward_length") is not None:
            found[FAMILIES_OF_MODELS[family].sizes.get("intermediate_size", "intermediate_size")] = size(
                key, "intermediate_size"
            )
    if arch == "gpt-oss" and scaling.kind == "yarn":
        found["rope_scaling"] |= {"truncate": False}
    for key, name in _SCALES.items():
        if meta.get(key) is not None:
            found[name] = _decimal(meta.number(key, high=MAX_FACTOR))
    if arch == "phi3":
        found |= _phi3(meta, tensors, context, rotated / head_dim)
    if arch == "olmo2" and window:
        pattern = meta.get(".attention.sliding_window_pattern", [(i + 1) % 4 != 0 for i in range(num_layers)])
        if not isinstance(pattern, list) or len(pattern) != num_layers:
            meta.wrong(".attention.sliding_window_pattern", f"a flag for each of the {num_layers} layers")
        found |= {"model_type": "olmo3", "layer_types": [SLIDING if slides else FULL for slides in pattern]}
    if (arch, num_layers) in _LARGEST_GEMMAS:
        found["query_pre_attn_scalar"] = hidden // heads
    elif arch.startswith("gemma"):
        found["query_pre_attn_scalar"] = head_dim
    return found


_SCALES = {
    ".attention.scale": "attention_multiplier",
    ".embedding_scale": "embedding_multiplier",
    ".residual_scale": "residual_multiplier",
    ".logit_scale": "logits_scaling",
    ".attn_logit_softcapping": "attn_logit_softcapping",
    ".final_logit_softcapping": "final_logit_softcapping",
}
_LARGEST_GEMMAS = (("gemma2", 46), ("gemma3", 62))  # with 27B weights, by their layers


def _phi3(meta: _Metadata, tensors: dict[str, ReaderTensor], context: int, partial: float) -> dict[str, Any]:
    """The rope of Phi: of a part of each head, and perhaps longrope, whose factors are tensors."""
    out: dict[str, Any] = {"partial_rotary_factor": partial}
    if all(name in tensors for name in _LONGROPE.values()):
        lists = {name: np.asarray(tensors[tensor].data, np.float64).tolist() for name, tensor in _LONGROPE.items()}
        out["rope_scaling"] = {"type": "longrope", **lists}
        if meta.get(key := ".rope.scaling.attn_factor") is not None:
            out["rope_scaling"]["attention_factor"] = meta.number(key, high=MAX_FACTOR)
        original = meta.integer(".rope.scaling.original_context_length", context, high=MAX_ID)
        out["original_max_position_embeddings"] = original
    return out


def _decimal(number: float) -> float:
    """Stored in float32; a decimal of that precision is what the original config.json said."""
    return float(f"{number:.6g}")


def _rope_scaling(meta: _Metadata, context: int) -> RopeScaling:
    kind = meta.text(".rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{meta.file}: rope.scaling.type {kind!r} is not supported; use 'none', 'linear' or 'yarn'")

    def number(key: str, default: float | None = None) -> float:
        return meta.number(f".rope.scaling.{key}", default, high=MAX_FACTOR)

    factor = number("factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    return RopeScaling(
        "yarn",
        factor,
        meta.integer(".rope.scaling.original_context_length", context, high=MAX_ID),
        beta_fast=number("yarn_beta_fast", 32.0),
        beta_slow=number("yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor(factor, {}) * number("attn_factor", number("yarn_attn_factor", 1.0)),
    )


def _with_llama3(config: ModelConfig, tensor: ReaderTensor, file: str) -> ModelConfig:
    if tensor.tensor_type != Kind.F32:
        raise ValueError(f"{file}: tensor {_ROPE_FACTORS} has type {tensor.tensor_type.name}; it must have F32")
    divisors = np.asarray(tensor.data, np.float64)
    if np.all(divisors == 1):
        return config
    largest = float(divisors.max(initial=0.0))
    scaled = replace(config, rope_scaling=RopeScaling("llama3", largest, **_LLAMA3))
    if (
        divisors.shape != (config.head_dim // 2,)
        or not (1 <= largest <= MAX_FACTOR and divisors.min() > 0)
        or not np.allclose(rope_frequencies(config) / divisors, rope_frequencies(scaled), rtol=1e-4)
    ):
        raise ValueError(f"{file}: {_ROPE_FACTORS} does not come from llama3 scaling with {_LLAMA3}; use a HF folder")
    return scaled


def unpermute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the converter's interleaving of the rows of q and k: neighbours become the first and the second half."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def open_gguf_model(file: str | Path) -> OpenModel:
    """Opens a GGUF file. Raises ValueError where its tensors do not fit its config, or have an unsupported type."""
    file = str(file)
    reader = open_gguf(file)
    config = config_from_gguf(reader, file)
    of_rope = (_ROPE_FACTORS, *_LONGROPE.values())
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name not in of_rope}
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    table = map_weights(lambda weight: weight.in_gguf, config.weights())
    check_tensors(table, shapes, lambda _: file)
    for name, tensor in tensors.items():
        if tensor.tensor_type not in SUPPORTED:
            raise ValueError(
                f"{file}: tensor {name} has type {tensor.tensor_type.name}, which is not supported; supported are "
                f"{', '.join(kind.name for kind in SUPPORTED)}"
            )

    def of(weight: Weight) -> Callable[[int], Tensor]:
        names = weight.names()
        heads = {"blk.{layer}.attn_q": config.num_heads, "blk.{layer}.attn_k": config.num_kv_heads}
        permuted = heads.get(weight.gguf_name.rsplit(".", 1)[0]) if config.family in _INTERLEAVED else None
        values: dict[int, np.ndarray] = {}

        def layer(index: int) -> Tensor:
            # Kept while the weight is being placed: every shard asks for it, and dequantising is the slow part.
            if index not in values:
                tensor = tensors[names[index]]
                array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(weight.file_shape)
                array = array - 1 if weight.init == "less_one" else array
                values[index] = array if permuted is None else unpermute(array, permuted)
            own = values[index]
            return Tensor(Path(file), names[index], own.shape, None, "", lambda *part: own[part])

        return layer

    return OpenModel(config, table, of)
