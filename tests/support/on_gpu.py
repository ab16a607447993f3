"""What the tests marked `gpu` share.

On a GPU the kernels run as they are. `pytest -m gpu --interpret` runs the same tests on a CPU, with the kernels as
plain JAX, as if the CPU were a GPU, and with smaller arrays: it shows that nothing but the device is missing.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

INTERPRET = os.environ.get("JAX_PLATFORMS", "cpu") == "cpu"
LONGEST = 160
"""Tokens of a sequence of the engine's tests."""
DEPRECATED = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"

Value = TypeVar("Value")


def sized(real: Value, small: Value) -> Value:
    """The first on a GPU, the second where kernels are interpreted."""
    return small if INTERPRET else real


LLAMA = ModelConfig(
    family="llama",
    vocab_size=sized(2000, 200),
    hidden_size=sized(256, 32),
    intermediate_size=sized(512, 48),
    num_layers=sized(4, 1),
    num_heads=sized(8, 4),
    num_kv_heads=sized(4, 2),
    head_dim=sized(64, 32),
    rope_theta=1e4,
    tie_word_embeddings=True,
    max_position_embeddings=512,
)
MODELS = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, tie_word_embeddings=False),
}


def weights(model: ModelConfig) -> Any:
    def noisy(leaf: jax.Array, key: jax.Array) -> jax.Array:
        return leaf + 0.05 * jax.random.normal(key, leaf.shape, leaf.dtype)

    made = decoder.init(model, jax.random.key(0))
    leaves, structure = jax.tree.flatten(made)
    return jax.tree.unflatten(structure, map(noisy, leaves, jax.random.split(jax.random.key(1), len(leaves))))


def executor(
    model: ModelConfig,
    slots: int,
    blocks: int,
    dtype: str,
    attention: Any = "auto",
    drafting: Drafting | None = None,
    **codes: Any,
) -> MeshExecutor:
    """On one device, in the form that a GPU's programs have."""
    as_on_a_gpu = (
        {"fused_projections": True, "gathered": False, "features_first": False, "interpret": True} if INTERPRET else {}
    )
    sizes = ExecutorConfig(
        num_slots=slots,
        num_blocks=blocks,
        max_length=LONGEST,
        max_prefill_tokens=64,
        decode_steps=8,
        dtype=dtype,
        attention=attention,
        proposer=drafting,
        **as_on_a_gpu,
        **codes,
    )
    return MeshExecutor(model, Layout(make_mesh(jax.devices()[:1]), 1), sizes)


def relative(found: Any, expected: Any) -> float:
    """The norm of the difference of two trees over that of the second; nan stays nan."""
    off = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), found, expected)
    return norm(off) / norm(expected)


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree))))


def assert_equal_bits(one: Any, other: Any) -> None:
    """Two trees of arrays without nan."""
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(_bits, one), jax.tree.map(_bits, other))


def _bits(leaf: Any) -> np.ndarray:
    array = np.asarray(jnp.asarray(leaf))
    return array.view(f"u{array.dtype.itemsize}")
