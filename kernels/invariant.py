"""Numbers of a token that do not depend on what is computed beside it: `actor.numerics=invariant`.

A compiler chooses the order of a sum by the shapes of a program. So a token's numbers depend on its program's rows,
prompt chunk and cached positions, and rollout and trainer differ in their last bits. Here a token's numbers are
computed in pieces of one shape: rows in tiles, context in blocks that begin at multiples of their size and are merged
in order. Padding of a tile is never mixed into a row, and blocks that a query does not see are added as zeros.

On CPUs a piece is the body of a loop of a length unknown to the compiler. So it is compiled by itself, and programs of
other shapes only run it more or less often. On GPUs it is enclosed by two barriers, over which the compiler moves and
fuses nothing; products and attention are kernels (`jaxrl.kernels.invariant_pallas`).

Source: batch-invariant kernels (He et al. 2025, "Defeating Nondeterminism in LLM Inference"). Departure: norms and
softmaxes are not rewritten, and on CPUs nothing is. The fixed piece is a long stretch of a layer, inside which the
compiler is free. `jaxrl check-numerics` measures whether two programs compile it to the same code; for GPUs a test
compares the compiled programs. Gradients come from the plain computation at the same inputs: only one side has them.

Dims: N rows, Q queries of a tile, S positions of a block, H query heads, K key/value heads, G = H / K, D head dim; R
rows of tokens, T tokens of a row, W blocks per table, P positions per block of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from jaxrl.kernels import packed, reference
from jaxrl.kernels.by_rows import Join, Multiply, Part, with_gradient_of

TILE, GPU_TILE = 32, 128
"""Rows that products, norms and the vocabulary's log-probabilities take at a time, on CPUs and on GPUs. An H100 reads
16-bit weights in the time in which it multiplies them with 295 rows."""

GRAPH_TILES = 8
"""The most tiles of a step of decoding, whose loops are in a CUDA graph with all that is inside."""

GPU_COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""XLA's options for all programs on GPUs. By default XLA autotunes each piece, separately in each process and program.
What products are left, those of gradients, are cuBLAS's: untried, tilings of XLA's own are poor."""

QUERIES, CONTEXT = 32, 32
"""Queries, and positions of the context, that attention takes at a time."""


class Cut(NamedTuple):
    """How tensor parallelism splits a weight of a layer, or the vocabulary's. Hashable."""

    dim: int
    axes: tuple[str, ...] = ()  # of the mesh
    is_matrix: bool = False  # only products read it, so that a kernel may read a part of it in place


class InTiles(NamedTuple):
    """Computes rows in tiles (`ByRows`). Hashable. Programs that must agree bit for bit have tiles of one platform
    (`for_platform`).

    `mesh`, `spec`: over which and how the first dim of rows is split; None: inside `shard_map`, or on one device.
    `prepared`: what `shared` in parts becomes first, where the gradient is that of another form of it; hashable.
    """

    mesh: Mesh | None = None
    spec: PartitionSpec = PartitionSpec()
    parts: tuple[int, ...] = ()  # prime factors of the number of parts of weights, on all devices together
    axes: tuple[str, ...] = ()  # of the mesh, over which parts are split, major first: sizes are the first of `parts`
    cuts: tuple[tuple[str, Cut], ...] = ()  # of the weights that have parts, by name
    prepared: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    size: int = TILE  # rows of a tile
    multiply: Multiply | None = None  # kernels that multiply rows with a matrix; None: the compiler's own product

    def for_platform(self, platform: str, *, interpret: bool = False) -> InTiles:
        """The same for devices of a platform (`cpu`, `gpu`, `tpu`). On GPUs products are kernels: nothing fixes which
        kernel a compiler chooses, or that all rows of a tile are summed in one order. `interpret`: as on a GPU, with
        kernels as plain JAX, on any device (slow; for tests).
        """
        if platform != "gpu" and not interpret:
            return self
        from jaxrl.kernels import invariant_pallas  # here, because a JAX may lack this backend of Pallas

        return self._replace(size=GPU_TILE, multiply=invariant_pallas.Product(interpret))

    @property
    def own_parts(self) -> int:
        """Parts of one device."""
        return math.prod(self.parts[len(self.axes) :])

    def __call__(
        self,
        function: Callable[..., Any],
        rows: tuple[Any, ...],
        shared: Any = (),
        *,
        join: Join | None = None,
        heads: bool = False,
        in_kernels: bool = False,
    ) -> Any:
        compute = self._fenced if in_kernels and self.multiply is not None else partial(self._tiled, heads=heads)
        in_parts = join is not None and bool(self.parts)

        def exact(shared: Any, rows: tuple[Any, ...]) -> Any:
            if join is not None and self.prepared is not None:
                shared = self.prepared(shared)
            if in_parts:
                return self._of_parts(partial(compute, function), rows, shared, join, heads)
            return compute(function, rows, shared)

        own = exact
        if self.mesh is not None:
            first, *others = rows
            of_first = self._with_heads(first.ndim - 2, self.axes) if in_parts and heads else self.spec
            of_rows = (of_first, *(self.spec for _ in others))
            specs = (self._shared(shared) if in_parts else PartitionSpec(), of_rows)
            out = self.spec
            if in_parts and isinstance(join, tuple):
                out = tuple(self._with_heads(first.ndim - 1, dict(self.cuts)[name].axes) for name in join)
            own = jax.shard_map(exact, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)
        return with_gradient_of(lambda shared, rows: function(shared, *rows), own)(shared, rows)

    def _with_heads(self, dim: int, axes: tuple[str, ...]) -> PartitionSpec:
        """The spec of rows whose heads are in a dim."""
        return PartitionSpec(*self.spec, *[None] * (dim - len(self.spec)), axes or None)

    def _shared(self, shared: Mapping[str, Any]) -> Any:
        cuts = dict(self.cuts)

        def one(name: str) -> PartitionSpec:
            cut = cuts.get(name, Cut(0))
            return PartitionSpec(*[None] * cut.dim, cut.axes) if cut.axes else PartitionSpec()

        return {name: one(name) for name in shared}

    def _of_parts(
        self, compute: Callable[..., Any], rows: tuple[Any, ...], shared: Mapping[str, Any], join: Any, heads: bool
    ) -> Any:
        count, cuts = self.own_parts, {name: cut for name, cut in self.cuts if name in shared}

        def one(i: Any) -> Any:
            own = {name: self._own(w, cuts[name], i) if name in cuts else w for name, w in shared.items()}
            first, *others = rows
            return compute((_part(first, first.ndim - 2, i, count) if heads else first, *others), own)

        def body(i: jax.Array, out: Any) -> Any:
            return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), out, one(i))

        shapes = jax.eval_shape(one, 0)
        empty = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)
        out = lax.fori_loop(0, self._steps(count, rows[0]), body, empty)
        if join == "sum":
            return self._added(out)
        if join == "vocab":
            out = _side_by_side(out, -1)
            return lax.all_gather(out, self.axes, axis=out.ndim - 1, tiled=True) if self.axes else out
        different = [min(shared[name].shape[cuts[name].dim], count) for name in join]  # key/value heads may be fewer
        return tuple(_side_by_side(x[:: count // n], -2) for x, n in zip(out, different, strict=True))

    def _own(self, weight: jax.Array, cut: Cut, i: Any) -> Any:
        """Part `i` of a weight, which is copied only where the compiler's own products are to read it."""
        count, size = self.own_parts, weight.shape[cut.dim]
        if self.multiply is None or not cut.is_matrix or count == 1:
            return _part(weight, cut.dim, i, count)
        different = min(size, count)
        return Part(weight, jnp.int32(i) // (count // different), cut.dim, different)

    def _fenced(self, function: Callable[..., Any], rows: tuple[Any, ...], shared: Any) -> Any:
        """Between barriers: the compiler moves and fuses nothing over them."""
        fence = lax.optimization_barrier
        return fence(function(*fence((shared, *jax.tree.map(self._rows_in_order, rows)))))

    def _tiled(self, function: Callable[..., Any], rows: tuple[Any, ...], shared: Any, *, heads: bool) -> Any:
        size, dims = self.size, rows[0].shape[: -2 if heads else -1]
        flat = jax.tree.map(lambda x: _padded(x.reshape(-1, *x.shape[len(dims) :]), size), rows)

        def tile(i: Any) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size), flat)

        def body(i: jax.Array, out: Any) -> Any:
            own = tile(i)
            new = function(shared, *own) if self.multiply is None else self._fenced(function, own, shared)
            return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * size, 0), out, new)

        count = len(flat[0]) // size
        shapes = jax.eval_shape(lambda: function(shared, *tile(0)))
        empty = jax.tree.map(lambda x: jnp.zeros((count * size, *x.shape[1:]), x.dtype), shapes)
        out = lax.fori_loop(0, self._steps(count, flat[0]), body, empty)
        return jax.tree.map(lambda x: x[: math.prod(dims)].reshape(*dims, *x.shape[1:]), out)

    def _rows_in_order(self, x: jax.Array) -> jax.Array:
        """On GPUs, puts rows one behind the other in memory: where XLA has gathered columns they are not, and it would
        sum in another order."""
        return x if self.multiply is None else with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))

    def _steps(self, count: int, x: jax.Array) -> Any:
        """A loop's length. On GPUs fences keep pieces apart, whether the compiler knows it or not. But XLA records
        loops into a CUDA graph only if it does not know their length; and in loops that the host runs, it waits for the
        device in each turn unless it knows the length."""
        return _hidden(count, x) if self.multiply is None or 1 < count <= GRAPH_TILES else count

    def _added(self, parts: jax.Array) -> jax.Array:
        """The sum of parts: neighbours first, then neighbouring sums, in the end across devices."""
        here, across = self.parts[len(self.axes) :], self.axes
        for factor in reversed(here):
            parts = _in_order(jnp.moveaxis(parts.reshape(-1, factor, *parts.shape[1:]), 1, 0))
        (total,) = parts
        for axis in reversed(across):  # not a reduction of the mesh's own: that would have its own order
            total = _in_order(lax.all_gather(total, axis))
        return total


def _in_order(parts: jax.Array) -> jax.Array:
    return reduce(jnp.add, [parts[i] for i in range(len(parts))])


def _part(x: jax.Array, dim: int, i: Any, count: int) -> jax.Array:
    """Part `i` of `count`. A dim that is smaller than their number is shared by neighbours."""
    size = x.shape[dim]
    if size % count:
        assert count % size == 0, f"{count} parts of {size}"
        return lax.dynamic_slice_in_dim(x, i // (count // size), 1, dim)
    return lax.dynamic_slice_in_dim(x, i * (size // count), size // count, dim)


def _side_by_side(parts: jax.Array, dim: int) -> jax.Array:
    """[n, ..., S, ...] -> [..., n S, ...], of parts that have S in their `dim`, counted from the end."""
    joined = jnp.moveaxis(parts, 0, dim - 1)
    return joined.reshape(*parts.shape[1 : parts.ndim + dim], -1, *parts.shape[parts.ndim + dim + 1 :])


def _padded(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, -len(x) % size), *[(0, 0)] * (x.ndim - 1)])


def _hidden(count: int, x: jax.Array) -> jax.Array:
    """A loop's length in a form that no compiler can know: it would inline a loop of one step, and compile another
    piece."""
    first = x.reshape(-1)[0]
    never = first == jnp.iinfo(x.dtype).min if jnp.issubdtype(x.dtype, jnp.integer) else jnp.isnan(first) & (first > 0)
    return jnp.where(never, 0, count)


# ---------------------------------------------------------------- attention


def _attention(
    q_NHD: jax.Array,
    first_N: jax.Array,
    last_N: jax.Array,
    where: Any,
    context: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    kv_heads: int,
    parts: int,
    softcap: float,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """[N, H, D]: each query sees the positions `first` .. `last` of its sequence.

    Args:
      where: of each query [N, ...], what `context` needs to find its sequence.
      context: (where [Q, ...], positions [S], heads [K']) -> keys and values [Q, S, K', D].
      parts: in which heads are computed.
    """
    count, num_heads, dim = q_NHD.shape
    wide = jnp.promote_types(q_NHD.dtype, jnp.float32)
    q_NHD, flat = _padded(q_NHD, QUERIES), jax.tree.map(lambda x: _padded(x, QUERIES), (first_N, last_N, where))
    tiles, own_heads, own_kv_heads = len(q_NHD) // QUERIES, num_heads // parts, max(kv_heads // parts, 1)
    lowest = jnp.finfo(wide).min

    def of_tile(i: jax.Array, out_NHD: jax.Array) -> jax.Array:
        part, start = i // tiles, i % tiles * QUERIES
        at = start, part * own_heads, 0
        q_QHD = lax.dynamic_slice(q_NHD, at, (QUERIES, own_heads, dim))
        heads = part * kv_heads // parts + jnp.arange(own_kv_heads)
        first_Q, last_Q, own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, QUERIES), flat)
        q_QKGD = q_QHD.astype(wide).reshape(QUERIES, own_kv_heads, -1, dim)

        def of_block(block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, ...]:
            top, total, out = carry
            positions = block * CONTEXT + jnp.arange(CONTEXT)
            k_QSKD, v_QSKD = context(own, positions, heads)
            scores = jnp.einsum("qkgd,qskd->qkgs", q_QKGD, k_QSKD.astype(wide)) * dim**-0.5
            seen = (positions <= last_Q[:, None]) & (positions >= first_Q[:, None])
            scores = jnp.where(seen[:, None, None], reference.capped(scores, softcap), lowest)
            after = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights = jnp.where(seen[:, None, None], jnp.exp(scores - after[..., None]), 0)
            shrink = jnp.exp(top - after)
            part = jnp.einsum("qkgs,qskd->qkgd", weights, v_QSKD.astype(wide))
            return after, total * shrink + jnp.sum(weights, axis=-1), out * shrink[..., None] + part

        shape = q_QKGD.shape[:-1]
        start = (jnp.full(shape, lowest), jnp.zeros(shape, wide), jnp.zeros(q_QKGD.shape, wide))
        if sinks_H is not None:  # seen before anything else
            sinks = lax.dynamic_slice_in_dim(sinks_H, part * own_heads, own_heads)
            top = jnp.broadcast_to(sinks.astype(wide).reshape(own_kv_heads, -1), shape)
            start = (top, jnp.ones(shape, wide), start[2])
        blocks = jnp.min(jnp.maximum(first_Q, 0)) // CONTEXT, jnp.max(last_Q) // CONTEXT + 1
        _, total, out = lax.fori_loop(*blocks, of_block, start)
        out = (out / total[..., None]).astype(q_QHD.dtype).reshape(q_QHD.shape)
        return lax.dynamic_update_slice(out_NHD, out, at)

    return lax.fori_loop(0, _hidden(parts * tiles, q_NHD), of_tile, jnp.zeros_like(q_NHD))[:count]


def paged_attention(
    q_RCHD: jax.Array,
    k_KNPD: jax.Array,
    v_KNPD: jax.Array,
    tables_RW: jax.Array,
    positions_RC: jax.Array,
    rule: reference.Rule = reference.PLAIN,
    sinks_H: jax.Array | None = None,
    parts: int = 1,
) -> jax.Array:
    """`reference.paged_attention`, of heads in parts."""
    (kv_heads, _, size, _), (rows, queries) = k_KNPD.shape, positions_RC.shape

    def context(row_Q: jax.Array, positions: jax.Array, heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        entries = jnp.minimum(positions // size, tables_RW.shape[1] - 1)
        blocks_QS = tables_RW[row_Q][:, entries]
        at = (heads[:, None, None], blocks_QS, positions % size)
        k, v = (jnp.moveaxis(pool[at], 0, 2) for pool in (k_KNPD, v_KNPD))
        return k, v

    last = positions_RC.reshape(-1)
    first = last - rule.window + 1 if rule.window else jnp.zeros_like(last)
    row = jnp.repeat(jnp.arange(rows), queries)
    q = q_RCHD.reshape(-1, *q_RCHD.shape[2:])
    out = _attention(q, first, last, row, context, kv_heads, parts, rule.softcap, sinks_H)
    return out.reshape(q_RCHD.shape)


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: reference.MaskInputs,
    softcap: float,
    sinks: jax.Array | None,
    plain: Callable[..., jax.Array],
    shared: Any,
    parts: int = 1,
) -> jax.Array:
    """`reference.packed_attention`, of heads in parts, for rows in which tokens lie in order (`packed.runs`).

    Args:
      plain: (q, k, v, sinks, shared) -> about the same; the gradient is its own. shared: what it needs besides.
    """
    found, positions = packed.runs(mask), mask.positions
    row = jnp.broadcast_to(jnp.arange(len(positions), dtype=jnp.int32)[:, None], positions.shape)
    # padding sees what begins its run: nothing at all would be no number
    where = found.first, positions, (row, found.own, found.begin, found.prefix)
    flat = jax.tree.map(lambda x: x.reshape(-1), where)

    def exact(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, flat: Any, _: Any) -> jax.Array:
        def context(
            where: tuple[jax.Array, ...], positions: jax.Array, heads: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            row, own, begin, prefix = (x[:, None] for x in where)
            column = jnp.where(positions >= begin, own + positions - begin, prefix + positions)
            at = row[..., None], column[..., None], heads
            return k.at[at].get(mode="clip"), v.at[at].get(mode="clip")

        first, last, where = flat
        q_NHD = q.reshape(-1, *q.shape[2:])
        out = _attention(q_NHD, first, last, where, context, k.shape[2], parts, softcap, sinks)
        return out.reshape(q.shape)

    both = with_gradient_of(lambda q, k, v, sinks, flat, shared: plain(q, k, v, sinks, shared), exact)
    return both(q, k, v, sinks, flat, shared)
