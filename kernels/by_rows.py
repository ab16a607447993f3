"""How the functions of a layer, which work on rows of tokens, are computed: all rows at once, or in tiles
(`jaxrl.kernels.invariant`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from jaxrl.kernels import reference

Join = Literal["sum", "vocab"] | tuple[str, ...]
"""How the results of parts are joined: added, in the order of a tree; concatenated in the last dim; or, for a tuple of
results, each concatenated in the last dim but one, where the weight of that name is cut."""


class Part(struct.PyTreeNode):
    """One of the equal parts of a matrix that is not cut out, with the shape of a part: under tensor parallelism a
    kernel reads its own part in place (`jaxrl.kernels.invariant`)."""

    whole: jax.Array  # all parts
    index: Any  # of this one, int32
    dim: int = struct.field(pytree_node=False)  # that is cut
    count: int = struct.field(pytree_node=False)  # of parts

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n // self.count if i == self.dim else n for i, n in enumerate(self.whole.shape))

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    def astype(self, dtype: Any) -> Part:
        return self.replace(whole=self.whole.astype(dtype))

    def reshape(self, inputs: int, outputs: int) -> Part:
        """The same as a matrix of two dims; -1 as usual."""
        own, (first, last) = math.prod(self.shape), (inputs, outputs)
        first, last = (own // last if first == -1 else first), (own // first if last == -1 else last)
        dim = int(self.dim > 0)  # what is cut of several dims of outputs is the first of them
        sizes = (first, last * self.count) if dim else (first * self.count, last)
        return self.replace(whole=self.whole.reshape(sizes), dim=dim)


Multiply = Any
"""`jaxrl.kernels.invariant_pallas.Product`, which a JAX without Pallas on Triton lacks. Hashable."""


class ByRows(Protocol):
    """Calls a function with rows. Hashable."""

    @property
    def multiply(self) -> Multiply | None: ...

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
        """`function(shared, *rows)`. Rows are arrays (or trees of them) with the same leading dims, all dims of the
        first one but its last; so are the results.

        Args:
          join: where `shared`, weights by name, may come in parts (tensor parallelism): the function is then called
            with a part of each weight that has parts, and this joins its results; None: `shared` has no parts.
          heads: whether the first of rows is [..., H, D], and comes in parts too; its leading dims end before H.
          in_kernels: whether the function consists of kernels alone where there are any (`multiply`), whose sums do not
            depend on the number of rows: it then gets all rows at once.
        """
        ...


class AtOnce(NamedTuple):
    """Computes all rows together: `actor.numerics=fast`."""

    multiply: None = None

    def __call__(self, function: Callable[..., Any], rows: tuple[Any, ...], shared: Any = (), **_: Any) -> Any:
        return function(shared, *rows)


at_once = AtOnce()


def with_gradient_of(plain: Callable[..., Any], exact: Callable[..., Any]) -> Callable[..., Any]:
    """`exact`, with the gradient of `plain`, which computes about the same."""

    @jax.custom_vjp
    def run(*arguments: Any) -> Any:
        return exact(*arguments)

    def forward(*arguments: Any) -> tuple[Any, Any]:
        # named, so that a remat policy can keep what the loops give
        return jax.tree.map(lambda x: checkpoint_name(x, reference.ATTENTION), exact(*arguments)), arguments

    def backward(arguments: Any, cotangents: Any) -> Any:
        return jax.vjp(plain, *arguments)[1](cotangents)

    run.defvjp(forward, backward)
    return run


def token_logprob(_: Any, logits: jax.Array, token: jax.Array, temperature: jax.Array) -> jax.Array:
    """[..., 2], log-probability of a token and log-sum-exp, of logits [..., V] divided by temperatures [...]: in one
    array, because a program that needs one of two would have another piece."""
    scaled = logits / temperature[..., None]
    top = jnp.max(scaled, axis=-1, keepdims=True)
    logsumexp = top[..., 0] + jnp.log(jnp.sum(jnp.exp(scaled - top), axis=-1))
    logprob = jnp.take_along_axis(scaled, token[..., None], axis=-1)[..., 0] - logsumexp
    return jnp.stack([logprob, logsumexp], axis=-1)
