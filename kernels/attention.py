"""One interface to attention over a paged KV cache, to the writes into it, and to attention over packed rows.

Prefill, decode and verification are the same operation with a different number of queries per row: `paged_attention`
takes C queries a row and masks by position. What runs behind an operation is its argument `implementation`:

- `"reference"`: plain jnp (`jaxrl.kernels.reference`), on any platform; what everything else is tested against;
- `"pallas"`: our GPU kernels (`paged_pallas`, `packed_pallas`); a ValueError for shapes or dtypes that they refuse;
- `"auto"`: the kernels where JAX's default backend is a GPU, the program is compiled for CUDA, and the kernels take
  these shapes and dtypes; the reference otherwise. All of it is known while tracing; nothing is tried and caught.

docs/kernels.md says what the kernels are, why these, and what of them has been measured.

Dims: R rows, C queries per row, H query heads, K key/value heads, D head dim, N blocks, P positions per block,
W blocks per table, T tokens of a packed row. All of it is local to one device: callers run it inside `shard_map`.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.kernels import reference

Implementation = Literal["auto", "reference", "pallas"]


def write_kv(
    pool_KNPD: jax.Array, new_RCKD: jax.Array, tables_RW: jax.Array, positions_RC: jax.Array, valid_RC: jax.Array
) -> jax.Array:
    """Writes keys (or values) of C positions per row through the rows' block tables; invalid ones go to block 0."""
    return reference.write_kv(pool_KNPD, new_RCKD, tables_RW, positions_RC, valid_RC)


def paged_attention(
    q_RCHD: jax.Array,
    k_KNPD: jax.Array,
    v_KNPD: jax.Array,
    tables_RW: jax.Array,
    positions_RC: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """[R, C, H, D]: query (r, c) sees the row's cached positions 0 .. positions[r, c], its own included.

    Raises:
      ValueError: for an unknown implementation, or one that cannot take these shapes and dtypes.
    """
    arrays = (q_RCHD, k_KNPD, v_KNPD, tables_RW, positions_RC)
    if not _wants_kernel(implementation):
        return reference.paged_attention(*arrays)
    # Imported here: on CPU nobody waits for it, and a JAX that has dropped this backend of Pallas still runs there.
    from jaxrl.kernels import paged_pallas

    if implementation == "pallas":
        return paged_pallas.paged_attention(*arrays)
    if paged_pallas.refusal(q_RCHD, k_KNPD, v_KNPD):
        return reference.paged_attention(*arrays)
    return lax.platform_dependent(
        *arrays, cuda=lambda *x: paged_pallas.paged_attention(*x), default=reference.paged_attention
    )


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    *,
    prefix_ids: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """[R, T, H, D]: causal attention within the segments of packed rows and to the segments that they continue.

    `reference.packed_attention` has the shapes and the rule; `prefix_ids` may also be 0 for none. On a GPU `"auto"`
    goes by the default backend alone, not by what the program is compiled for: a branch that JAX chooses when it
    compiles would make both implementations' residuals, the reference's [T, T] weights among them, outlive the
    forward pass.

    Raises:
      ValueError: for an unknown implementation, or one that cannot take these shapes and dtypes.
    """
    if _wants_kernel(implementation):
        from jaxrl.kernels import packed_pallas  # here for the same reasons as above

        if implementation == "pallas" or not packed_pallas.refusal(q, k, v):
            return packed_pallas.packed_attention(q, k, v, segment_ids, positions, prefix_ids=prefix_ids)
    if prefix_ids is not None:
        prefix_ids = jnp.where(prefix_ids == 0, segment_ids, prefix_ids)
    return reference.packed_attention(q, k, v, segment_ids, positions, prefix_ids)


def _wants_kernel(implementation: Implementation) -> bool:
    if implementation not in get_args(Implementation):
        raise ValueError(f"attention: implementation ({implementation!r}) must be one of {get_args(Implementation)}")
    return implementation == "pallas" or (implementation == "auto" and jax.default_backend() == "gpu")
