"""The compiled programs of one layout, by shape bucket, and the shapes and shardings that they are compiled for.

Programs follow from the model, the layout and the sizes alone, so they can be compiled before a layout is in use,
without weights or pools (`jaxrl.sharding.compiled`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.kernels.gathered import WindowTiles, num_tiles, window_tiles
from jaxrl.models.config import ModelConfig
from jaxrl.models.kv_layers import kv_layers
from jaxrl.models.streaming import on_host
from jaxrl.rollout import kv_cache
from jaxrl.rollout.programs import ExecutorConfig, Generated, Programs, Tiles, row_state_shapes
from jaxrl.scheduling.tokens.plan import Capacity
from jaxrl.sharding.compiled import CompiledPrograms, products_of
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.rules import map_weights, pad_heads, rollout_shardings, to_rollout

if TYPE_CHECKING:
    from jaxrl.mechanisms.speculation.proposer import Drafting

ProgramShape = tuple[str, int, int, int]
"""(program, rows, positions per row, table width); of a program over windows, tiles instead of positions. Of `upload`,
which writes a history into its place: the number of places, and their `Drafting.upload_sizes`."""

_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
"""The operations that XLA records into CUDA graphs (`--xla_gpu_enable_command_buffer`): its defaults, and loops."""

_TILE = 128
"""The most positions of a window's tile (or one block, if that is more): fewer are more products, more are padding."""


def buckets(most: int, factor: int, least: int = 1) -> tuple[int, ...]:
    """Ascending sizes that end at exactly `most`, each the next one divided by `factor`, none below `least`."""
    sizes = [most]
    while (size := -(-sizes[-1] // factor)) >= least and size < sizes[-1]:
        sizes.append(size)
    return tuple(reversed(sizes))


def bucket(value: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that holds `value`."""
    return next(size for size in sizes if size >= value)


class LayoutPrograms(CompiledPrograms):
    """Programs of one model on one layout, each compiled once; `kv`: how its layers share the KV pool."""

    def __init__(self, model: ModelConfig, layout: Layout, config: ExecutorConfig) -> None:
        super().__init__()
        self.model, self.layout, self.config = model, layout, config
        self.kv = kv_layers(model, config.max_length, config.max_prefill_tokens, config.decode_steps)
        sizes = config.sizes(layout.tp, self.kv.stacks)
        rooms = sizes.num_slots, sizes.num_blocks, config.block_size, config.max_prefill_tokens
        self.capacity = Capacity(layout.dp, *rooms, self.kv.stacks)
        self.dtype, self.platform = jnp.dtype(config.dtype), platform_of(layout.mesh.devices.flat[0])
        self.programs = Programs(model, layout, config, self.kv)
        self.cache_shape = kv_cache.CacheShape(
            self.kv.size,
            pad_heads(model.num_heads, model.num_kv_heads, config.max_tp)[1],
            model.head_dim,
            sizes.num_blocks,
            config.block_size,
            self.dtype,
            config.kv_codes,
        )
        # Every bucket is a program to compile, so they are few where they would save little.
        widest, least = -(-config.max_length // config.block_size), -(-128 // config.block_size)
        # The longest row in equal tiles: rows that reach the limit, as they often do, are padded by next to nothing.
        self.tile_width = -(-widest // -(-widest * config.block_size // _TILE))
        # What lies behind a window has been freed; the tiles of a row begin with its first block.
        limits = self.kv.stacks.limits(config.block_size)
        self.row_tiles = [-(-min(widest, limit or widest) // self.tile_width) for limit in limits]
        # On CPUs (where windows are gathered) a step's time nearly follows its rows, and a draining batch has few.
        # On GPUs a product with a single row is a sum of vectors to XLA, which writes some of its terms to memory.
        gathered = self.programs.gathered
        self.row_buckets = buckets(sizes.num_slots, 2, 4) if gathered else buckets(max(2, sizes.num_slots), 4, 8)
        self.decode_widths = buckets(widest, 2, least=max(least, widest // 8))
        self.prefill_widths = buckets(widest, 4, least=max(least, widest // 16))
        # Chunk lengths need more: their padding runs through all layers. 32 chunks of 64 tokens took twice their time.
        self.chunk_buckets = buckets(config.max_prefill_tokens, 2, least=2 * config.block_size)

    def prefill_rows(self, length: int) -> tuple[int, ...]:
        """The sizes of a prefill call's rows, by its length bucket."""
        most = min(self.capacity.num_slots, max(1, self.capacity.max_prefill_tokens // length))
        # On CPUs padded rows take as long as real ones, and where one row ends another starts alone.
        return buckets(most, *((4, 1) if self.programs.gathered else (8, 4)))

    def tile_counts(self, rows: int) -> tuple[int, ...]:
        """The sizes of a window of `rows` rows, in tiles of the stack that has most."""
        return buckets(rows * max(self.row_tiles), 2, least=rows)

    def _stack_tiles(self, rows: int, most: int) -> list[int]:
        return [min(most, rows * each) for each in self.row_tiles]

    def list_tiles(self, tables: Sequence[Sequence[Sequence[int]]], rows: int, most: int) -> Tiles:
        """The tiles of rows with these block tables [dp groups, rows], in a program for `rows` and `most` tiles."""
        stacks = []
        for own, count in zip(self._by_stack(tables), self._stack_tiles(rows, most), strict=True):
            listed = (window_tiles(group, self.tile_width, count, self.config.block_size) for group in own)
            stacks.append(WindowTiles(*map(np.stack, zip(*listed, strict=True))))
        return tuple(stacks)

    def split(self, tables: np.ndarray) -> tuple[np.ndarray, ...]:
        """Each stack's blocks in the padded tables [..., W * stacks] of a call."""
        count = len(self.kv.stacks)
        return tuple(np.ascontiguousarray(tables[..., stack::count]) for stack in range(count))

    def _by_stack(self, tables: Sequence[Sequence[Sequence[int]]]) -> list[Sequence[Sequence[Sequence[int]]]]:
        count = len(self.kv.stacks)
        if count == 1:
            return [tables]
        return [[[table[stack::count] for table in group] for group in tables] for stack in range(count)]

    def verify_width(self, rows: int) -> int:
        """Proposed tokens that a step verifies in each row, by a size of `row_buckets`; 0: no program for them."""
        return 0 if self.config.proposer is None else self.config.proposer.width(rows)

    def decode_shape(
        self, tables: Sequence[Sequence[Sequence[int]]], verifies: bool = False, tells_top: bool = False
    ) -> ProgramShape:
        """For rows with these block tables [dp groups, rows]; of a program that verifies if the plan does and there is
        one."""
        rows = bucket(max(map(len, tables)), self.row_buckets)
        width = self.verify_width(rows) if verifies else 0
        kind = "verify" if width else "decode_top" if tells_top else "decode"
        if not self.programs.gathered:
            widest = max(len(table) for group in tables for table in group) // len(self.kv.stacks)
            return kind, rows, 1 + width, bucket(widest, self.decode_widths)
        tiles = max(num_tiles(group, self.tile_width) for own in self._by_stack(tables) for group in own)
        return kind, rows, bucket(tiles, self.tile_counts(rows)), self.decode_widths[-1]

    def shapes(self) -> list[ProgramShape]:
        """Every shape that a plan can need."""
        prefill = [
            ("prefill", rows, length, width)
            for length in self.chunk_buckets
            for rows in self.prefill_rows(length)
            for width in self.prefill_widths
        ]
        if self.model.scalar_head:
            return prefill
        widths = self.decode_widths
        if self.programs.gathered:
            decode = [("decode", r, tiles, widths[-1]) for r in self.row_buckets for tiles in self.tile_counts(r)]
        else:
            decode = [("decode", r, 1, width) for r in self.row_buckets for width in widths]
        if self.config.proposer is None:
            return prefill + decode
        widths_of = [(self.verify_width(rows), rows, length, width) for _, rows, length, width in decode]
        gathered = self.programs.gathered
        verify = [("verify", r, length if gathered else 1 + most, w) for most, r, length, w in widths_of if most]
        return prefill + decode + ([*verify, self.upload_shape] if verify else [])

    @property
    def upload_shape(self) -> ProgramShape:
        proposer = self.config.proposer
        assert proposer is not None
        return "upload", proposer.num_places(self.capacity.num_slots), *proposer.upload_sizes

    def compiler_options(self, kind: str) -> dict[str, Any]:
        """XLA's options for a program. On a GPU the decode loop goes into the CUDA graph with all that is inside, so a
        plan is one launch; by default the host runs the loop and reads a predicate back in every step."""
        if self.platform != "gpu":
            return {}
        own = {}
        if self.config.is_invariant:
            from jaxrl.kernels.invariant import GPU_COMPILER_OPTIONS as own
        # a graph holds no copy from the host's memory
        has_graph = kind in ("decode", "decode_top", "verify") and self.config.resident_layers is None
        return {**own, **({"xla_gpu_enable_command_buffer": _GRAPHS} if has_graph else {})}

    def lower(self, kind: str, *sizes: int, platforms: tuple[str, ...] | None = None) -> Any:
        """The program of a `ProgramShape`, traced for this layout's devices; lowered for `platforms` if given."""
        program, donated, arguments, out = self._program(kind, *sizes)
        jitted = jax.jit(program, donate_argnums=donated, out_shardings=out)
        with products_of(self.dtype, self.platform):
            return jitted.trace(*arguments).lower(lowering_platforms=platforms)

    def _program(self, kind: str, rows: int, length: int, width: int) -> tuple[Any, tuple[int, ...], Any, Any]:
        """(function, the arguments that it may overwrite, their shapes, shardings of what it returns)."""
        groups, truncate, by_group = self.layout.dp, self.config.truncate, self.programs.rows_sharding

        def of(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((groups, rows, *dims), dtype, sharding=by_group)

        if kind == "upload":
            one = jax.ShapeDtypeStruct((groups,), jnp.int32, sharding=by_group)
            assert self.config.proposer is not None
            histories, new = self.abstract_histories(), self._sharded(self.config.proposer.array_shapes(groups))
            out = jax.tree.map(lambda x: x.sharding, histories)
            return self.config.proposer.upload, (0,), (histories, one, new), out
        live = self.abstract_params(), self.abstract_pool(), self._state(self.capacity.num_slots)
        tables = (of(jnp.int32, width),) * len(self.kv.stacks)
        slots, flags = of(jnp.int32), of(jnp.bool_)
        pool = jax.tree.map(lambda x: x.sharding, live[1])
        state = jax.tree.map(lambda x: x.sharding, live[2])
        num_top = self.config.top_logprobs if kind.endswith("_top") else 0
        top = (by_group, by_group) if num_top else ()
        generated = Generated(by_group, by_group, by_group, by_group, by_group, None, *top)
        if kind.startswith("prefill"):
            arguments = (of(jnp.int32, length), of(jnp.int32), of(jnp.int32), tables, slots, self._state(rows))
            prefill = partial(self.programs.prefill, truncate=truncate, num_top=num_top)
            return prefill, (1, 2), (*live, *arguments), (pool, state, generated)
        everywhere = NamedSharding(self.layout.mesh, PartitionSpec())
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
        counts = self._stack_tiles(rows, length)
        tiles = tuple(map(self._tiles, counts)) if self.programs.gathered else None
        if kind.startswith("decode"):
            arguments = (*live, tables, slots, flags, scalar, scalar, tiles)
            decode = partial(self.programs.decode, truncate=truncate, num_top=num_top)
            return decode, (1, 2), arguments, (pool, state, generated, everywhere)
        from jaxrl.rollout.verify import Verify, VerifySums

        assert self.config.proposer is not None
        verify = Verify(self.programs, self.config.proposer, self.verify_width(rows), truncate)
        by_row = of(jnp.int32)
        arguments = (*live, self.abstract_histories(), tables, slots, flags, by_row, by_row, scalar, scalar, tiles)
        sums = generated._replace(verified=VerifySums(*[by_group] * len(VerifySums._fields)))
        return verify.run, (1, 2), arguments, (pool, state, sums, everywhere)

    # -- what programs are compiled for ----------------------------------------------------------------------------

    def abstract_params(self) -> Any:
        """The rollout weights' shapes, dtypes and shardings in this layout."""
        model, form = self.model.base, self.programs.form  # a rollout knows no adapters, and nothing quantised
        train = map_weights(lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.float32), model.weights())
        to = model, self.layout, self.dtype, self.config.max_tp
        shapes = jax.eval_shape(lambda params: to_rollout(params, *to, **form), train)
        shardings = rollout_shardings(model, self.layout, self.config.max_tp, **form)
        if self.config.resident_layers is not None:
            shardings = shardings | {"layers": on_host(shardings["layers"], self.config.resident_layers)}
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    def abstract_pool(self) -> Any:
        sharding = kv_cache.pool_sharding(self.layout, self.cache_shape)
        return self.cache_shape.made(self.layout, partial(jax.ShapeDtypeStruct, sharding=sharding))

    def abstract_histories(self) -> Any:
        proposer = self.config.proposer
        assert proposer is not None
        return self._sharded(proposer.array_shapes(self.layout.dp, proposer.num_places(self.capacity.num_slots)))

    def blank_histories(self) -> Any:
        assert self.config.proposer is not None
        return _blank(self.config.proposer, self.capacity, self.programs.rows_sharding)()

    def _tiles(self, count: int) -> WindowTiles:
        one = jax.ShapeDtypeStruct((self.layout.dp, count), jnp.int32)
        blocks = jax.ShapeDtypeStruct((self.layout.dp, count, self.tile_width), jnp.int32)
        return self._sharded(WindowTiles(blocks, one, one))

    def _state(self, rows: int) -> Any:
        return self._sharded(row_state_shapes(self.layout.dp, rows, self.config.proposer))

    def _sharded(self, tree: Any) -> Any:
        by_group = self.programs.rows_sharding
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_group), tree)


@lru_cache(maxsize=16)
def _blank(proposer: Drafting, capacity: Capacity, sharding: NamedSharding) -> Callable[[], Any]:
    """Compiled once for each layout."""
    shapes = proposer.array_shapes(capacity.num_groups, proposer.num_places(capacity.num_slots))
    return jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=sharding)
