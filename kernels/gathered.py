"""Decode attention over a window: the blocks of each row, gathered once for many decode steps.

A paged gather in every step moves each key and value three times (read, write, read again) where attention needs them
once. Where no kernel reads a block table in place (XLA on CPU), a decode program therefore copies its rows' blocks into
a *window* before its first step, keeps the tokens of its own steps in a small *fresh* buffer, and writes that back to
the pool after its last. All rows of a program advance in lockstep, so a step's keys and values go to one index of the
fresh buffer: a slice update in place, where the pool needs a scatter.

Keys of the window lie transposed, [D, S], and rows and heads in one dim: of the ways to write these products, XLA:CPU
runs that one fastest (docs/performance.md). The window itself is never written: carried through a loop that writes to
it, XLA copied it in every step.

Dims: R rows, H query heads, K key/value heads, G = H / K, D head dim, B = K * R; S positions of the window, T steps of
the program; N blocks, P positions per block, W blocks per table. All of it is local to one device: callers run it in
`shard_map`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels import attention

_HIDDEN = -1e30
"""Added to scores that must not count: below any score, yet finite."""


class Window(NamedTuple):
    """What the rows had cached when the program began: keys [B, D, S], values [B, S, D]; or the specs of both."""

    keys_BDS: Any
    values_BSD: Any


class Fresh(NamedTuple):
    """Keys and values of the program's own steps: [B, T, D] each; or the specs of both."""

    keys_BTD: Any
    values_BTD: Any


def gather(pool_k_KNPD: jax.Array, pool_v_KNPD: jax.Array, tables_RW: jax.Array) -> Window:
    """The window of rows with these block tables."""
    heads, _, size, dim = pool_k_KNPD.shape
    rows, width = tables_RW.shape

    def one(pool_KNPD: jax.Array) -> jax.Array:
        return pool_KNPD[:, tables_RW].reshape(heads * rows, width * size, dim)

    return Window(jnp.swapaxes(one(pool_k_KNPD), -1, -2), one(pool_v_KNPD))


def blank(window: Window, num_steps: int) -> Fresh:
    """An empty fresh buffer for `num_steps` steps of the window's rows."""
    size, _, dim = window.values_BSD.shape
    empty = jnp.zeros((size, num_steps, dim), window.values_BSD.dtype)
    return Fresh(empty, empty)


def put(fresh: Fresh, k_RKD: jax.Array, v_RKD: jax.Array, step: jax.Array) -> Fresh:
    """Stores one step's keys and values of every row."""

    def one(buffer: jax.Array, new_RKD: jax.Array) -> jax.Array:
        new_B1D = jnp.swapaxes(new_RKD, 0, 1).reshape(-1, 1, new_RKD.shape[-1]).astype(buffer.dtype)
        return jax.lax.dynamic_update_slice_in_dim(buffer, new_B1D, step, axis=1)

    return Fresh(one(fresh.keys_BTD, k_RKD), one(fresh.values_BTD, v_RKD))


def attend(q_RHD: jax.Array, window: Window, fresh: Fresh, start_R: jax.Array, step: jax.Array) -> jax.Array:
    """[R, H, D]: each row's query sees its window before position `start`, and the fresh steps 0 .. `step`.

    One softmax over both, in float32 or better.
    """
    rows, heads, dim = q_RHD.shape
    kv_heads = window.keys_BDS.shape[0] // rows
    narrow, wide = window.values_BSD.dtype, jnp.promote_types(q_RHD.dtype, jnp.float32)
    q_BGD = jnp.swapaxes((q_RHD * dim**-0.5).reshape(rows, kv_heads, -1, dim), 0, 1).reshape(kv_heads * rows, -1, dim)
    old_BGS = jnp.einsum("bgd,bds->bgs", q_BGD, window.keys_BDS, preferred_element_type=wide)
    new_BGT = jnp.einsum("bgd,btd->bgt", q_BGD, fresh.keys_BTD, preferred_element_type=wide)
    # sums instead of selects, and a division after the product (D numbers a query, not S): each is a pass less
    in_window_RS = jnp.arange(old_BGS.shape[-1]) < start_R[:, None]
    old_BGS += jnp.tile(jnp.where(in_window_RS, 0, _HIDDEN).astype(wide), (kv_heads, 1))[:, None]
    new_BGT += jnp.where(jnp.arange(new_BGT.shape[-1]) <= step, 0, _HIDDEN).astype(wide)
    top_BG1 = jnp.maximum(jnp.max(old_BGS, -1, keepdims=True), jnp.max(new_BGT, -1, keepdims=True))
    old_BGS, new_BGT = jnp.exp(old_BGS - top_BG1), jnp.exp(new_BGT - top_BG1)
    total_BG1 = jnp.sum(old_BGS, -1, keepdims=True) + jnp.sum(new_BGT, -1, keepdims=True)
    out_BGD = jnp.einsum("bgs,bsd->bgd", old_BGS.astype(narrow), window.values_BSD, preferred_element_type=wide)
    out_BGD += jnp.einsum("bgt,btd->bgd", new_BGT.astype(narrow), fresh.values_BTD, preferred_element_type=wide)
    out_KRGD = (out_BGD / total_BG1).reshape(kv_heads, rows, heads // kv_heads, dim)
    return jnp.swapaxes(out_KRGD, 0, 1).reshape(rows, heads, dim).astype(q_RHD.dtype)


def scatter(
    pool_k_KNPD: jax.Array,
    pool_v_KNPD: jax.Array,
    fresh: Fresh,
    tables_RW: jax.Array,
    start_R: jax.Array,
    counts_R: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The pool with each row's first `counts` fresh steps written from position `start` on."""
    heads, rows = pool_k_KNPD.shape[0], tables_RW.shape[0]
    offsets = jnp.arange(fresh.keys_BTD.shape[1])
    positions_RT = start_R[:, None] + offsets
    valid_RT = offsets < counts_R[:, None]

    def write(pool_KNPD: jax.Array, new_BTD: jax.Array) -> jax.Array:
        new_KRTD = new_BTD.reshape(heads, rows, *new_BTD.shape[1:])
        return attention.write_kv(pool_KNPD, jnp.moveaxis(new_KRTD, 0, 2), tables_RW, positions_RT, valid_RT)

    return write(pool_k_KNPD, fresh.keys_BTD), write(pool_v_KNPD, fresh.values_BTD)
