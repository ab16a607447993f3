"""GGUF files: the weights and shapes of Llama, Qwen2 and Qwen3 models as llama.cpp stores them.

The `gguf` package reads and dequantises; this module brings the weights into the training form:

- the converter interleaves the rows of q and k of the llama family, so that rotary pairs are neighbours; here the first
  half of a head pairs with the second, as in Hugging Face files, so the rows go back;
- the llama3 kind of rope scaling is stored as a tensor of divisors, from which its constants are recovered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize
from jax.sharding import Mesh

from jaxrl.models.config import Family, ModelConfig, RopeScaling, yarn_attention_factor
from jaxrl.models.decoder import rope_frequencies
from jaxrl.models.safetensors import check_tensors, place, shardings_of
from jaxrl.models.weights import Weight
from jaxrl.sharding import rules

SUPPORTED = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K)
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
# The only constants that llama3 scaling has been published with; the divisors in the file are checked against them.
_LLAMA3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def open_gguf(file: str | Path) -> GGUFReader:
    """The `gguf` package's reader; ValueError with one sentence if the file cannot be read."""
    try:
        return GGUFReader(str(file))
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        # The reader slices a memory map without checking its length: a truncated file raises any of these.
        raise ValueError(f"{file}: truncated or not a GGUF file ({error})") from None


class _Metadata:
    """Metadata of one file, keys relative to the architecture where they start with a dot."""

    def __init__(self, reader: GGUFReader, file: str) -> None:
        self.reader = reader
        self.file = file
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(self.architecture + key if key.startswith(".") else key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file}: metadata {self.architecture}{key} is missing")
        return value


def config_from_gguf(reader: GGUFReader, file: str) -> ModelConfig:
    """The model's shapes and constants from metadata (and, for the vocabulary and tied embeddings, from tensors)."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    meta = _Metadata(reader, file)
    arch = meta.architecture
    if arch not in ARCHITECTURES:
        raise ValueError(f"{file}: general.architecture {arch!r} is not supported; use {', '.join(ARCHITECTURES)}")
    for key in ("split.count", ".expert_count"):
        if (count := meta.get(key, 0)) > 1:
            raise ValueError(f"{file}: {key.lstrip('.')} {count} is not supported; use a single file of a dense model")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{file}: tensor token_embd.weight is missing")
    heads, hidden = int(meta.need(".attention.head_count")), int(meta.need(".embedding_length"))
    head_dim = int(meta.get(".attention.key_length", hidden // heads))
    if (rotated := int(meta.get(".rope.dimension_count", head_dim))) != head_dim:
        raise ValueError(f"{file}: rope.dimension_count ({rotated}) must equal the head's size ({head_dim})")
    if meta.get(".attention.sliding_window", 0):
        raise ValueError(f"{file}: attention.sliding_window is not supported; attention must be full everywhere")
    eos = (meta.get("tokenizer.ggml.eos_token_id"), meta.get("tokenizer.ggml.eot_token_id"))
    bos = meta.get("tokenizer.ggml.bos_token_id")
    context = int(meta.need(".context_length"))
    theta = round(float(meta.get(".rope.freq_base", 10_000.0)), 6)
    config = ModelConfig(
        family=cast(Family, arch),
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=int(meta.need(".feed_forward_length")),
        num_layers=int(meta.need(".block_count")),
        num_heads=heads,
        num_kv_heads=int(meta.get(".attention.head_count_kv", heads)),
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=_rope_scaling(meta, context),
        # Stored in float32; a decimal of that precision is what the original config.json said.
        rms_norm_eps=float(f"{float(meta.need('.attention.layer_norm_rms_epsilon')):.6g}"),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        max_position_embeddings=context,
        bos_token_id=None if bos is None else int(bos),
        eos_token_ids=tuple(dict.fromkeys(int(i) for i in eos if i is not None)),
    )
    if _ROPE_FACTORS in tensors:
        return _with_llama3(config, np.asarray(tensors[_ROPE_FACTORS].data, np.float64), file)
    return config


def _rope_scaling(meta: _Metadata, context: int) -> RopeScaling:
    kind = meta.get(".rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{meta.file}: rope.scaling.type {kind!r} is not supported; use 'none', 'linear' or 'yarn'")
    factor = float(meta.need(".rope.scaling.factor"))
    if kind == "linear":
        return RopeScaling("linear", factor)
    extra = float(meta.get(".rope.scaling.attn_factor", meta.get(".rope.scaling.yarn_attn_factor", 1.0)))
    return RopeScaling(
        "yarn",
        factor,
        int(meta.get(".rope.scaling.original_context_length", context)),
        beta_fast=float(meta.get(".rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(meta.get(".rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=yarn_attention_factor(factor, {}) * extra,
    )


def _with_llama3(config: ModelConfig, divisors: np.ndarray, file: str) -> ModelConfig:
    if np.all(divisors == 1):
        return config
    scaled = replace(config, rope_scaling=RopeScaling("llama3", float(divisors.max()), **_LLAMA3))
    if divisors.shape != (config.head_dim // 2,) or not np.allclose(
        rope_frequencies(config) / divisors, rope_frequencies(scaled), rtol=1e-4
    ):
        raise ValueError(f"{file}: {_ROPE_FACTORS} does not come from llama3 scaling with {_LLAMA3}; use a HF folder")
    return scaled


def unpermute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Undo the converter's interleaving of q's and k's rows: neighbours become the first and the second half."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def load_gguf(file: str | Path, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> tuple[ModelConfig, Any]:
    """(config, params in training form) of a GGUF file, dequantised, on the mesh's train shardings."""
    file = str(file)
    reader = open_gguf(file)
    config = config_from_gguf(reader, file)
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS}
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    table = config.weights()
    check_tensors(table, shapes, lambda _: file, kind="gguf")
    for name, tensor in tensors.items():
        if tensor.tensor_type not in SUPPORTED:
            raise ValueError(
                f"{file}: tensor {name} has type {tensor.tensor_type.name}, which is not supported; supported are "
                f"{', '.join(kind.name for kind in SUPPORTED)}"
            )

    def read(weight: Weight) -> Callable[[int], np.ndarray]:
        names = weight.names("gguf")
        heads = {"blk.{layer}.attn_q": config.num_heads, "blk.{layer}.attn_k": config.num_kv_heads}
        permuted = heads.get(weight.gguf_name.rsplit(".", 1)[0]) if config.family == "llama" else None
        values: dict[int, np.ndarray] = {}

        def layer(index: int) -> np.ndarray:
            # Kept while the weight is being placed: every shard asks for it, and dequantising is the slow part.
            if index not in values:
                tensor = tensors[names[index]]
                array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(weight.hf_shape)
                values[index] = array if permuted is None else unpermute(array, permuted)
            return values[index]

        return layer

    return config, rules.map_weights(
        lambda weight, sharding: place(weight, read(weight), dtype, sharding), table, shardings_of(config, mesh)
    )
