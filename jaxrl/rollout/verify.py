"""Decode steps that verify drafts: the device program behind `rollout.speculation`.

Purpose: `Verify.run` is `Programs.decode` with another step. In each step a row looks up a draft for its last tokens in
its prompt's index, the model runs over its last token and the draft at once, every position's token is drawn, and the
row keeps the drawn tokens up to and with the first that is not the draft's. The host has no part in it: one dispatch
takes many such steps.

Source: RhymeRL §5 (HistoSpec): drafts from earlier responses, and the AIMD window (§5.4): 2 tokens at first, 2 more
after a draft that was accepted whole, 2 again after any rejection. Verification of several positions in one forward
pass: Leviathan et al. 2023.

Departures:

- Nothing is accepted by chance. A position's token is drawn with jaxrl's own key of that position, as without drafts,
  and a drafted token is accepted if it is the one drawn. So the response is the one that plain decoding draws.
- A step has room for `width` drafted tokens of every row, and takes as long whatever rows draft. Rows without a draft
  decode as ever in the same program.

A rejected draft leaves no trace: over windows (`kernels.gathered`) only a row's own tokens are written to the pool; in
the paged cache every position is written again before it is read, because the row's next step begins there.

Dims: G dp groups, R rows, P tokens of a longest context, M lengths of contexts, X entries of a bucket, W drafted
tokens, C = W + 1 positions of a step, T tokens that a row may gain in a dispatch; B, N, H, E as in `draft_books`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.kernels.gathered import WindowTiles
from jaxrl.rollout import kv_cache
from jaxrl.rollout.draft_books import Books, Drafting
from jaxrl.rollout.programs import Generated, Programs, RowState, followed_by, put_rows, stops, take_rows
from jaxrl.rollout.sampling import SamplingState, sample
from jaxrl.scheduling.tokens.draft_index import MAX_PROBES, DraftLengths, context_hashes
from jaxrl.scheduling.tokens.draft_rule import TOKENS_PER_STEP


class DraftSums(NamedTuple):
    """Counts of a dispatch, each int32 [G, R].

    steps: in which the row gained tokens; drafted: tokens; accepted: those that became tokens of the response;
    draft_steps: steps with a draft; matched: tokens of the contexts that were found, summed over them.
    """

    steps: Any
    drafted: Any
    accepted: Any
    draft_steps: Any
    matched: Any


class Found(NamedTuple):
    """Drafts: tokens int32 [R, W], of which the first `length` [R] are one; matched [R], the context's length."""

    tokens: jax.Array
    length: jax.Array
    matched: jax.Array


def find_drafts(books: Books, book_R: jax.Array, recent_RP: jax.Array, lengths: DraftLengths, width: int) -> Found:
    """`DraftIndex.find` and `DraftIndex.draft` for rows of one dp group.

    Args:
      books: of the group, without the leading dim.
      book_R: int32, the place of each row's index; B: it has none.
      recent_RP: int32, the last tokens of each row's response.
      width: the most tokens of a draft.
    """
    text_BN, first_BH, places_BE = books.texts, books.firsts, books.places
    is_there_R, book_R = book_R < text_BN.shape[0], jnp.minimum(book_R, text_BN.shape[0] - 1)
    sizes_M = jnp.arange(lengths.max_prefix, lengths.min_prefix - 1, -1)
    hashes_RM = context_hashes(recent_RP, books.salts[book_R])[:, sizes_M - 1]
    bucket_RM = (hashes_RM & books.masks[book_R][:, None]).astype(jnp.int32)
    begin_RM, end_RM = first_BH[book_R[:, None], bucket_RM], first_BH[book_R[:, None], bucket_RM + 1]
    # all that share a bucket, of every length of the context
    at_RMX = begin_RM[..., None] + jnp.arange(MAX_PROBES)
    entry_RMX = places_BE.at[book_R[:, None, None], at_RMX].get(mode="clip")
    place_RMX, kind_RMX = entry_RMX // lengths.num_prefixes, entry_RMX % lengths.num_prefixes
    is_hit_RMX = (at_RMX < end_RM[..., None]) & (kind_RMX == (sizes_M - lengths.min_prefix)[:, None])
    back = jnp.arange(1, lengths.max_prefix + 1)
    behind_RMXP = text_BN.at[book_R[:, None, None, None], place_RMX[..., None] - back].get(mode="clip")
    same_RMXP = (behind_RMXP == recent_RP[:, None, None, ::-1]) | (back > sizes_M[:, None, None])
    is_hit_RMX &= jnp.all(same_RMXP, axis=-1)
    hits_RX = is_hit_RMX.reshape(len(book_R), -1)
    first_R = jnp.argmax(hits_RX, axis=1)  # the longest context comes first
    place_R = jnp.take_along_axis(place_RMX.reshape(hits_RX.shape), first_R[:, None], axis=1)
    found_R = jnp.any(hits_RX, axis=1) & is_there_R
    tokens_RW = text_BN.at[book_R[:, None], place_R + jnp.arange(width)].get(mode="clip")
    length_R = jnp.where(found_R, _leading(tokens_RW >= 0), 0)
    matched_R = jnp.where(length_R > 0, sizes_M[first_R // MAX_PROBES], 0)
    return Found(tokens_RW, length_R, matched_R)


def _leading(flags: jax.Array) -> jax.Array:
    """How many of flags [..., N] are true before the first that is not: int32 [...]."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)


class _Carry(NamedTuple):
    """What goes from step to step; `gained` and the tokens of `out` [G, R, T] are those of the dispatch so far."""

    step: jax.Array
    rows: RowState
    gained: jax.Array
    sums: DraftSums
    cache: Any
    out: tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class Verify:
    """The program for one model on one layout.

    Attributes:
      programs: the forward pass, and what else plain decoding has.
      drafting: what drafts are like.
      width: drafted tokens that a step has room for in each row.
      truncate: as in `Programs.decode`.
    """

    programs: Programs
    drafting: Drafting
    width: int
    truncate: bool

    @property
    def most_tokens(self) -> int:
        """T: the most tokens that a row may gain in a dispatch."""
        return self.programs.decode_steps * TOKENS_PER_STEP

    def run(
        self,
        params: Any,
        pool: kv_cache.Pool,
        state: RowState,
        books: Books,
        tables: jax.Array,
        slots: jax.Array,
        fresh: jax.Array,
        book: jax.Array,
        max_new: jax.Array,
        num_steps: jax.Array,
        leave_after: jax.Array,
        tiles: WindowTiles | None,
    ) -> tuple[kv_cache.Pool, RowState, Generated, jax.Array]:
        """Up to `num_steps` steps of every active row, leaving once `leave_after` of them have stopped.

        Args:
          books: [G, B, ...].
          tables, slots, fresh, num_steps, leave_after, tiles: as for `Programs.decode`.
          book: int32 [G, R], the place of each row's index; B for none.
          max_new: int32 [G, R], the most tokens that a row may gain, at most `most_tokens`; it then waits for the end.
        """
        programs = self.programs
        rows = take_rows(state, slots)
        rows = rows._replace(active=rows.active & (slots < state.token.shape[1]))
        started = rows.active
        may_stop = started | fresh
        shape = (*slots.shape, self.most_tokens)
        real = jnp.float64 if programs.dtype == jnp.float64 else jnp.float32
        out = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, real), jnp.zeros(shape, real))
        none = jnp.zeros(slots.shape, jnp.int32)

        def go_on(carry: _Carry) -> jax.Array:
            stopped = jnp.sum(may_stop & ~carry.rows.active)
            can = carry.rows.active & (carry.gained < max_new)
            return (carry.step < num_steps) & jnp.any(can) & (stopped < leave_after)

        cache, forward, close = self._cache(params, pool, tables, tiles, rows)
        find = partial(self._find, books, book)
        advance = partial(self._advance, params, forward, find, max_new)
        carry = _Carry(jnp.int32(0), rows, none, DraftSums(*[none] * len(DraftSums._fields)), cache, out)
        last = jax.lax.while_loop(go_on, advance, carry)
        generated = Generated(*last.out, last.gained, started & ~last.rows.active, last.sums)
        pool = close(last.cache, last.gained)
        return pool, programs.pin(put_rows(state, slots, last.rows)), programs.pin(generated), last.step

    def _advance(
        self,
        params: Any,
        forward: Callable[..., Any],
        find: Callable[..., Found],
        max_new: jax.Array,
        carry: _Carry,
    ) -> _Carry:
        step, rows, gained, sums, cache, out = carry
        assert rows.window is not None, "row state without drafting"
        going = rows.active & (gained < max_new)
        # a draft brings one token more than it has; the last token of a row has no KV
        room = jnp.minimum(max_new - gained, rows.limit - 1 - rows.position) - 1
        draft = find(rows.recent, jnp.where(going, jnp.minimum(rows.window, room), 0))
        offset = jnp.arange(self.width + 1)
        valid = going[..., None] & (offset <= draft.length[..., None])
        tokens = jnp.where(valid, jnp.concatenate([rows.token[..., None], draft.tokens], axis=-1), 0)
        positions = rows.position[..., None] + offset
        hidden, cache = forward(cache, tokens, positions, valid, gained)
        logits = self.programs.logits(params, hidden)
        drawn = sample(logits, positions + 1, _of_positions(rows.sampling, positions.shape), truncate=self.truncate)
        agrees = (drawn.token[..., :-1] == draft.tokens) & (offset[:-1] < draft.length[..., None])
        agreed = _leading(agrees)
        each = rows._replace(stop_ids=rows.stop_ids[..., None, :], limit=rows.limit[..., None])
        goes_on = _leading(~stops(drawn.token, positions + 1, each))
        taken = jnp.where(going, jnp.minimum(agreed, goes_on) + 1, 0)
        new = (drawn.token, drawn.sampled_logprob, drawn.rollout_logprob)
        out = jax.tree.map(partial(_written, gained, taken), out, new)
        last = jnp.take_along_axis(drawn.token, jnp.maximum(taken - 1, 0)[..., None], axis=-1)[..., 0]
        rows = followed_by(rows, drawn.token, taken)._replace(
            token=jnp.where(going, last, rows.token),
            position=rows.position + taken,
            active=rows.active & ~(going & (goes_on <= agreed)),
            window=self._next_window(rows.window, draft.length, agreed),
        )
        more = DraftSums(going, draft.length, jnp.minimum(agreed, taken), draft.length > 0, draft.matched)
        sums = DraftSums(*(x + y.astype(jnp.int32) for x, y in zip(sums, more, strict=True)))
        return _Carry(step + 1, rows, gained + taken, sums, cache, out)

    def _next_window(self, window: jax.Array, drafted: jax.Array, agreed: jax.Array) -> jax.Array:
        """`jaxrl.scheduling.tokens.draft_rule.Window.after`, for all rows."""
        rule = self.drafting.window
        wider = jnp.minimum(window + rule.step, rule.most)
        return jnp.where(drafted == 0, window, jnp.where(agreed == drafted, wider, rule.least))

    def _find(self, books: Books, book: jax.Array, recent: jax.Array, most: jax.Array) -> Found:
        """Drafts of at most `most` [G, R] tokens for all dp groups, each in its own places."""
        layout = self.programs.layout

        def local(books: Books, book: jax.Array, recent: jax.Array, most: jax.Array) -> Found:
            own = jax.tree.map(lambda x: x[0], books)
            found = find_drafts(own, book[0], recent[0], self.drafting.lengths, self.width)
            length = jnp.clip(most[0], 0, found.length)
            found = found._replace(length=length, matched=jnp.where(length > 0, found.matched, 0))
            return jax.tree.map(lambda x: x[None], found)

        by_group = PartitionSpec(layout.dp_axes or None)
        specs = (Books(*[by_group] * len(Books._fields)), by_group, by_group, by_group)
        # check_vma off: every device of a group finds the same
        mapped = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=by_group, check_vma=False)
        return mapped(books, book, recent, most)

    def _cache(
        self, params: Any, pool: kv_cache.Pool, tables: jax.Array, tiles: WindowTiles | None, began: RowState
    ) -> tuple[Any, ...]:
        """(cache to carry, forward(cache, tokens, positions, valid, gained) -> (hidden, cache), close(cache, tokens per
        row) -> pool); tokens, positions and valid are [G, R, C]."""
        programs = self.programs
        if tiles is None:

            def paged(
                pool: kv_cache.Pool, tokens: jax.Array, positions: jax.Array, valid: jax.Array, gained: jax.Array
            ) -> tuple[jax.Array, kv_cache.Pool]:
                return programs.forward(params, pool, tokens, tables, jnp.where(valid, positions, 0), valid)

            return pool, paged, lambda pool, gained: pool

        gathered, start = kv_cache.GatheredCache(programs.layout, pool[0][0].shape[1]), began.position
        windows, blank = gathered.open(pool, tiles, began.token.shape[1], self.most_tokens)

        def windowed(
            fresh: list[Any], tokens: jax.Array, positions: jax.Array, valid: jax.Array, gained: jax.Array
        ) -> tuple[jax.Array, list[Any]]:
            at = jnp.where(valid, gained[..., None] + jnp.arange(tokens.shape[-1]), self.most_tokens)

            def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
                return gathered.attend_several(q, k, v, windows[layer], tiles, fresh[layer], start, at)

            return programs.layers(params, tokens, positions, attend)

        return blank, windowed, lambda fresh, gained: gathered.close(pool, fresh, tables, start, gained)


def _of_positions(sampling: SamplingState, shape: tuple[int, ...]) -> SamplingState:
    """The parameters of rows [G, R, ...] for each of their positions [G, R, C, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.expand_dims(x, 2), (*shape, *x.shape[2:])), sampling)


def _written(gained: jax.Array, taken: jax.Array, out: jax.Array, new: jax.Array) -> jax.Array:
    """Values [G, R, T] with the first `taken` of new ones [G, R, C] behind the `gained` that are there."""
    index = jnp.arange(out.shape[-1]) - gained[..., None]
    moved = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[-1] - 1), axis=-1)
    return jnp.where((index >= 0) & (index < taken[..., None]), moved.astype(out.dtype), out)
