"""The embedding and the vocabulary head in training, split over the mesh.

The head is gathered in the type of its products, and gradients are reduced and split at once in the master type: an
all-gather of narrow numbers and a reduce-scatter per microbatch, where a replicated head costs an all-gather and an
all-reduce of wide ones.

The embedding is not gathered inside a group of neighbours: its devices exchange their tokens, each looks up those among
its rows, and the rows return to the tokens' devices. That moves two numbers per token and feature in place of the whole
table twice, as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Departure: beyond the group tables
are gathered; else the tokens of hundreds of devices would have to fit on one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.models import decoder
from jaxrl.sharding.mesh import entry_axes

GROUP = 8
"""Devices that exchange tokens, at the most: those of a machine, as a rule."""


def group_of(sizes: Sequence[int]) -> Sequence[int]:
    """The leading sizes of an embedding's split axes (major first) that are inside a group."""
    return next(sizes[:n] for n in range(len(sizes), -1, -1) if math.prod(sizes[:n]) <= GROUP)


class Split(NamedTuple):
    """How a weight is split. Hashable. Its functions run inside `shard_map`."""

    dim: int = 0
    axes: tuple[str, ...] = ()  # of the mesh, major first; none: each device has the whole weight

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*[None] * self.dim, self.axes or None)

    def whole(self, weight: jax.Array, dtype: Any) -> jax.Array:
        """The gathered weight in a dtype."""
        narrow = weight.astype(dtype)
        return lax.all_gather(narrow, self.axes, axis=self.dim, tiled=True) if self.axes else narrow

    def shard(self, gradient: jax.Array) -> jax.Array:
        """This device's shard of the sum of all devices' gradients."""
        if not self.axes:
            return gradient
        return lax.psum_scatter(gradient, self.axes, scatter_dimension=self.dim, tiled=True)


def split_of(name: str, shardings: Mapping[str, Any]) -> Split:
    """The split of a weight outside the layers, from the tree of training's shardings."""
    entries = [entry_axes(entry) for entry in shardings[name].spec]
    dim = next((i for i, axes in enumerate(entries) if axes), 0)
    return Split(dim, entries[dim] if entries else ())


class Embedding(NamedTuple):
    """Looks up rows of an embedding [V, E] for the tokens [R, T] of all devices. Hashable."""

    mesh: Mesh
    rows: PartitionSpec  # how tokens are split
    split: Split  # how the table is
    dtype: Any  # of the result
    ordered: bool  # whether the gradient is summed as `add_in_order` does

    @property
    def group(self) -> tuple[str, ...]:
        """The axes over which tokens are exchanged."""
        axes = self.split.axes
        return axes[: len(group_of([self.mesh.shape[axis] for axis in axes]))]

    @property
    def beyond(self) -> Split:
        """How a group's rows of the table are split further."""
        return Split(0, self.split.axes[len(self.group) :])

    def __call__(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        # of the axes over which neither is split, the transpose adds the gradients
        own = jax.shard_map(
            partial(_rows, self),
            mesh=self.mesh,
            in_specs=(self.split.spec, self.rows),
            out_specs=self.rows,
            check_vma=False,
        )
        return own(table, tokens)

    def places(self, tokens: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """(the group's tokens as indices into this device's `size` rows, whether they are there)."""
        if not self.group:
            return tokens, jnp.ones(tokens.shape, bool)
        at = lax.all_gather(tokens, self.group, tiled=True) - lax.axis_index(self.group) * size
        inside = (at >= 0) & (at < size)
        return jnp.where(inside, at, 0), inside


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(how: Embedding, table: jax.Array, tokens: jax.Array) -> jax.Array:
    return _rows_forward(how, table, tokens)[0]


def _rows_forward(how: Embedding, table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    whole = how.beyond.whole(table, how.dtype)
    at, inside = how.places(tokens, len(whole))
    found = jnp.where(inside[..., None], decoder.look_up(whole, at), 0)
    if how.group:  # one device has each row, the others zeros
        found = lax.psum_scatter(found, how.group, tiled=True)
    # an array without numbers carries the vocabulary's size and the master dtype to the backward pass
    return found, (at, inside, jnp.zeros((len(whole), 0), table.dtype))


def _rows_backward(how: Embedding, saved: Any, d_found: jax.Array) -> tuple[jax.Array, None]:
    at, inside, like = saved
    if how.group:
        d_found = lax.all_gather(d_found, how.group, tiled=True)
    d_found = jnp.where(inside[..., None], d_found, 0)
    add = add_in_order if how.ordered else _add
    return how.beyond.shard(add(at, d_found.astype(like.dtype), len(like))), None


def _add(ids: jax.Array, rows: jax.Array, size: int) -> jax.Array:
    return jnp.zeros((size, rows.shape[-1]), rows.dtype).at[ids].add(rows)


def add_in_order(ids: jax.Array, rows: jax.Array, size: int) -> jax.Array:
    """[size, E]: the sums of rows [..., E] of each of ids [...], in the same order in every run.

    A GPU adds rows of one id with atomics, in the order of chance. Here ids are sorted, and the sum of each run of
    equal ones is made by doubling: log2(ids) passes over the rows.
    """
    flat, count = ids.reshape(-1), ids.size
    order = jnp.argsort(flat, stable=True)
    own, sums = flat[order], rows.reshape(count, -1)[order]
    reach = 1
    while reach < count:  # each row holds the sum of the last `reach` rows of its run, itself included
        same = own[reach:] == own[:-reach]
        sums += jnp.pad(jnp.where(same[:, None], sums[:-reach], 0), ((reach, 0), (0, 0)))
        reach *= 2
    is_last = jnp.append(own[1:] != own[:-1], True)
    at = jnp.where(is_last, own, size + jnp.arange(count))  # the others lie outside, each elsewhere: dropped
    # the zeros wait for the sums: XLA would make them with the zeros of the head's gradient, before the backward pass
    zero, sums = lax.optimization_barrier((jnp.zeros((), rows.dtype), sums))
    return jnp.full((size, sums.shape[-1]), zero).at[at].set(sums, mode="drop", unique_indices=True)


_rows.defvjp(_rows_forward, _rows_backward)
