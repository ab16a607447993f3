"""The residual add and the norm behind it as one Pallas kernel for NVIDIA GPUs.

Left to XLA, the sum of a product's parts, the add and the norm become one kernel that does not keep the residual
stream, and a second one that adds up the same parts again to keep it. Here both results come from one reading.

Backend: Pallas on Triton (docs/kernels.md). One program per row.

Dims: R rows, E features, S partial sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


@partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm(
    x_RE: jax.Array, parts_SRE: jax.Array, scale_E: jax.Array, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(x + the sum of the parts, its RMS norm), both [R, E] in x's dtype, rounded where separate operations round.

    Args:
      parts_SRE: a product's partial sums, float32, not rounded yet.
      scale_E: of the norm.
      interpret: run as plain JAX, on any device (slow; for tests).
    """
    (rows, features), parts = x_RE.shape, parts_SRE.shape[0]
    width = pl.next_power_of_2(features)
    of_row = pl.BlockSpec((None, features), lambda r: (r, 0))
    shape = jax.ShapeDtypeStruct(x_RE.shape, x_RE.dtype)
    x_RE, normed_RE = pl.pallas_call(
        partial(_add_norm_kernel, width=width, eps=eps),
        grid=(rows,),
        in_specs=[
            of_row,
            pl.BlockSpec((parts, None, features), lambda r: (0, r, 0)),
            pl.BlockSpec((features,), lambda r: (0,)),
        ],
        out_specs=[of_row, of_row],
        out_shape=[shape, shape],
        compiler_params=plgpu.CompilerParams(num_warps=8 if width >= 2048 else 4, num_stages=1),
        interpret=interpret,
    )(x_RE, parts_SRE, scale_E)
    return x_RE, normed_RE


def _add_norm_kernel(
    x_ref: Any, parts_ref: Any, scale_ref: Any, sum_ref: Any, out_ref: Any, *, width: int, eps: float
) -> None:
    """Refs of one row: x, sum, out [E], parts [S, E]; scale [E]. `width` is E up to the next power of two."""
    parts, features = parts_ref.shape
    dtype = x_ref.dtype
    at = jnp.arange(width, dtype=jnp.int32)
    mask = at < features
    total = jnp.zeros((width,), jnp.float32)
    for i in range(parts):
        total += plgpu.load(parts_ref.at[jnp.full((width,), i, jnp.int32), at], mask=mask, other=0)
    x = plgpu.load(x_ref.at[at], mask=mask, other=0)
    added = (x.astype(jnp.float32) + total.astype(dtype).astype(jnp.float32)).astype(dtype)
    plgpu.store(sum_ref.at[at], added, mask=mask)
    wide = added.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.sum(wide * wide) / features + eps)
    scale = plgpu.load(scale_ref.at[at], mask=mask, other=0).astype(jnp.float32)
    plgpu.store(out_ref.at[at], (normed * scale).astype(dtype), mask=mask)
