"""Pieces of contexts: how kernels over a paged cache share the work, on Triton and on Mosaic GPU.

Pieces begin at multiples of their size, counted from a sequence's beginning, and each is summed separately. Those of
all rows are one list, of which every program takes an equal share: `paged_pallas` has the reasons and the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

PIECE = 1024  # positions: docs/kernels.md weighs others
MAX_SUM_BYTES = 1 << 28  # of the sums of pieces: where these would need more, pieces are longer
WANTED_PROGRAMS = 264  # two for each of an H100's 132 multiprocessors
WHOLE = pl.BlockSpec()

Inputs = dict[str, tuple[jax.Array, pl.BlockSpec]]


def choose_piece(heads: int, tiles: int, numbers: int, span: int) -> int:
    """Positions of a piece. `heads`: of all rows, of `tiles` each; `numbers`: the sums of one piece of every row;
    `span`: positions of a table."""
    # Prefill with programs enough for all multiprocessors waits for products: sums of pieces would only add to it.
    fills, piece = tiles > 1 and heads * tiles >= WANTED_PROGRAMS, PIECE
    while piece < span and (fills or 4 * numbers * pl.cdiv(span, piece) > MAX_SUM_BYTES):
        piece *= 2
    return piece


def list_work(
    first_R: jax.Array, last_R: jax.Array, window: int, span: int, piece: int, num_tiles: int
) -> tuple[Inputs, int]:
    """The pieces of all rows as one list, and how many programs share it, for each of `num_tiles` tiles of a row.

    Each row has at least one piece. All layers of a step have the same list, which XLA makes once.

    Args:
      first_R, last_R: the first and the last position of each row's queries; below 0: it sees nothing.

    Returns:
      int32 `bounds` [R + 1], where each row's pieces begin in the list, and its end; `first` [R], the number of each
      row's first piece; `row` [programs], the row of each program's first piece. Nothing where rows have one piece.
    """
    rows, pieces = len(last_R), pl.cdiv(span, piece)
    if pieces == 1:
        return {}, rows
    programs = min(rows * pieces, max(rows, WANTED_PROGRAMS // num_tiles))
    last_R = jnp.clip(last_R.astype(jnp.int32), 0, span - 1)
    first_R = jnp.clip(first_R.astype(jnp.int32) - (window - 1), 0, last_R) // piece if window else 0 * last_R
    count_R, ends = last_R // piece - first_R + 1, jnp.arange(rows + 1)[:, None]
    bounds = jnp.sum(jnp.where(jnp.arange(rows) < ends, count_R, 0), axis=1, dtype=jnp.int32)
    begin_P = jnp.arange(programs, dtype=jnp.int32) * bounds[-1] // programs
    row_P = jnp.sum(bounds[1:] <= begin_P[:, None], axis=1, dtype=jnp.int32)
    return {"bounds": (bounds, WHOLE), "first": (first_R, WHOLE), "row": (row_P, WHOLE)}, programs


class Piece(NamedTuple):
    """Piece `number` of a row, at `index` of the list, if there is one; whether it is the row's only piece."""

    row: Any
    number: Any
    index: Any = None
    is_only: Any = True


def each_piece(ref: Mapping[str, Any], program: Any, programs: int | jax.Array, visit: Callable[[Piece], None]) -> None:
    """Inside a kernel: visits the pieces of one of the programs."""
    if "bounds" not in ref:
        visit(Piece(program, 0))
        return
    total = ref["bounds"][ref["first"].shape[0]]

    def one(index: Any, row: Any) -> Any:
        row += (index >= ref["bounds"][row + 1]).astype(jnp.int32)
        begin, end = ref["bounds"][row], ref["bounds"][row + 1]
        visit(Piece(row, ref["first"][row] + index - begin, index, end - begin == 1))
        return row

    begin, end = (lax.div((program + i) * total, programs) for i in range(2))
    lax.fori_loop(begin, end, one, ref["row"][program])
