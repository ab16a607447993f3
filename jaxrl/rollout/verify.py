"""Decode steps that verify proposed tokens.

`Verify.run` is `Programs.decode` with another step. Tokens are proposed for a row, the model runs over its last token
and the proposal at once, and every position's token is sampled. The row keeps the sampled tokens up to and including
the first that differs from the proposal.

Source: verification of several positions in one forward pass: Leviathan et al. 2023. Departures: nothing is accepted by
chance. A position's token is drawn with jaxrl's own key of that position, as without proposals, and a proposed token is
accepted if it is the one drawn. So the response is that of plain decoding. A step has room for `width` proposed tokens
of every row; its time does not depend on the proposals.

A rejected token leaves no trace: over windows (`kernels.gathered`) only a row's own tokens are written to the pool; in
the paged cache every position is written again before it is read, because the row's next step begins there.

Dims: G dp groups, R rows, W proposed tokens, C = W + 1 positions of a step, T tokens that a row may gain in a dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.rollout import kv_cache
from jaxrl.rollout.programs import Generated, Programs, RowState, Tiles, followed_by, stops, with_rows
from jaxrl.scheduling.tokens.plan import TOKENS_PER_STEP

if TYPE_CHECKING:
    from jaxrl.mechanisms.speculation.proposer import Drafting


class Proposed(NamedTuple):
    """Tokens int32 [R, W], of which the first `length` [R] are proposed, and the tokens of context `matched` [R]."""

    tokens: jax.Array
    length: jax.Array
    matched: jax.Array


class VerifySums(NamedTuple):
    """Counts of a dispatch, each int32 [G, R].

    steps: in which the row gained tokens; proposed: tokens; accepted: those that became tokens of the response;
    proposing_steps: steps with a proposal; matched: tokens of the contexts that were found, summed over them.
    """

    steps: Any
    proposed: Any
    accepted: Any
    proposing_steps: Any
    matched: Any


def leading(flags: jax.Array) -> jax.Array:
    """How many of flags [..., N] are true before the first that is not: int32 [...]."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)


class _Carry(NamedTuple):
    """The state carried between steps; `gained` and the tokens of `out` [G, R, T] cover the dispatch so far."""

    step: jax.Array
    rows: RowState
    gained: jax.Array
    sums: VerifySums
    cache: Any
    out: tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """The program for one model on one layout. `width`: proposed tokens that a step has room for in each row."""

    programs: Programs
    proposer: Drafting
    width: int
    truncate: bool

    @property
    def most_tokens(self) -> int:
        return self.programs.config.decode_steps * TOKENS_PER_STEP

    def run(
        self,
        params: Any,
        pool: kv_cache.Pool,
        state: RowState,
        histories: Any,
        tables: kv_cache.Tables,
        slots: jax.Array,
        fresh: jax.Array,
        places: jax.Array,
        max_new: jax.Array,
        num_steps: jax.Array,
        leave_after: jax.Array,
        tiles: Tiles | None,
    ) -> tuple[kv_cache.Pool, RowState, Generated, jax.Array]:
        """Up to `num_steps` steps of every active row, leaving once `leave_after` of them have stopped.

        Args:
          histories: the proposer's arrays, [G, ...]. The others are those of `Programs.decode`, and:
          places: int32 [G, R], of each row's history; beyond the last for none.
          max_new: int32 [G, R], the most tokens that a row may gain, at most `most_tokens`; it then waits for the end.
        """
        programs = self.programs
        rows, out = programs.dispatched(state, slots, self.most_tokens)
        started, may_stop = rows.active, rows.active | fresh
        none = jnp.zeros(slots.shape, jnp.int32)

        def go_on(carry: _Carry) -> jax.Array:
            stopped = jnp.sum(may_stop & ~carry.rows.active)
            can = carry.rows.active & (carry.gained < max_new)
            return (carry.step < num_steps) & jnp.any(can) & (stopped < leave_after)

        cache, forward, close = self._cache(params, pool, tables, tiles, rows)
        propose = partial(self._propose, histories, places)
        advance = partial(self._advance, params, forward, propose, max_new)
        carry = _Carry(jnp.int32(0), rows, none, VerifySums(*[none] * len(VerifySums._fields)), cache, out)
        last = jax.lax.while_loop(go_on, advance, carry)
        tokens, sampled_logprobs, rollout_logprobs = last.out
        stopped = started & ~last.rows.active
        generated = Generated(tokens, sampled_logprobs, rollout_logprobs, last.gained, stopped, last.sums)
        pool = close(last.cache, last.gained)
        return pool, programs.pin(with_rows(state, slots, last.rows)), programs.pin(generated), last.step

    def _advance(
        self,
        params: Any,
        forward: Callable[..., Any],
        propose: Callable[..., Proposed],
        max_new: jax.Array,
        carry: _Carry,
    ) -> _Carry:
        programs, (step, rows, gained, sums, cache, out) = self.programs, carry
        assert rows.window is not None, "row state without a proposer"
        going = rows.active & (gained < max_new)
        # a proposal brings one token more than it has; the last token of a row has no KV
        room = jnp.minimum(max_new - gained, rows.limit - 1 - rows.position) - 1
        proposed = propose(rows.recent, jnp.where(going, jnp.minimum(rows.window, room), 0))
        offset = jnp.arange(self.width + 1)
        valid = going[..., None] & (offset <= proposed.length[..., None])
        tokens = jnp.where(valid, jnp.concatenate([rows.token[..., None], proposed.tokens], axis=-1), 0)
        positions = rows.position[..., None] + offset
        hidden, cache = forward(cache, tokens, positions, valid, gained)
        logits = programs.logits(params, hidden)
        shape = positions.shape
        sampling = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :, None], (*shape, *x.shape[2:])), rows.sampling)
        drawn = programs.draw(logits, positions + 1, sampling, truncate=self.truncate)
        agrees = (drawn.token[..., :-1] == proposed.tokens) & (offset[:-1] < proposed.length[..., None])
        agreed = leading(agrees)
        each = rows._replace(stop_ids=rows.stop_ids[..., None, :], limit=rows.limit[..., None])
        goes_on = leading(~stops(drawn.token, positions + 1, each))
        taken = jnp.where(going, jnp.minimum(agreed, goes_on) + 1, 0)
        new = (drawn.token, drawn.sampled_logprob, drawn.rollout_logprob)
        out = jax.tree.map(partial(_written, gained, taken), out, new)
        last = jnp.take_along_axis(drawn.token, jnp.maximum(taken - 1, 0)[..., None], axis=-1)[..., 0]
        rows = followed_by(rows, drawn.token, taken)._replace(
            token=jnp.where(going, last, rows.token),
            position=rows.position + taken,
            active=rows.active & ~(going & (goes_on <= agreed)),
            window=self.proposer.next_window(rows.window, proposed.length, agreed),
        )
        more = VerifySums(going, proposed.length, jnp.minimum(agreed, taken), proposed.length > 0, proposed.matched)
        sums = VerifySums(*(x + y.astype(jnp.int32) for x, y in zip(sums, more, strict=True)))
        return _Carry(step + 1, rows, gained + taken, sums, cache, out)

    def _propose(self, histories: Any, places: jax.Array, recent: jax.Array, most: jax.Array) -> Proposed:
        """Proposals of at most `most` [G, R] tokens for all dp groups, each from its own places."""
        layout = self.programs.layout

        def local(histories, places, recent, most):
            own = jax.tree.map(lambda x: x[0], histories)
            found = self.proposer.propose(own, places[0], recent[0], self.width)
            length = jnp.clip(most[0], 0, found.length)
            found = found._replace(length=length, matched=jnp.where(length > 0, found.matched, 0))
            return jax.tree.map(lambda x: x[None], found)

        by_group = PartitionSpec(layout.dp_axes or None)
        # check_vma off: every device of a group finds the same
        mapped = jax.shard_map(local, mesh=layout.mesh, in_specs=by_group, out_specs=by_group, check_vma=False)
        return mapped(histories, places, recent, most)

    def _cache(
        self, params: Any, pool: kv_cache.Pool, tables: kv_cache.Tables, tiles: Tiles | None, began: RowState
    ) -> tuple[Any, ...]:
        """As `Programs._decode_cache`; tokens, positions and valid are [G, R, C]."""
        programs = self.programs
        if tiles is None:

            def paged(
                pool: kv_cache.Pool, tokens: jax.Array, positions: jax.Array, valid: jax.Array, gained: jax.Array
            ) -> tuple[jax.Array, kv_cache.Pool]:
                return programs.forward(params, pool, tokens, tables, jnp.where(valid, positions, 0), valid)

            return pool, paged, lambda pool, gained: pool

        blank, forward, close = programs.over_windows(params, pool, tables, tiles, began, self.most_tokens)

        def windowed(
            fresh: list[Any], tokens: jax.Array, positions: jax.Array, valid: jax.Array, gained: jax.Array
        ) -> tuple[jax.Array, list[Any]]:
            at = jnp.where(valid, gained[..., None] + jnp.arange(tokens.shape[-1]), self.most_tokens)
            return forward(fresh, tokens, positions, at)

        return blank, windowed, close


def _written(gained: jax.Array, taken: jax.Array, out: jax.Array, new: jax.Array) -> jax.Array:
    """Values [G, R, T] with the first `taken` of new ones [G, R, C] behind the `gained` that are there."""
    index = jnp.arange(out.shape[-1]) - gained[..., None]
    moved = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[-1] - 1), axis=-1)
    return jnp.where((index >= 0) & (index < taken[..., None]), moved.astype(out.dtype), out)
