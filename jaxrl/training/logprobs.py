"""Log-probabilities and entropies without `[tokens, vocabulary]` logits.

Logits exist for one chunk of tokens at a time, forward and backward; the backward pass computes them again. Tokens with
mask 0 (prompts, padding) are skipped. The others are visited in order, in whole chunks, and the rest in chunks of an
eighth of that size; so less than an eighth of a chunk is wasted.

Source: the derivatives of log-softmax, d lp / d logits = onehot - p, and entropy, dH / d logits = -p (log p + H).
Written by hand (`jax.custom_vjp`) because the number of chunks depends on the mask, and JAX has no reverse mode through
a loop of unknown length; it also saves passes over the logits.

Dims: N tokens of this device, C tokens of a chunk, E embed, V vocabulary, K tokens that a teacher ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.kernels.by_rows import ByRows, at_once, token_logprob
from jaxrl.kernels.reference import operands
from jaxrl.training.vocabulary import Split

DEFAULT_CHUNK = 1024
"""`HeadOptions.chunk` where `actor.logprob_chunk_tokens` is auto and the memory is not known."""

Head = Any
Project = Callable[..., jax.Array]


class HeadOptions(NamedTuple):
    """How logits are computed and used. Hashable.

    `project`: (head parameters, x [C, E]) -> logits [C, V], before the temperature. In tiles it also takes `widen` and
    `by_rows`, and V may be padded with logits of -inf.
    """

    project: Project
    chunk: int  # C, tokens that have their logits at once on a device
    temperature: float  # divides the logits; positive
    entropy_gradient: bool = False  # the entropy is part of the objective; else its gradient is zero and costs nothing
    widen: bool = False  # narrow operands are multiplied as float32, for backends with slow narrow products
    by_rows: ByRows = at_once  # in tiles (`actor.numerics`) log-probabilities are the rollout's
    split: Split = Split()  # of the head's parameters over the mesh

    def whole(self, head: Head, dtype: Any) -> Head:
        """A device's shard as it is multiplied."""
        return jax.tree.map(lambda w: self.split.whole(w, dtype), head)

    def logits(self, head: Head, x: jax.Array) -> jax.Array:
        """[C, V] in at least float32, before the temperature, of a head in x's dtype."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        if self.by_rows is at_once:
            return self.project(*operands(self.widen, (head, x))).astype(wide)
        return self.project(head, x, widen=self.widen, by_rows=self.by_rows).astype(wide)


def token_logprobs(
    options: HeadOptions,
    head: Head,
    hidden: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    mesh: Mesh,
    ids: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Log-probability of each unmasked token, and the entropy of its distribution.

    ([R, T], [R, T]) in at least float32, 0 where masked out. With `ids` also [R, T, K + 1]: their log-probabilities,
    and that of all other tokens together; none is less than `LEAST`.

    Args:
      head: parameters of `options.project`, in the dtype in which their gradient accumulates; split as options say.
      hidden: [R, T, E], final-normed; rows split over all axes of the mesh. Each device handles its own in chunks.
      targets: int32 [R, T], the token that each hidden state predicts. mask: nonzero where the result is wanted.
      ids: int32 [R, T, K], tokens of the vocabulary, each once in a column.
    """
    return _by_rows(options, _chunked, head, hidden, targets, mask, mesh, ids)


def top_logprobs(
    options: HeadOptions,
    head: Head,
    hidden: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    mesh: Mesh,
    top_k: int,
    vocab_size: int,
) -> jax.Array:
    """[R, T, 2 K + 2] where `token_logprobs` has [R, T]. First comes the log-probability of the target, then of each of
    the K = `top_k` likeliest of the first `vocab_size` tokens, then of all others together (`LEAST` or more). The ids
    of the K tokens follow; float32 is exact for ids up to 2^24. Without a gradient."""
    compute = partial(_tops, top_k=top_k, vocab_size=vocab_size)
    return _by_rows(options, compute, head, hidden, targets, mask, mesh, None)


def _by_rows(
    options: HeadOptions,
    compute: Callable[..., Any],
    head: Head,
    hidden: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    mesh: Mesh,
    ids: jax.Array | None,
) -> Any:
    rows = PartitionSpec(mesh.axis_names)

    def local(head: Head, hidden: jax.Array, targets: jax.Array, mask: jax.Array, ids: jax.Array | None) -> Any:
        own = options._replace(chunk=min(options.chunk, targets.size))
        order, count = _wanted_first(mask.reshape(-1) > 0, own.chunk)
        named = None if ids is None else ids.reshape(-1, ids.shape[-1])
        wanted = _Wanted(targets.reshape(-1), order, count, named)
        flat = compute(own, head, hidden.reshape(-1, hidden.shape[-1]), wanted)
        return jax.tree.map(lambda values: values.reshape(*targets.shape, *values.shape[1:]), flat)

    # check_vma off: over axes that do not split the head its cotangent is summed by shard_map's transpose
    specs = (options.split.spec, rows, rows, rows, rows)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(
        head, hidden, targets, mask, ids
    )


class _Wanted(NamedTuple):
    """The tokens of this device. targets: [N]. order, num: of `_wanted_first`. ids: [N, K], or None."""

    targets: jax.Array
    order: jax.Array
    num: jax.Array
    ids: jax.Array | None


def _wanted_first(wanted: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Indices of the wanted tokens, in order, then some out of range, for slices that reach beyond; and their number.
    No index appears twice, so that scatters need no atomics."""
    size = wanted.shape[0]
    padded = size + _last_chunk(chunk)
    place, count = jnp.arange(padded, dtype=jnp.int32), jnp.sum(wanted, dtype=jnp.int32)
    order = jnp.flatnonzero(wanted, size=padded, fill_value=size).astype(jnp.int32)
    return jnp.where(place < count, order, size + place), count


def _forward(options: HeadOptions, head: Head, hidden: jax.Array, wanted: _Wanted) -> tuple[tuple[jax.Array, ...], Any]:
    ids = wanted.ids
    size = hidden.shape[0]
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    whole = narrow_head = options.whole(head, hidden.dtype)
    if options.by_rows is at_once:  # once for all chunks
        narrow_head = operands(options.widen, narrow_head)

    def body(first: jax.Array, length: int, carry: Any) -> Any:
        index, x, target = _take(first, length, hidden, wanted)
        raw = options.logits(narrow_head, x)
        logits = raw / options.temperature
        # exp once for both sums: XLA:CPU took 1.3 s over 1,024 x 49,152 logits, their product included, and now 0.95
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1)
        lse = top[:, 0] + jnp.log(total)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        # padded vocabulary has logits of -inf, so p and its share of the entropy are 0
        entropy = lse - jnp.sum(weights * jnp.maximum(logits, _MIN_LOGIT), axis=-1) / total
        logprob = chosen - lse
        if options.by_rows is not at_once:
            # as data, like the rollout's: a division by a constant may become a product
            temperature = jnp.where(jnp.isnan(x[:, 0]) & (x[:, 0] > 0), 1, options.temperature).astype(wide)
            logprob, lse = options.by_rows(token_logprob, (raw, target, temperature)).T
        values = (logprob, entropy, lse)
        if ids is not None:
            own = ids.at[index].get(mode="fill", fill_value=0)
            values += (_of_ids(logits - lse[:, None], own),)
        return tuple(c.at[index].set(v, mode="drop", unique_indices=True) for c, v in zip(carry, values, strict=True))

    empty = jnp.zeros((size,), wide)
    named = () if ids is None else (jnp.zeros((size, ids.shape[1] + 1), wide),)
    logprobs, entropy, lse, *rest = _loop(wanted.num, options.chunk, body, (empty, empty, empty, *named))
    # arrays without numbers carry the master dtype to the backward pass
    like = jax.tree.map(lambda w: jnp.zeros((0,), w.dtype), head)
    return (logprobs, entropy, *rest), (whole, like, hidden, wanted, lse, entropy)


_MIN_LOGIT = -1e30
_TINY = 1.1754943508222875e-38  # the smallest float32 that is not subnormal
LEAST = math.log(_TINY)
"""The smallest log-probability, so that a KL is finite where one of two models has probability 0."""


def _of_ids(log_p: jax.Array, ids: jax.Array) -> jax.Array:
    """[C, K + 1] of [C, V]: the log-probabilities of `ids` [C, K], and that of all other tokens together."""
    chosen = jnp.take_along_axis(log_p, ids, axis=-1)
    others = jnp.sum(_without(jnp.exp(log_p), ids), axis=-1, keepdims=True)
    return jnp.maximum(jnp.concatenate([chosen, jnp.log(jnp.maximum(others, _TINY))], axis=-1), LEAST)


def _without(p: jax.Array, ids: jax.Array) -> jax.Array:
    return p.at[jnp.arange(len(ids))[:, None], ids].set(0)


def _tops(
    options: HeadOptions, head: Head, hidden: jax.Array, wanted: _Wanted, *, top_k: int, vocab_size: int
) -> jax.Array:
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    narrow_head = operands(options.widen, options.whole(head, hidden.dtype))

    def body(first: jax.Array, length: int, carry: jax.Array) -> jax.Array:
        index, x, target = _take(first, length, hidden, wanted)
        logits = options.project(narrow_head, operands(options.widen, x)).astype(wide) / options.temperature
        log_p = jax.nn.log_softmax(logits, axis=-1)
        own = lax.top_k(log_p[:, :vocab_size], top_k)[1]
        chosen = jnp.take_along_axis(log_p, target[:, None], axis=-1)
        found = jnp.concatenate([chosen, _of_ids(log_p, own), own.astype(wide)], axis=-1)
        return carry.at[index].set(found, mode="drop", unique_indices=True)

    return _loop(wanted.num, options.chunk, body, jnp.zeros((hidden.shape[0], 2 * top_k + 2), wide))


def _backward(options: HeadOptions, saved: Any, cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    whole, like, hidden, wanted, lse, entropy = saved
    ids = wanted.ids
    d_logprobs, d_entropy, *d_named = cotangents
    narrow_head = operands(options.widen, whole)

    def body(first: jax.Array, length: int, carry: Any) -> Any:
        d_head, d_hidden = carry
        index, x, target = _take(first, length, hidden, wanted)
        raw, pull = jax.vjp(options.project, narrow_head, operands(options.widen, x))

        def pick(values: jax.Array) -> jax.Array:
            return values.at[index].get(mode="fill", fill_value=0)[:, None]

        log_p = raw.astype(lse.dtype) / options.temperature - pick(lse)
        p = jnp.exp(log_p)
        onehot = lax.broadcasted_iota(jnp.int32, raw.shape, 1) == target[:, None]
        d_logits = pick(d_logprobs) * (onehot - p)
        if options.entropy_gradient:
            d_logits -= pick(d_entropy) * p * (jnp.maximum(log_p, _MIN_LOGIT) + pick(entropy))
        if ids is not None:
            own, d = (values.at[index].get(mode="fill", fill_value=0) for values in (ids, d_named[0]))
            others = _without(p, own)
            mass = jnp.sum(others, axis=-1, keepdims=True)
            d_rest = jnp.where(mass > _TINY, d[:, -1:], 0.0)  # where there are no others nothing moves them
            d_logits += d_rest / jnp.maximum(mass, _TINY) * others
            d_logits -= p * (jnp.sum(d[:, :-1], axis=-1, keepdims=True) + d_rest)
            d_logits = d_logits.at[jnp.arange(len(own))[:, None], own].add(d[:, :-1])
        # the rows that fill up the last chunk have cotangent 0, but their logits may have any value
        d_logits = jnp.where((index < hidden.shape[0])[:, None], d_logits / options.temperature, 0.0)
        d_head_chunk, d_x = pull(d_logits.astype(raw.dtype))
        d_head = jax.tree.map(lambda total, part: total + part.astype(total.dtype), d_head, d_head_chunk)
        return d_head, d_hidden.at[index].set(d_x.astype(hidden.dtype), mode="drop", unique_indices=True)

    start = (jax.tree.map(lambda w, own: jnp.zeros(w.shape, own.dtype), whole, like), jnp.zeros_like(hidden))
    d_head, d_hidden = _loop(wanted.num, options.chunk, body, start)
    return jax.tree.map(options.split.shard, d_head), d_hidden, None


_chunked = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(0,))
_chunked.defvjp(_forward, _backward)


def _take(first: jax.Array, length: int, hidden: jax.Array, wanted: _Wanted) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The indices, hidden states and targets of a chunk."""
    index = lax.dynamic_slice_in_dim(wanted.order, first, length)
    x, target = (values.at[index].get(mode="fill", fill_value=0) for values in (hidden, wanted.targets))
    return index, x, target


def _loop(count: jax.Array, chunk: int, body: Callable[[jax.Array, int, Any], Any], start: Any) -> Any:
    """`body(first, length, carry)` over `count` tokens: whole chunks, then short ones for the rest."""
    whole, last = count // chunk, _last_chunk(chunk)
    carry = lax.fori_loop(0, whole, lambda i, carry: body(i * chunk, chunk, carry), start)
    rest = (count - whole * chunk + last - 1) // last
    return lax.fori_loop(0, rest, lambda i, carry: body(whole * chunk + i * last, last, carry), carry)


def _last_chunk(chunk: int) -> int:
    return max(1, chunk // 8)
