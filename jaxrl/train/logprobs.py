"""Log-probabilities and entropies without `[tokens, vocabulary]` logits.

Logits exist for one chunk of tokens at a time, forward and backward; the backward pass computes them again. Tokens with
mask 0 (prompts, padding) are skipped altogether. The others are visited in order, in as many whole chunks as they fill,
and the rest in chunks of an eighth of that size; so less than an eighth of a chunk is computed in vain.

Source: the derivatives of log-softmax, d lp / d logits = onehot - p, and entropy, dH / d logits = -p (log p + H).
Written by hand (`jax.custom_vjp`) because the number of chunks depends on the mask, and JAX has no reverse mode through
a loop of unknown length; it also spares the passes over the logits that automatic differentiation of the gather and of
the logsumexp would add.

Dims: N tokens of this device, C tokens of a chunk, E embed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.kernels.reference import operands

DEFAULT_CHUNK = 1024
"""`HeadOptions.chunk` where `actor.logprob_chunk_tokens` is auto and the memory is not known."""

Head = Any
Project = Callable[[Head, jax.Array], jax.Array]


class HeadOptions(NamedTuple):
    """How logits are computed and used. Hashable.

    Attributes:
      project: (head parameters, x [C, E]) -> logits [C, V], before the temperature.
      chunk: C, tokens that have their logits at once on a device.
      temperature: divides the logits; positive.
      entropy_gradient: whether the entropy is part of the objective; without it its gradient is zero and costs nothing.
      widen: whether narrow operands are multiplied as float32, for backends with slow narrow products.
    """

    project: Project
    chunk: int
    temperature: float
    entropy_gradient: bool = False
    widen: bool = False


def token_logprobs(
    options: HeadOptions, head: Head, hidden: jax.Array, tokens: jax.Array, mask: jax.Array, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each masked token, and the entropy of the distribution it was drawn from.

    Args:
      options: see `HeadOptions`.
      head: parameters of `options.project`, in the dtype in which their gradient accumulates; replicated.
      hidden: [R, T, E], final-normed; rows split over all axes of the mesh.
      tokens: int32 [R, T].
      mask: [R, T], nonzero where the result is wanted; never at t = 0.
      mesh: each device handles its own rows, in its own number of chunks.

    Returns:
      ([R, T], [R, T]) in at least float32: entry t is about token t, and computed from hidden[t-1]; 0 where masked out.
    """
    rows = PartitionSpec(mesh.axis_names)

    def local(head: Head, hidden: jax.Array, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        wanted = jnp.roll(mask, -1, axis=1).at[:, -1].set(0).reshape(-1) > 0
        targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
        own = options._replace(chunk=min(options.chunk, tokens.size))

        def back(values: jax.Array) -> jax.Array:
            return jnp.roll(values.reshape(tokens.shape), 1, axis=1)

        order, count = _wanted_first(wanted, own.chunk)
        flat: Any = _chunked(own, head, hidden.reshape(-1, hidden.shape[-1]), targets, order, count)
        return back(flat[0]), back(flat[1])

    # check_vma off: the cotangent of the replicated head is summed over the mesh by shard_map's transpose
    return jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), rows, rows, rows), out_specs=(rows, rows), check_vma=False
    )(head, hidden, tokens, mask)


def _wanted_first(wanted: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Indices of the wanted tokens, in order, then some out of range, for slices that reach beyond; and their number.

    No index is there twice, so that scatters need no atomics.
    """
    size = wanted.shape[0]
    padded = size + _last_chunk(chunk)
    place, count = jnp.arange(padded, dtype=jnp.int32), jnp.sum(wanted, dtype=jnp.int32)
    order = jnp.flatnonzero(wanted, size=padded, fill_value=size).astype(jnp.int32)
    return jnp.where(place < count, order, size + place), count


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
    options: HeadOptions, head: Head, hidden: jax.Array, targets: jax.Array, order: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(options, head, hidden, targets, order, count)[0]


def _forward(
    options: HeadOptions, head: Head, hidden: jax.Array, targets: jax.Array, order: jax.Array, count: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    size = hidden.shape[0]
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    narrow_head = operands(options.widen, _cast(head, hidden.dtype))

    def body(first: jax.Array, length: int, carry: Any) -> Any:
        index, x, target = _take(first, length, hidden, targets, order)
        logits = options.project(narrow_head, operands(options.widen, x)).astype(wide) / options.temperature
        # exp once for both sums: XLA:CPU took 1.3 s over 1,024 x 49,152 logits, their product included, and now 0.95
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1)
        lse = top[:, 0] + jnp.log(total)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        # padded vocabulary has logits of -inf, so p and its share of the entropy are 0
        entropy = lse - jnp.sum(weights * jnp.maximum(logits, _MIN_LOGIT), axis=-1) / total
        values = (chosen - lse, entropy, lse)
        return tuple(c.at[index].set(v, mode="drop", unique_indices=True) for c, v in zip(carry, values, strict=True))

    empty = jnp.zeros((size,), wide)
    logprobs, entropy, lse = _loop(count, options.chunk, body, (empty, empty, empty))
    return (logprobs, entropy), (head, hidden, targets, order, count, lse, entropy)


_MIN_LOGIT = -1e30


def _backward(options: HeadOptions, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    head, hidden, targets, order, count, lse, entropy = saved
    d_logprobs, d_entropy = cotangents
    narrow_head = operands(options.widen, _cast(head, hidden.dtype))

    def body(first: jax.Array, length: int, carry: Any) -> Any:
        d_head, d_hidden = carry
        index, x, target = _take(first, length, hidden, targets, order)
        raw, pull = jax.vjp(options.project, narrow_head, operands(options.widen, x))

        def pick(values: jax.Array) -> jax.Array:
            return values.at[index].get(mode="fill", fill_value=0)[:, None]

        log_p = raw.astype(lse.dtype) / options.temperature - pick(lse)
        p = jnp.exp(log_p)
        onehot = lax.broadcasted_iota(jnp.int32, raw.shape, 1) == target[:, None]
        d_logits = pick(d_logprobs) * (onehot - p)
        if options.entropy_gradient:
            d_logits -= pick(d_entropy) * p * (jnp.maximum(log_p, _MIN_LOGIT) + pick(entropy))
        # the rows that fill up the last chunk have cotangent 0, but their logits may have any value
        d_logits = jnp.where((index < hidden.shape[0])[:, None], d_logits / options.temperature, 0.0)
        d_head_chunk, d_x = pull(d_logits.astype(raw.dtype))
        d_head = jax.tree.map(lambda total, part: total + part.astype(total.dtype), d_head, d_head_chunk)
        return d_head, d_hidden.at[index].set(d_x.astype(hidden.dtype), mode="drop", unique_indices=True)

    start = (jax.tree.map(jnp.zeros_like, head), jnp.zeros_like(hidden))
    d_head, d_hidden = _loop(count, options.chunk, body, start)
    return d_head, d_hidden, None, None, None


_chunked.defvjp(_forward, _backward)


def _take(
    first: jax.Array, length: int, hidden: jax.Array, targets: jax.Array, order: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    index = lax.dynamic_slice_in_dim(order, first, length)
    return index, hidden.at[index].get(mode="fill", fill_value=0), targets.at[index].get(mode="fill", fill_value=0)


def _loop(count: jax.Array, chunk: int, body: Callable[[jax.Array, int, Any], Any], start: Any) -> Any:
    """`body(first, length, carry)` over `count` tokens: whole chunks, then short ones for the rest."""
    whole, last = count // chunk, _last_chunk(chunk)
    carry = lax.fori_loop(0, whole, lambda i, carry: body(i * chunk, chunk, carry), start)
    rest = (count - whole * chunk + last - 1) // last
    return lax.fori_loop(0, rest, lambda i, carry: body(whole * chunk + i * last, last, carry), carry)


def _last_chunk(chunk: int) -> int:
    return max(1, chunk // 8)


def _cast(head: Head, dtype: Any) -> Head:
    return jax.tree.map(lambda w: w.astype(dtype), head)
