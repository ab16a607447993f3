"""One interface to attention over a paged KV cache, and the writes into it.

Prefill, decode and verification are the same operation with a different number of queries per row: `paged_attention`
takes C queries a row and masks by position. What runs behind it depends on the backend; the jnp oracle in
`jaxrl.kernels.reference` is the path on CPU, and what every other implementation is tested against.

Dims: R rows, C queries per row, H query heads, K key/value heads, D head dim, N blocks, P positions per block,
W blocks per table. All of it is local to one device: callers run it inside `shard_map`.
"""

from __future__ import annotations

import jax

from jaxrl.kernels import reference


def write_kv(
    pool_KNPD: jax.Array, new_RCKD: jax.Array, tables_RW: jax.Array, positions_RC: jax.Array, valid_RC: jax.Array
) -> jax.Array:
    """Writes keys (or values) of C positions per row through the rows' block tables; invalid ones go to block 0."""
    return reference.write_kv(pool_KNPD, new_RCKD, tables_RW, positions_RC, valid_RC)


def paged_attention(
    q_RCHD: jax.Array, k_KNPD: jax.Array, v_KNPD: jax.Array, tables_RW: jax.Array, positions_RC: jax.Array
) -> jax.Array:
    """[R, C, H, D]: query (r, c) sees the row's cached positions 0 .. positions[r, c], its own included."""
    return reference.paged_attention(q_RCHD, k_KNPD, v_KNPD, tables_RW, positions_RC)
