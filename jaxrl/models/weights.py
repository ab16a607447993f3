"""A weight of a decoder, as it is declared: once, in the table of `jaxrl.models.config`.

Random initialisation, shardings, loading (safetensors and GGUF), export and padding all derive from that table, so that
a weight's shape, its logical dims and its names in files are written down in one place only.

Logical dims: `vocab`, `embed` (the residual stream), `heads` (query heads), `kv_heads`, `head_dim`, `mlp`, `layers`,
`labels` (the one number of a reward model), `rank` (of an adapter).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Init = Literal["normal", "ones", "less_one", "zeros", "inputs"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the training form.

    Attributes:
      shape: its shape; the weights of layers are stacked on a leading dim.
      dims: the logical dim of each entry of `shape`.
      init: `normal` (standard deviation 0.02), `ones` (norms), `less_one` (norms that multiply by one plus the weight:
        zeros), `zeros` (biases) or `inputs` (uniform, at most one over the square root of the number of inputs:
        adapters).
      hf_name: its name in Hugging Face files; `{layer}` stands for the layer's index.
      gguf_name: its name in GGUF files.
      hf_shape: the shape of one layer's tensor in both kinds of files.
      file_rows: (first, all) where it is some rows of a tensor that holds other weights as well, `hf_shape[0]` from the
        first of all.
      transpose: files hold matrices as [out, in]; here a matrix is [in..., out...].
      dtype: of its numbers; empty: as the others have.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: Init
    hf_name: str
    gguf_name: str
    hf_shape: tuple[int, ...]
    transpose: bool = False
    dtype: str = ""
    file_rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), (self.shape, self.dims)
        assert prod(self.hf_shape) == prod(self.layer_shape), (self.shape, self.hf_shape)

    @property
    def is_norm(self) -> bool:
        """True for what norms multiply by, which has at least float32 where layers compute in less."""
        return self.init in ("ones", "less_one")

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the file's tensor, other weights' rows included."""
        return self.hf_shape if self.file_rows is None else (self.file_rows[1], *self.hf_shape[1:])

    @property
    def stacked(self) -> bool:
        """True when the leading dim counts layers."""
        return self.dims[0] == "layers"

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape without the leading dim of layers."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def num_inputs(self) -> int:
        """The number of leading dims of a layer's matrix that a product sums over; else 0 (norms, embedding)."""
        if not self.transpose:
            return 0
        sizes = self.layer_shape
        return next(n for n in range(1, len(sizes)) if prod(sizes[:n]) == self.hf_shape[1])

    @property
    def outputs_first(self) -> tuple[int, ...]:
        """The permutation that brings a layer's matrix from [in..., out...] to [out..., in...]."""
        order = tuple(range(len(self.layer_shape)))
        return order[self.num_inputs :] + order[: self.num_inputs]

    def names(self, kind: Literal["hf", "gguf"] = "hf") -> list[str]:
        """The names of its tensors in a file: one per layer if it is stacked."""
        name = self.hf_name if kind == "hf" else self.gguf_name
        return [name.format(layer=i) for i in range(self.shape[0])] if self.stacked else [name]

    def from_file(self, read: Callable[..., Any], index: tuple[slice, ...]) -> Any:
        """The part `index` of a layer in the decoder's shape.

        Args:
          read: the part of the file's tensor that slices, one for each of its dims, cut out.
        """
        sizes, shape, inside, cuts = self.layer_shape, list(self.layer_shape), list(index), []
        for first, *rest in self._file_dims:  # the first of them is cut in the file, the others in what was read
            start, stop, _ = index[first].indices(sizes[first])
            shape[first], inside[first] = stop - start, slice(None)
            each = prod(sizes[dim] for dim in rest)
            cuts.append(slice(start * each, stop * each))
        if self.file_rows is not None:
            first = self.file_rows[0]
            cuts[0] = slice(cuts[0].start + first, cuts[0].stop + first)
        tensor = read(*cuts)
        return (tensor.T if self.transpose else tensor).reshape(shape)[tuple(inside)]

    @property
    def _file_dims(self) -> tuple[tuple[int, ...], ...]:
        """The dims of a layer that each dim of a file's tensor holds."""
        order = tuple(range(len(self.layer_shape)))
        if self.transpose:
            return order[self.num_inputs :], order[: self.num_inputs]
        return (order,) if len(self.hf_shape) == 1 else tuple((dim,) for dim in order)

    def to_file(self, array: Any) -> Any:
        """One layer of this weight in the shape that files have."""
        return array.reshape(self.hf_shape[::-1]).T if self.transpose else array.reshape(self.hf_shape)


def leaves(table: dict[str, Any]) -> list[Any]:
    """Every weight of a table, in the order of declaration; or what a tree like one has in their place."""
    flat = (leaves(value) if isinstance(value, dict) else [value] for value in table.values())
    return [weight for group in flat for weight in group]
