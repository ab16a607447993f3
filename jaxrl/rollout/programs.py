"""The device programs behind the engine: prefill (with insert) and decode, after JetStream's cut.

Both are pure functions of (weights, pool, row state, what the plan says); `rollout.executor` compiles them per shape
bucket. Row state lives on the device, in slots: the host makes a plan ahead of the device and need not know which token
a row drew last, or whether it has stopped.

Dims: G dp groups (sharded), S slots per group, R rows of a program, C positions per row, W blocks per table,
V vocabulary. Stacks of layers are those of `jaxrl.models.kv_layers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.kernels.attention import Implementation, choose_paged
from jaxrl.kernels.by_rows import at_once
from jaxrl.kernels.gathered import WindowTiles
from jaxrl.kernels.reference import Rule
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.kv_layers import KvLayers, whole
from jaxrl.rollout import kv_cache
from jaxrl.rollout.sampling import Draw, SampledToken, SamplingState, drawn_by_rows, request_key, sample
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks
from jaxrl.schema.limits import Narrow
from jaxrl.sharding.fused_projections import can_fuse
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.narrow_weights import scale_shardings
from jaxrl.sharding.rules import Form, pad_heads, padded_config, rollout_spec
from jaxrl.types import SampleKey, SamplingParams

if TYPE_CHECKING:
    from jaxrl.mechanisms.speculation.proposer import Drafting

Tiles = tuple[WindowTiles, ...]
"""For each stack of layers, the tiles of the rows' windows."""

MAX_STOP_IDS = 8
"""Stop token ids that a row can have."""


class RowState(NamedTuple):
    """The device's state of a row; every field [G, S, ...] (or [G, R, ...] inside a program)."""

    token: jax.Array  # the last one drawn, its KV not in the cache yet
    position: jax.Array  # of the token in the sequence
    active: jax.Array
    limit: jax.Array  # the sequence length at which it stops
    stop_ids: jax.Array  # [..., MAX_STOP_IDS], -1 for none
    sampling: SamplingState
    # only where proposals are verified
    recent: jax.Array | None = None  # the response's last tokens [..., num_recent]; `Drafting.blank` where it has fewer
    window: jax.Array | None = None  # the most tokens of its next proposal


def row_state_shapes(groups: int, rows: int, proposer: Drafting | None = None) -> RowState:
    def of(dtype: Any, *dims: int) -> Any:
        return jax.ShapeDtypeStruct((groups, rows, *dims), dtype)

    integer, real = of(jnp.int32), of(jnp.float32)
    return RowState(
        token=integer,
        position=integer,
        active=of(jnp.bool_),
        limit=integer,
        stop_ids=of(jnp.int32, MAX_STOP_IDS),
        sampling=SamplingState(keys=of(jnp.uint32, 2), temperature=real, top_k=integer, top_p=real, min_p=real),
        recent=None if proposer is None else of(jnp.int32, proposer.num_recent),
        window=None if proposer is None else integer,
    )


class Generated(NamedTuple):
    """Tokens [G, R, T] with both log-probabilities, tokens taken per row [G, R], and whether the row stopped [G, R]:
    device arrays, their numpy copies, or their shardings.

    `verified`: of a program that verifies, its counts per row (`jaxrl.rollout.verify.VerifySums`). `top_ids` and
    `top_logprobs` [G, R, T, K], if they were asked for: the likeliest tokens of each place.
    """

    tokens: Any
    sampled_logprobs: Any
    rollout_logprobs: Any
    counts: Any
    stopped: Any
    verified: Any = None
    top_ids: Any = None
    top_logprobs: Any = None


def take_rows(state: RowState, slots: jax.Array) -> RowState:
    """Rows [G, R] out of slots; slot numbers beyond the last give some row, which the caller masks."""
    return jax.tree.map(lambda x: jax.vmap(lambda a, i: a.at[i].get(mode="clip"))(x, slots), state)


def with_rows(state: RowState, slots: jax.Array, rows: RowState) -> RowState:
    """Slot numbers beyond the last are dropped."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.vmap(lambda a, i, b: a.at[i].set(b, mode="drop"))(x, slots, new)

    return jax.tree.map(put, state, rows)


def stops(token: jax.Array, position: jax.Array, rows: RowState) -> jax.Array:
    return jnp.any(token[..., None] == rows.stop_ids, axis=-1) | (position + 1 >= rows.limit)


def followed_by(rows: RowState, tokens: jax.Array, count: jax.Array | int) -> RowState:
    assert rows.recent is not None, "row state without a proposer"
    both, size = jnp.concatenate([rows.recent, tokens], axis=-1), rows.recent.shape[-1]
    first = jnp.broadcast_to(jnp.asarray(count, jnp.int32), rows.recent.shape[:-1])[..., None]
    return rows._replace(recent=jnp.take_along_axis(both, first + jnp.arange(size), axis=-1))


def likeliest(logits: jax.Array, temperature: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` likeliest tokens [..., K] of logits [..., V], and their `rollout_logprobs`."""
    scaled = logits / jnp.where(temperature == 0, 1.0, temperature).astype(logits.dtype)[..., None]
    logprobs, token_ids = jax.lax.top_k(jax.nn.log_softmax(scaled), count)
    return token_ids.astype(jnp.int32), logprobs


@dataclass(frozen=True, slots=True)
class LayoutSizes:
    """Per dp group: rows, and KV blocks with the reserved one."""

    tp: int
    num_slots: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Sizes of an executor, per dp group. `features_first`, `fused_projections` and `gathered` say how programs are
    built (`Programs`); None: as the layout's devices run them fastest."""

    num_slots: int
    num_blocks: int = 0  # the reserved one included; 0: all that the rows can use
    block_size: int = 16
    max_length: int = 1024  # tokens of the longest sequence
    max_prefill_tokens: int = 512  # of a plan
    decode_steps: int = 16  # the most of a plan
    dtype: Any = jnp.float32
    quantization: Narrow = "none"  # of the weights of layers' matrices (`jaxrl.sharding.narrow_weights`)
    kv_codes: Narrow = "none"  # what the KV cache holds; none: numbers of `dtype`
    seed: int = 0  # the run's; folded into every token's key
    truncate: bool = False  # requests may use top-k, top-p or min-p: their programs sort the vocabulary
    max_tp: int = 1  # the largest TP degree that the weights are padded for
    attention: Implementation = "auto"
    is_invariant: bool = False  # `actor.numerics`: decides the forms, and the attention; excludes `quantization`
    features_first: bool | None = None
    fused_projections: bool | None = None
    gathered: bool | None = None
    interpret: bool = False  # run the GPU kernels as plain JAX, on any device (slow; for tests)
    proposer: Drafting | None = None  # of tokens to verify, for requests with a history (`jaxrl.rollout.verify`)
    resident_layers: int | None = None  # whose matrices are on the devices (`jaxrl.models.streaming`); None: all
    draw: Draw = sample
    top_logprobs: int = 0  # that a request may ask for; their programs are compiled when the first such request comes
    layouts: tuple[LayoutSizes, ...] = ()  # of single degrees; others have `num_slots` and `num_blocks`

    def sizes(self, tp: int, stacks: KvStacks = WHOLE) -> LayoutSizes:
        """Raises ValueError if the weights are not padded for that degree."""
        if tp < 1 or self.max_tp % tp:
            raise ValueError(
                f"a layout with tp {tp}: it must divide max_tp ({self.max_tp}), which weights are padded for"
            )
        num_blocks = self.num_blocks or self.num_slots * stacks.most_blocks(self.max_length, self.block_size) + 1
        own = (sizes for sizes in self.layouts if sizes.tp == tp)
        return next(own, LayoutSizes(tp, self.num_slots, num_blocks))


class Programs:
    """The two programs for one model on one layout.

    Attributes:
      features_first: the order of activations and matrices (`models.decoder`): features first on CPU.
      fused_projections: on GPUs, where their heads allow it (`jaxrl.sharding.fused_projections`).
      gathered: whether decode copies its rows' blocks into windows once per dispatch (`kernels.gathered`); that pays on
        CPU, where no kernel reads a block table in place.
      fused: whether a decode step is `fused_step`.
    """

    def __init__(
        self, model: ModelConfig, layout: Layout, config: ExecutorConfig, layers: KvLayers | None = None
    ) -> None:
        self.model, self.layout, self.config = model, layout, config
        self.dtype, max_tp = jnp.dtype(config.dtype), config.max_tp
        self.kv = layers or whole(model.num_layers)
        self.rules = [Rule(model.kind(i).window, model.attn_logit_softcapping) for i in range(model.num_layers)]
        rows = PartitionSpec(layout.dp_axes or None)
        self.rows_sharding = NamedSharding(layout.mesh, rows)
        platform = platform_of(layout.mesh.devices.flat[0])
        on_cpu, (heads, kv_heads) = platform == "cpu", pad_heads(model.num_heads, model.num_kv_heads, max_tp)
        can_be_fused = platform == "gpu" and can_fuse(kv_heads, max_tp)
        fused, first, gathered = config.fused_projections, config.features_first, config.gathered
        tiles = None
        if config.is_invariant:
            from jaxrl.models.numerics import in_tiles, refuse_invariant

            assert config.quantization == "none", "the trainer's weights are not quantised"
            refuse_invariant(model, platform, max_tp)
            fused = first = gathered = False
            tiles = in_tiles(model, max_tp, layout.mesh, rows, layout)
        self.fused_projections = can_be_fused if fused is None else fused
        self.features_first = on_cpu and not self.fused_projections if first is None else first
        self.gathered = on_cpu if gathered is None else gathered
        self.by_rows = tiles.for_platform(platform, interpret=config.interpret) if tiles else at_once
        self._widen = config.is_invariant and on_cpu  # as the trainer
        how = {"interpret": config.interpret, "invariant_parts": tiles.own_parts if tiles else 0}
        self.attention = choose_paged(config.attention, platform, model.attn_logit_softcapping, **how)
        on_one = heads // layout.tp, layout.kv_heads_each(kv_heads)
        decodes = self.attention.decodes(*on_one, model.head_dim, self.dtype)
        streams = config.resident_layers is not None  # from the host's memory, for which there is no fused step
        self.fused = self.fused_projections and not self.gathered and decodes and not streams
        if self.fused:
            from jaxrl.rollout import fused_step

            self.fused = fused_step.computes(model)
        self.draw = drawn_by_rows(config.draw, self.by_rows) if config.is_invariant else config.draw
        is_split = model.num_experts and not config.is_invariant
        self.mix = _mix(model, layout, max_tp, batched=not on_cpu) if is_split else None

    @property
    def form(self) -> Form:
        """How the weights lie, as `jaxrl.sharding.rules` takes it."""
        return {
            "features_first": self.features_first,
            "fused_projections": self.fused_projections,
            "quantization": self.config.quantization,
        }

    def forward(
        self,
        params: Any,
        pool: kv_cache.Pool,
        tokens: jax.Array,
        tables: kv_cache.Tables,
        positions: jax.Array,
        valid: jax.Array,
    ) -> tuple[jax.Array, kv_cache.Pool]:
        arrays = list(pool)

        def attend(
            layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
        ) -> tuple[jax.Array, None]:
            stack, place = self.kv.places[layer]
            rows = tables[stack], positions, valid
            how = self.attention, self.rules[layer], sinks
            out, arrays[place] = kv_cache.attend(self.layout, q, k, v, arrays[place], *rows, *how)
            return out, None

        return self.layers(params, tokens, positions, attend)[0], arrays

    def layers(self, params: Any, tokens: jax.Array, positions: jax.Array, attends: Any) -> tuple[jax.Array, Any]:
        how = {"dtype": self.dtype, "features_first": self.features_first, "mix": self.mix}
        how |= {"widen": self._widen, "by_rows": self.by_rows}
        return decoder.forward_layers(params, tokens, positions, attends, self.model, **how)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        how = {"features_first": self.features_first, "widen": self._widen, "by_rows": self.by_rows}
        return decoder.logits(decoder.head(params), hidden, self.model, **how)

    def prefill(
        self,
        params: Any,
        pool: kv_cache.Pool,
        state: RowState,
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        tables: kv_cache.Tables,
        slots: jax.Array,
        rows: RowState,
        *,
        truncate: bool,
        num_top: int = 0,
    ) -> tuple[kv_cache.Pool, RowState, Generated]:
        """Runs chunks of prompts; where a chunk ends a prefill (its slot is real), draws a token and fills the slot.

        Args:
          tokens: int32 [G, R, C]; start, length: int32 [G, R]; tables: of each stack int32 [G, R, W].
          slots: int32 [G, R], beyond the last slot for chunks that do not end a prefill.
          rows: what to fill the slot with ([G, R, ...]); token, position and active are set here.
          num_top: K, the likeliest tokens that are returned.
        """
        offset = jnp.arange(tokens.shape[-1])
        valid = offset < length[..., None]
        positions = jnp.where(valid, start[..., None] + offset, 0)
        hidden, pool = self.forward(params, pool, tokens, tables, positions, valid)
        last = jnp.maximum(length - 1, 0)[..., None]
        if self.features_first:
            ends = jnp.take_along_axis(hidden, last[None], axis=3)[..., 0]
        else:
            ends = jnp.take_along_axis(hidden, last[..., None], axis=2)[:, :, 0]
        position = start + length
        if self.model.scalar_head:  # nothing is drawn: its number takes the place of a token's log-probability
            number = decoder.score(params, ends, features_first=self.features_first)
            drawn, top = SampledToken(jnp.zeros(number.shape, jnp.int32), number, number), ()
        else:
            logits = self.logits(params, ends)
            drawn = self.draw(logits, position, rows.sampling, truncate=truncate)
            top = likeliest(logits, rows.sampling.temperature, num_top) if num_top else ()
        real = slots < state.token.shape[1]
        stopped = real & stops(drawn.token, position, rows)
        rows = rows if rows.recent is None else followed_by(rows, drawn.token[..., None], 1)
        rows = rows._replace(token=drawn.token, position=position, active=real & ~stopped)
        generated = Generated(
            drawn.token[..., None],
            drawn.sampled_logprob[..., None],
            drawn.rollout_logprob[..., None],
            real.astype(jnp.int32),
            stopped,
            None,
            *(each[:, :, None] for each in top),
        )
        return pool, self.pin(with_rows(state, slots, rows)), self.pin(generated)

    def decode(
        self,
        params: Any,
        pool: kv_cache.Pool,
        state: RowState,
        tables: kv_cache.Tables,
        slots: jax.Array,
        fresh: jax.Array,
        num_steps: jax.Array,
        leave_after: jax.Array,
        tiles: Tiles | None,
        *,
        truncate: bool,
        num_top: int = 0,
    ) -> tuple[kv_cache.Pool, RowState, Generated, jax.Array]:
        """Up to `num_steps` tokens for every active row, leaving once `leave_after` rows of all groups have stopped.

        Args:
          tables: of each stack int32 [G, R, W]; slots: int32 [G, R], beyond the last slot for padding.
          fresh: bool [G, R], rows with a prefill that ended in this plan; stopping at their first token counts as well.
          num_steps, leave_after: int32 scalars.
          tiles: of each stack [G, U, ...], the rows' blocks once more, if `gathered`.
        """
        rows, out = self.dispatched(state, slots, self.config.decode_steps)
        started, may_stop = rows.active, rows.active | fresh
        if num_top:
            out += tuple(jnp.zeros((*out[0].shape, num_top), x.dtype) for x in out[:2])

        def go_on(carry: tuple) -> jax.Array:
            step, rows, _, _, _ = carry
            stopped = jnp.sum(may_stop & ~rows.active)
            return (step < num_steps) & jnp.any(rows.active) & (stopped < leave_after)

        cache, forward, close = self._decode_cache(params, pool, tables, tiles, rows)

        def advance(carry: tuple) -> tuple:
            step, rows, counts, cache, out = carry
            hidden, cache = forward(cache, rows, step)
            logits = self.logits(params, hidden)
            position = rows.position + 1
            drawn = self.draw(logits, position, rows.sampling, truncate=truncate)
            new = (drawn.token, drawn.sampled_logprob, drawn.rollout_logprob)
            new += likeliest(logits, rows.sampling.temperature, num_top) if num_top else ()
            write = partial(jax.lax.dynamic_update_index_in_dim, index=step, axis=2)
            out = tuple(write(x, y.astype(x.dtype)) for x, y in zip(out, new, strict=True))
            going = rows.active
            rows = rows if rows.recent is None else followed_by(rows, drawn.token[..., None], going)
            rows = rows._replace(
                token=jnp.where(going, drawn.token, rows.token),
                position=jnp.where(going, position, rows.position),
                active=going & ~stops(drawn.token, position, rows),
            )
            return step + 1, rows, counts + going, cache, out

        carry = (jnp.int32(0), rows, jnp.zeros(slots.shape, jnp.int32), cache, out)
        steps, rows, counts, cache, out = jax.lax.while_loop(go_on, advance, carry)
        tokens, sampled_logprobs, rollout_logprobs, *top = out
        stopped = started & ~rows.active
        generated = Generated(tokens, sampled_logprobs, rollout_logprobs, counts, stopped, None, *top)
        return close(cache, counts), self.pin(with_rows(state, slots, rows)), self.pin(generated), steps

    def dispatched(self, state: RowState, slots: jax.Array, most: int) -> tuple[RowState, tuple[jax.Array, ...]]:
        """The rows in these slots, and room for `most` tokens of each and both of their log-probabilities."""
        rows = take_rows(state, slots)
        shape, real = (*slots.shape, most), jnp.float64 if self.dtype == jnp.float64 else jnp.float32
        out = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, real), jnp.zeros(shape, real))
        return rows._replace(active=rows.active & (slots < state.token.shape[1])), out

    def _decode_cache(
        self, params: Any, pool: kv_cache.Pool, tables: kv_cache.Tables, tiles: Tiles | None, began: RowState
    ) -> tuple[Any, ...]:
        """(cache to carry, forward(cache, rows, step) -> (hidden, cache), close(cache, tokens per row) -> pool)."""
        if tiles is None:

            def paged(pool: kv_cache.Pool, rows: RowState, step: jax.Array) -> tuple[jax.Array, kv_cache.Pool]:
                if self.fused:
                    from jaxrl.rollout import fused_step

                    return fused_step.forward(
                        params,
                        pool,
                        rows.token,
                        tables,
                        rows.position,
                        rows.active,
                        config=self.model,
                        layout=self.layout,
                        max_tp=self.config.max_tp,
                        how=self.attention,
                        dtype=self.dtype,
                        layers=self.kv,
                        quantization=self.config.quantization,
                    )
                token, position, active = (x[..., None] for x in (rows.token, rows.position, rows.active))
                hidden, pool = self.forward(params, pool, token, tables, position, active)
                return hidden[..., 0] if self.features_first else hidden[:, :, 0], pool

            return pool, paged, lambda pool, counts: pool

        blank, forward, close = self.over_windows(params, pool, tables, tiles, began, self.config.decode_steps)
        return blank, lambda fresh, rows, step: forward(fresh, rows.token, rows.position, step), close

    def over_windows(
        self, params: Any, pool: kv_cache.Pool, tables: kv_cache.Tables, tiles: Tiles, began: RowState, most: int
    ) -> tuple[Any, ...]:
        """(buffers for `most` tokens of each row, forward(buffers, tokens, positions, at) -> (hidden, buffers),
        close(buffers, tokens per row) -> pool); `at` as for `GatheredCache.attend`."""
        gathered, start = kv_cache.GatheredCache(self.layout, pool[0][0].shape[1], self.kv), began.position
        windows, blank = gathered.open(pool, tiles, began.token.shape[1], most, self.dtype)

        def forward(fresh: list[Any], tokens: jax.Array, positions: jax.Array, at: jax.Array) -> tuple[jax.Array, Any]:
            def attend(
                layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
            ) -> tuple[jax.Array, Any]:
                own = windows[layer], tiles[self.kv.places[layer][0]], fresh[layer]
                return gathered.attend(q, k, v, *own, start, at, self.rules[layer], sinks)

            return self.layers(params, tokens, positions, attend)

        return blank, forward, lambda fresh, counts: gathered.close(pool, fresh, tables, start, counts)

    def pin(self, tree: Any) -> Any:
        """Fixes the sharding of per-row values, so that no reshard comes between programs."""
        return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda _: self.rows_sharding, tree))


def _mix(config: ModelConfig, layout: Layout, max_tp: int, *, batched: bool) -> decoder.Mix:
    """Experts as rollout weights have them: split over tp, whose devices have the same tokens."""
    from jaxrl.models import experts

    padded, layer = padded_config(config, max_tp), config.base.weights()["layers"]
    own = {name: layer[name] for name in experts.WEIGHTS if name in layer}
    shardings = {name: NamedSharding(layout.mesh, rollout_spec(weight, layout, padded)) for name, weight in own.items()}
    specs = {name: sharding.spec for name, sharding in (shardings | scale_shardings(own, shardings)).items()}
    rows = PartitionSpec(layout.dp_axes or None)
    return experts.over_devices(layout.mesh, specs, rows, batched=batched, gathered=False)


def fill_row(
    state: RowState, at: tuple[int, int], seed: int, key: SampleKey, params: SamplingParams, limit: int
) -> None:
    """Writes what is known of a request into a row on the host; `seed`: of requests without their own."""
    state.limit[at] = limit
    state.stop_ids[at][: len(params.stop_token_ids)] = params.stop_token_ids
    state.sampling.keys[at] = request_key(seed if params.seed is None else params.seed, key)
    state.sampling.temperature[at] = params.temperature
    state.sampling.top_k[at] = params.top_k
    state.sampling.top_p[at] = params.top_p
    state.sampling.min_p[at] = params.min_p


def host_rows(groups: int, rows: int, proposer: Drafting | None = None) -> RowState:
    """Numpy arrays to fill on the host: inactive rows that would stop at once."""
    shapes = row_state_shapes(groups, rows, proposer)
    blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    blank.stop_ids[:] = -1
    blank.sampling.top_p[:] = 1
    if proposer is not None:
        blank.recent[:] = proposer.blank
        blank.window[:] = proposer.first_window
    return blank
