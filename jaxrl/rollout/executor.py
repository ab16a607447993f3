"""The executor that runs the engine's plans on a mesh.

`submit` turns a plan into program calls over padded shape buckets and returns at once; `collect` waits for the values
of a plan. Weights, KV pool and row state stay on the devices between plans. Every shape is compiled ahead (`warm_up`)
and kept in jax's persistent compilation cache when one is configured; a shape met later is compiled then and counted
(`recompiles`).

Prefill chunks of one plan run in ascending order of their start, in one call per run of equal length buckets. A chunk
that reads blocks written by another chunk of the plan (a prompt's shared blocks) starts later in its sequence than that
one, and inside a call all chunks write a layer's keys and values before any reads them: so both orders are safe.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.kernels.attention import Implementation
from jaxrl.models.config import ModelConfig
from jaxrl.rollout import kv_cache
from jaxrl.rollout.programs import MAX_STOP_IDS, Generated, Programs, RowState, host_rows, row_state_shapes
from jaxrl.rollout.sampling import request_key
from jaxrl.scheduling.plan import TRASH_BLOCK, Plan, PlanResult, PrefillChunk, Request, RowResult, Ticket
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.rules import pad_heads, to_rollout


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Sizes of an executor.

    Attributes:
      num_slots: rows per dp group.
      num_blocks: KV blocks per dp group, the reserved one included.
      block_size: positions per block.
      max_length: tokens of the longest sequence.
      max_prefill_tokens: prefill tokens per plan and dp group.
      decode_steps: the most decode steps per plan.
      dtype: of weights, KV and activations.
      seed: the run's; folded into every token's key.
      truncate: whether requests may use top-k, top-p or min-p: their programs sort the vocabulary.
      max_tp: the largest TP degree that the weights are padded for.
      attention: what reads the paged cache (`jaxrl.kernels.attention`).
      features_first, gathered: how programs are built (`programs.Programs`); None: as the platform runs them fastest.
    """

    num_slots: int
    num_blocks: int
    block_size: int = 16
    max_length: int = 1024
    max_prefill_tokens: int = 512
    decode_steps: int = 16
    dtype: Any = jnp.float32
    seed: int = 0
    truncate: bool = False
    max_tp: int = 1
    attention: Implementation = "auto"
    features_first: bool | None = None
    gathered: bool | None = None


def buckets(most: int, factor: int, least: int = 1) -> tuple[int, ...]:
    """Ascending sizes ending at exactly `most`, each a `factor`-th of the next, none below `least`."""
    sizes = [most]
    while (size := -(-sizes[-1] // factor)) >= least and size < sizes[-1]:
        sizes.append(size)
    return tuple(reversed(sizes))


def bucket(value: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that holds `value`."""
    return next(size for size in sizes if size >= value)


@dataclass(slots=True)
class _Call:
    """Which request each [group, row] of a program call belongs to, and what it will return."""

    requests: list[tuple[int, int, int]]  # (group, row, request id)
    generated: Generated


@dataclass(slots=True)
class MeshTicket:
    """A submitted plan: its calls' device values."""

    index: int
    policy_version: int
    calls: list[_Call] = field(default_factory=list)
    steps: jax.Array | None = None
    submitted_s: float = 0.0


class MeshExecutor:
    """Implements `jaxrl.scheduling.plan.Executor` for one model on one layout.

    Call `sync_weights` and `allocate` before the first plan. `release` frees the KV pool for the update phase.
    """

    def __init__(self, model: ModelConfig, layout: Layout, config: ExecutorConfig) -> None:
        self.model = model
        self.layout = layout
        self.config = config
        self.num_groups = layout.dp
        self.num_slots = config.num_slots
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self.max_prefill_tokens = config.max_prefill_tokens
        self.policy_version = 0
        self.recompiles = 0
        self.host_s = 0.0
        self._programs = Programs(
            model,
            layout,
            jnp.dtype(config.dtype),
            config.decode_steps,
            attention=config.attention,
            features_first=config.features_first,
            gathered=config.gathered,
        )
        self._compiled: dict[tuple, Any] = {}
        self._warm = False
        self._params: Any = None
        self._pool: kv_cache.Pool | None = None
        self._state: RowState | None = None
        kv_heads = pad_heads(model.num_heads, model.num_kv_heads, config.max_tp)[1]
        self.cache_shape = kv_cache.CacheShape(
            model.num_layers,
            kv_heads,
            model.head_dim,
            config.num_blocks,
            config.block_size,
            jnp.dtype(config.dtype),
        )
        # Every bucket is a program to compile, so they are few where they would save little.
        self._row_buckets = buckets(config.num_slots, 4, least=8)
        widest = -(-config.max_length // config.block_size)
        self._decode_widths = buckets(widest, 2, least=max(-(-128 // config.block_size), widest // 8))
        self._prefill_widths = buckets(widest, 4, least=max(-(-128 // config.block_size), widest // 16))
        # Except for chunk lengths: all layers run their padding (32 chunks of 64 tokens, run as 128, took twice as long).
        self._chunk_buckets = buckets(config.max_prefill_tokens, 2, least=2 * config.block_size)

    # -- memory phases ---------------------------------------------------------------------------------------------

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        """Takes over the trainer's weights, on the devices: cast, padded and resharded to this layout."""
        self._params = None  # the old copy goes first: two never exist at once
        config = self.config
        self._params = to_rollout(
            train_params,
            self.model,
            self.layout,
            config.dtype,
            config.max_tp,
            features_first=self._programs.features_first,
        )
        self.policy_version = policy_version

    def allocate(self) -> None:
        """Allocates the KV pool and blank row state."""
        self._pool = kv_cache.allocate(self.layout, self.cache_shape)
        blank = host_rows(self.num_groups, self.num_slots)
        self._state = jax.device_put(blank, jax.tree.map(lambda _: self._programs.rows_sharding, blank))

    def release(self, *, weights: bool = False) -> None:
        """Frees the KV pool and row state (and the weights); every request must have ended or been aborted."""
        for array in jax.tree.leaves((self._pool, self._state)):
            array.delete()
        self._pool = self._state = None
        if weights:
            self._params = None

    # -- the seam ----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuses what the programs of this executor were not built for."""
        params, who = request.params, f"request {request.request_id} ({request.key})"
        if len(params.stop_token_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"{who}: SamplingParams.stop_token_ids has {len(params.stop_token_ids)} ids; a row holds {MAX_STOP_IDS}"
            )
        if not self.config.truncate and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
            raise ValueError(
                f"{who}: top_k={params.top_k}, top_p={params.top_p}, min_p={params.min_p} need an engine built with "
                "truncate=True (its programs sort the vocabulary)"
            )
        length = len(request.prompt_ids) + params.max_tokens
        if length > self.config.max_length:
            raise ValueError(
                f"{who}: prompt ({len(request.prompt_ids)}) + max_tokens ({params.max_tokens}) must be at most "
                f"max_length ({self.config.max_length}), for which the block tables are built"
            )

    def submit(self, plan: Plan) -> MeshTicket:
        """Dispatches the plan's programs; no value is read."""
        if self._params is None or self._pool is None:
            raise RuntimeError("the executor has no weights or no KV pool: call sync_weights and allocate first")
        began = time.perf_counter()
        ticket = MeshTicket(plan.index, self.policy_version, submitted_s=began)
        for chunks, length in self._prefill_calls(plan.prefill):
            ticket.calls.append(self._submit_prefill(chunks, length))
        if plan.decode and plan.num_steps:
            self._submit_decode(plan, ticket)
        for call in ticket.calls:
            for array in call.generated:
                array.copy_to_host_async()
        self.host_s += time.perf_counter() - began
        return ticket

    def collect(self, ticket: Ticket) -> PlanResult:
        """Waits for the plan's values and sorts them by request."""
        assert isinstance(ticket, MeshTicket), "a ticket of another executor"
        pieces: dict[int, list[RowResult]] = {}
        for call in ticket.calls:
            host = Generated(*(np.asarray(array) for array in call.generated))
            for group, row, request_id in call.requests:
                count = int(host.counts[group, row])
                pieces.setdefault(request_id, []).append(
                    RowResult(
                        host.tokens[group, row, :count],
                        host.sampled_logprobs[group, row, :count],
                        host.rollout_logprobs[group, row, :count],
                        bool(host.stopped[group, row]),
                    )
                )
        rows = {request_id: _join(parts) for request_id, parts in pieces.items()}
        steps = 0 if ticket.steps is None else int(ticket.steps)
        waited = time.perf_counter() - ticket.submitted_s
        return PlanResult(ticket.index, rows, steps, ticket.policy_version, waited)

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _prefill_calls(self, chunks: Iterable[PrefillChunk]) -> list[tuple[list[PrefillChunk], int]]:
        """Runs of chunks with one length bucket, cut where a call's rows would pass the prefill budget."""
        ordered = sorted(chunks, key=lambda c: (c.start, -len(c.tokens)))
        calls: list[tuple[list[PrefillChunk], int]] = []
        for length, run in itertools.groupby(ordered, key=lambda c: bucket(len(c.tokens), self._chunk_buckets)):
            most = self._prefill_rows(length)[-1]
            rows: list[PrefillChunk] = []
            per_group = [0] * self.num_groups
            for chunk in run:
                if per_group[chunk.dp_group] == most:
                    calls.append((rows, length))
                    rows, per_group = [], [0] * self.num_groups
                rows.append(chunk)
                per_group[chunk.dp_group] += 1
            calls.append((rows, length))
        return calls

    def _prefill_rows(self, length: int) -> tuple[int, ...]:
        most = min(self.num_slots, max(1, self.max_prefill_tokens // length))
        return buckets(most, 8, least=4)

    def _submit_prefill(self, chunks: list[PrefillChunk], length: int) -> _Call:
        placed = _place(chunks, self.num_groups)
        rows = bucket(max(row for _, row, _ in placed) + 1, self._prefill_rows(length))
        width = bucket(max(len(chunk.block_table) for chunk in chunks), self._prefill_widths)
        shape = (self.num_groups, rows)
        tokens = np.zeros((*shape, length), np.int32)
        start, lengths = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        slots = np.full(shape, self.num_slots, np.int32)
        tables = np.full((*shape, width), TRASH_BLOCK, np.int32)
        state = host_rows(*shape)
        requests = []
        for group, row, chunk in placed:
            at = (group, row)
            tokens[at][: len(chunk.tokens)] = chunk.tokens
            start[at], lengths[at] = chunk.start, len(chunk.tokens)
            tables[at][: len(chunk.block_table)] = chunk.block_table
            if chunk.is_last:
                slots[at] = chunk.slot
                self._fill(state, at, chunk.request)
                requests.append((group, row, chunk.request.request_id))
        program = self._program("prefill", rows, length, width)
        self._pool, self._state, generated = program(
            self._params, self._pool, self._state, tokens, start, lengths, tables, slots, state
        )
        return _Call(requests, generated)

    def _fill(self, state: RowState, at: tuple[int, int], request: Request) -> None:
        params = request.params
        seed = self.config.seed if params.seed is None else params.seed
        state.limit[at] = len(request.prompt_ids) + params.max_tokens
        state.stop_ids[at][: len(params.stop_token_ids)] = params.stop_token_ids
        state.sampling.keys[at] = request_key(seed, request.key)
        state.sampling.temperature[at] = params.temperature
        state.sampling.top_k[at] = params.top_k
        state.sampling.top_p[at] = params.top_p
        state.sampling.min_p[at] = params.min_p

    # -- decode ------------------------------------------------------------------------------------------------------

    def _submit_decode(self, plan: Plan, ticket: MeshTicket) -> None:
        placed = _place(plan.decode, self.num_groups)
        rows = bucket(max(row for _, row, _ in placed) + 1, self._row_buckets)
        width = bucket(max(len(row.block_table) for row in plan.decode), self._decode_widths)
        shape = (self.num_groups, rows)
        tables = np.full((*shape, width), TRASH_BLOCK, np.int32)
        slots = np.full(shape, self.num_slots, np.int32)
        fresh = np.zeros(shape, np.bool_)
        ended = {chunk.request.request_id for chunk in plan.prefill if chunk.is_last}
        requests = []
        for group, row, entry in placed:
            at = (group, row)
            tables[at][: len(entry.block_table)] = entry.block_table
            slots[at] = entry.slot
            fresh[at] = entry.request_id in ended
            requests.append((group, row, entry.request_id))
        program = self._program("decode", rows, 1, width)
        limits = np.int32(plan.num_steps), np.int32(min(plan.leave_after, 1 << 30))
        self._pool, self._state, generated, ticket.steps = program(
            self._params, self._pool, self._state, tables, slots, fresh, *limits
        )
        ticket.calls.append(_Call(requests, generated))

    # -- compilation -------------------------------------------------------------------------------------------------

    def shapes(self) -> list[tuple[str, int, int, int]]:
        """Every (program, rows, positions per row, table width) that a plan can need."""
        prefill = [
            ("prefill", rows, length, width)
            for length in self._chunk_buckets
            for rows in self._prefill_rows(length)
            for width in self._prefill_widths
        ]
        return prefill + [("decode", rows, 1, width) for rows in self._row_buckets for width in self._decode_widths]

    def warm_up(self, progress: Any = None) -> int:
        """Compiles every shape; needs weights and pool. Returns how many there are."""
        shapes = self.shapes()
        for i, shape in enumerate(shapes):
            self._program(*shape)
            if progress is not None:
                progress(i + 1, len(shapes))
        self._warm = True
        return len(shapes)

    def _program(self, kind: str, rows: int, length: int, width: int) -> Any:
        key = (kind, rows, length, width)
        if key not in self._compiled:
            self._compiled[key] = self._compile(*key)
            self.recompiles += self._warm
        return self._compiled[key]

    def _compile(self, kind: str, rows: int, length: int, width: int) -> Any:
        groups, truncate = self.num_groups, self.config.truncate
        by_group, everywhere = self._programs.rows_sharding, NamedSharding(self.layout.mesh, PartitionSpec())

        def of(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((groups, rows, *dims), dtype, sharding=by_group)

        live = jax.tree.map(_abstract, (self._params, self._pool, self._state))
        tables, slots = of(jnp.int32, width), of(jnp.int32)
        pool_shardings = [(x.sharding, y.sharding) for x, y in self._pool or []]
        state_shardings = jax.tree.map(lambda x: x.sharding, self._state)
        generated = Generated(*[by_group] * len(Generated._fields))
        if kind == "prefill":
            fill = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_group), row_state_shapes(groups, rows)
            )
            arguments = (of(jnp.int32, length), of(jnp.int32), of(jnp.int32), tables, slots, fill)
            program, out = self._programs.prefill, (pool_shardings, state_shardings, generated)
        else:
            scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
            arguments = (tables, slots, of(jnp.bool_), scalar, scalar)
            program, out = self._programs.decode, (pool_shardings, state_shardings, generated, everywhere)
        jitted = jax.jit(partial(program, truncate=truncate), donate_argnums=(1, 2), out_shardings=out)
        return jitted.lower(*live, *arguments).compile()


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _place(items: Iterable[Any], num_groups: int) -> list[tuple[int, int, Any]]:
    """Numbers items (group, row) in order, each within its dp group."""
    rows = [0] * num_groups
    placed = []
    for item in items:
        placed.append((item.dp_group, rows[item.dp_group], item))
        rows[item.dp_group] += 1
    return placed


def _join(parts: list[RowResult]) -> RowResult:
    """A finished prefill's first token and what the same plan decoded after it."""
    if len(parts) == 1:
        return parts[0]
    return RowResult(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.sampled_logprobs for part in parts]),
        np.concatenate([part.rollout_logprobs for part in parts]),
        any(part.stopped for part in parts),
    )
