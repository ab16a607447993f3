"""Attention of a decode step over a paged KV cache on TPUs: JAX's own Pallas kernel, behind our cache and block tables.

`jax.experimental.pallas.ops.tpu.paged_attention` reads keys and values where they lie, a row's blocks up to its length.
It has one query a row and no window. Its arrays are [K, N, P, D], as ours are; its ragged sibling, which prefills as
well, wants keys and values of a block in one array. docs/kernels.md says what was compiled; it has not run on a TPU.

Dims: as in `jaxrl.kernels.attention`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as kernel

from jaxrl.kernels.reference import PLAIN, Rule

_STEP_POSITIONS = 256  # of the context that a program reads in one step; a row reads whole steps
_MAX_ENTRIES = 1 << 17  # of block tables: a call holds them in scalar memory, 1 MiB, of which this is half


def refusal(q_RCHD: Any, k_KNPD: Any, rule: Rule, sinks_H: Any) -> str | None:
    """Why the kernel cannot serve a decode step of these shapes, dtypes and rule; None if it can."""
    dim, size = k_KNPD.shape[-1], k_KNPD.shape[2]
    if rule.window:
        return f"a layer has a window ({rule.window}), which the TPU's kernel does not know"
    if sinks_H is not None:
        return "a layer has sinks, which the TPU's kernel does not know"
    if {q_RCHD.dtype, k_KNPD.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return f"rollout.dtype ({k_KNPD.dtype}) must be bfloat16, to which the TPU's kernel rounds keys and values"
    if dim % 128:
        return f"head_dim ({dim}) must be a multiple of 128 for the TPU's kernel"
    if size % 8:
        return f"rollout.block_size ({size}) must be a multiple of 8 for the TPU's kernel"
    return None


def paged_attention(
    q_RCHD: jax.Array,
    k_KNPD: jax.Array,
    v_KNPD: jax.Array,
    tables_RW: jax.Array,
    positions_RC: jax.Array,
    rule: Rule = PLAIN,
) -> jax.Array:
    """[R, 1, H, D]: as `reference.paged_attention` for one query a row, of what `refusal` lets pass.

    Tables are padded with block 0 to whole steps, and rows split where their tables are more than scalar memory holds.
    """
    size, width = k_KNPD.shape[2], tables_RW.shape[1]
    pages = min(width, max(1, _STEP_POSITIONS // size))
    tables_RW = jnp.pad(tables_RW, ((0, 0), (0, -width % pages)))
    lengths_R = jnp.minimum(positions_RC[:, 0] + 1, width * size)  # a row that does not decode may stand anywhere
    q_RHD = q_RCHD[:, 0].astype(jnp.float32) * q_RCHD.shape[-1] ** -0.5
    how = {"pages_per_compute_block": pages, "attn_logits_soft_cap": rule.softcap or None}
    rows = max(1, _MAX_ENTRIES // tables_RW.shape[1])
    parts = [slice(first, first + rows) for first in range(0, len(q_RHD), rows)]
    outs = [kernel(q_RHD[part], k_KNPD, v_KNPD, lengths_R[part], tables_RW[part], **how) for part in parts]
    return jnp.concatenate(outs)[:, None].astype(q_RCHD.dtype)
