"""A part of a matrix that is not cut out: under tensor parallelism a kernel reads its own part in place
(`jaxrl.kernels.invariant`)."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import struct


class Part(struct.PyTreeNode):
    """One of the equal parts of a matrix, with the shape of a part.

    Attributes:
      whole: all parts. index: of this one, int32. dim: that is cut. count: of parts.
    """

    whole: jax.Array
    index: Any
    dim: int = struct.field(pytree_node=False)
    count: int = struct.field(pytree_node=False)

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
