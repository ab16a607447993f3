"""A weight of a decoder, declared once, in the table of `jaxrl.models.config`. Random initialisation, shardings,
loading (safetensors and GGUF), export and padding all derive from that table.

Logical dims: `vocab`, `embed` (the residual stream), `heads` (query heads), `kv_heads`, `head_dim`, `mlp`, `layers`,
`experts` (of a mixture), `routes` (a router's outputs: a number for each expert, whole on every device), `labels` (the
one number of a reward model), `rank` (of an adapter).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

Init = Literal["normal", "ones", "less_one", "zeros", "inputs"]
"""`normal` has a standard deviation of 0.02; `less_one` are zeros, of norms that multiply by one plus the weight;
`inputs` are uniform, at most one over the square root of the number of inputs."""


class FileRows(NamedTuple):
    """The outputs of a tensor that belong to a weight: every `step`-th of `all`, from `first` on."""

    first: int
    all: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the training form.

    In its name in files `{layer}` is the layer's index, and `{expert}` the expert's if each has its own tensor; else
    experts are a tensor's first dim. Files hold matrices as [out, in] where `transpose` says so; here a matrix is
    [in..., out...]. Files are those of Hugging Face; `in_gguf` is the same weight in GGUF files.
    """

    shape: tuple[int, ...]  # the weights of layers are stacked on a leading dim
    dims: tuple[str, ...]  # the logical dim of each entry of `shape`
    init: Init
    hf_name: str
    gguf_name: str
    hf_shape: tuple[int, ...]  # of one layer's tensor, or of one expert's part of it
    transpose: bool = False
    dtype: str = ""  # empty: as the others have
    file_rows: FileRows | None = None  # where it is some outputs of a tensor that holds other weights as well

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), (self.shape, self.dims)
        assert prod(self.hf_shape) == prod(self.unit_shape), (self.shape, self.hf_shape)

    @property
    def is_norm(self) -> bool:
        """Whether it is the scale of a norm, which has at least float32 where layers compute in less."""
        return self.init in ("ones", "less_one")

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies vectors: all weights of layers but norms, biases and sinks, and the heads."""
        return self.transpose or (self.has_experts and len(self.unit_shape) == 2)

    @property
    def is_linear(self) -> bool:
        """Whether all tokens are multiplied with it, so that it may have an adapter or be quantised."""
        return self.transpose and not {"experts", "routes"} & {*self.dims}

    @property
    def stacked(self) -> bool:
        return self.dims[0] == "layers"

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape

    @property
    def has_experts(self) -> bool:
        return "experts" in self.dims

    @property
    def num_stacked(self) -> int:
        """How many leading dims count matrices: layers and experts."""
        return self.stacked + self.has_experts

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return self.shape[self.num_stacked :]

    @property
    def num_inputs(self) -> int:
        """How many leading dims of a matrix a product sums over; 0 for norms and the embedding."""
        if not self.is_matrix:
            return 0
        sizes = self.unit_shape
        return next(n for n in range(1, len(sizes)) if prod(sizes[:n]) == self.hf_shape[int(self.transpose)])

    @property
    def outputs_first(self) -> tuple[int, ...]:
        """The permutation of a layer's matrix from [in..., out...] to [out..., in...]; experts and routers keep their
        order."""
        order, inputs = tuple(range(len(self.layer_shape))), self.num_inputs if self.is_linear else 0
        return order[inputs:] + order[:inputs]

    @property
    def in_gguf(self) -> Weight:
        """The same with GGUF's names: there experts' matrices are [out, in] always, in tensors of their own."""
        if not self.has_experts:
            return replace(self, hf_name=self.gguf_name)
        shape = self.hf_shape if self.transpose else self.hf_shape[::-1]
        return replace(self, hf_name=self.gguf_name, hf_shape=shape, transpose=len(shape) == 2, file_rows=None)

    @property
    def each_apart(self) -> bool:
        """Whether each expert has its own tensor in a file."""
        return "{expert}" in self.hf_name

    @property
    def units_per_layer(self) -> int:
        return self.shape[1] if self.each_apart else 1

    def names(self) -> list[str]:
        """The names of its tensors in a file, layer by layer."""
        if not self.stacked:
            return [self.hf_name]
        units = range(self.units_per_layer)
        return [self.hf_name.format(layer=i, expert=x) for i in range(self.shape[0]) for x in units]

    @property
    def _experts_in(self) -> tuple[int, ...]:
        """The leading dim of a tensor that all experts share."""
        return (self.shape[1],) if self.has_experts and not self.each_apart else ()

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the file's tensor, rows of other weights included."""
        shape = list(self.hf_shape)
        if self.file_rows is not None:
            shape[self._outputs_dim] = self.file_rows.all
        return (*self._experts_in, *shape)

    @property
    def _outputs_dim(self) -> int:
        return 0 if self.transpose else -1

    def from_file(self, read: Callable[..., Any], index: tuple[slice, ...]) -> Any:
        """The part `index` of one tensor's weight (a layer's, or an expert's) in the decoder's shape. `read` takes a
        slice for each dim of the file's tensor."""
        lead = len(self._experts_in)
        sizes, shape, inside, cuts = self.unit_shape, list(self.unit_shape), list(index[lead:]), []
        for first, *rest in self._file_dims:  # the first of them is cut in the file, the others in what was read
            start, stop, _ = inside[first].indices(sizes[first])
            shape[first], inside[first] = stop - start, slice(None)
            each = prod(sizes[dim] for dim in rest)
            cuts.append(slice(start * each, stop * each))
        rows, at = self.file_rows, self._outputs_dim
        if rows is not None and cuts:
            start, stop = cuts[at].start * rows.step + rows.first, (cuts[at].stop - 1) * rows.step + rows.first + 1
            cuts[at] = slice(start, max(stop, start))
        tensor = read(*index[:lead], *cuts)
        if rows is not None and rows.step > 1:
            tensor = (
                tensor[..., :: rows.step] if at else tensor[(slice(None),) * lead + (slice(None, None, rows.step),)]
            )
        tensor = tensor.swapaxes(-1, -2) if self.transpose else tensor
        return tensor.reshape(*tensor.shape[:lead], *shape)[(slice(None),) * lead + tuple(inside)]

    @property
    def _file_dims(self) -> tuple[tuple[int, ...], ...]:
        """For each dim of a file's tensor, the dims of a matrix that it holds."""
        order = tuple(range(len(self.unit_shape)))
        if self.transpose:
            return order[self.num_inputs :], order[: self.num_inputs]
        return (order,) if len(self.hf_shape) == 1 else tuple((dim,) for dim in order)

    def unit(self, array: Any, number: int) -> Any:
        """This weight's part of the tensor `names()[number]`, in the decoder's shape."""
        if not self.stacked:
            return array
        layer, expert = divmod(number, self.units_per_layer)
        return array[layer][expert] if self.each_apart else array[layer]

    def to_file(self, array: Any) -> Any:
        """One layer of this weight, or one expert, in the shape of files."""
        lead = array.shape[: array.ndim - len(self.unit_shape)]
        if self.transpose:
            return array.reshape(*lead, *self.hf_shape[::-1]).swapaxes(-1, -2)
        return array.reshape(*lead, *self.hf_shape)

    def place_in_file(self) -> tuple[Any, ...]:
        """The index of this weight in a tensor that it shares with others."""
        if (rows := self.file_rows) is None:
            return (...,)
        own = self.hf_shape[0] if self.transpose or len(self.hf_shape) == 1 else self.hf_shape[-1]
        part = slice(rows.first, rows.first + (own - 1) * rows.step + 1, rows.step)
        behind = (slice(None),) * (len(self.hf_shape) - 1) if self._outputs_dim == 0 else ()
        return (..., part, *behind)


def leaves(table: dict[str, Any]) -> list[Any]:
    """Every weight of a table in the order of declaration, or the leaves of a tree like one."""
    flat = (leaves(value) if isinstance(value, dict) else [value] for value in table.values())
    return [weight for group in flat for weight in group]
