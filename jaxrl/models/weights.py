"""The weights of a decoder, each declared once.

Random initialisation, shardings, loading (safetensors and GGUF), export and padding all derive from this table, so that
a weight's shape, its logical dims and its names in files are written down in one place only.

Logical dims: `vocab`, `embed` (the residual stream), `heads` (query heads), `kv_heads`, `head_dim`, `mlp`, `layers`,
`labels` (the one number of a reward model).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

Init = Literal["normal", "ones", "zeros"]


class Sizes(Protocol):
    """The fields that the table reads of a model config (`jaxrl.models.config.ModelConfig`, a frozen dataclass)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def scalar_head(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the training form.

    Attributes:
      shape: its shape; the weights of layers are stacked on a leading dim.
      dims: the logical dim of each entry of `shape`.
      init: `normal` (standard deviation 0.02), `ones` (norms) or `zeros` (biases).
      hf_name: its name in Hugging Face files; `{layer}` stands for the layer's index.
      gguf_name: its name in GGUF files.
      hf_shape: the shape of one layer's tensor in both kinds of files.
      transpose: files hold matrices as [out, in]; here a matrix is [in..., out...].
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: Init
    hf_name: str
    gguf_name: str
    hf_shape: tuple[int, ...]
    transpose: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), (self.shape, self.dims)
        assert prod(self.hf_shape) == prod(self.layer_shape), (self.shape, self.hf_shape)

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


def leaves(table: dict[str, Any]) -> list[Weight]:
    """Every weight of a table, in the order of declaration."""
    flat = (leaves(value) if isinstance(value, dict) else [value] for value in table.values())
    return [weight for group in flat for weight in group]


def weights(sizes: Sizes) -> dict[str, Any]:
    """The table: the training form's tree with a `Weight` at each leaf."""
    V, E = sizes.vocab_size, sizes.hidden_size
    tree: dict[str, Any] = {
        "embed": Weight((V, E), ("vocab", "embed"), "normal", "model.embed_tokens.weight", "token_embd.weight", (V, E)),
        "layers": _attention(sizes) | _mlp(sizes),
        "final_norm": Weight((E,), ("embed",), "ones", "model.norm.weight", "output_norm.weight", (E,)),
    }
    if sizes.scalar_head:
        tree["score"] = Weight((E, 1), ("embed", "labels"), "normal", "score.weight", "", (1, E), transpose=True)
    elif not sizes.tie_word_embeddings:
        tree["lm_head"] = Weight(
            (E, V), ("embed", "vocab"), "normal", "lm_head.weight", "output.weight", (V, E), transpose=True
        )
    return tree


def _attention(sizes: Sizes) -> dict[str, Weight]:
    E, H, K, D = sizes.hidden_size, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim

    def project_in(heads: int, dim: str, name: str) -> Weight:
        names = (f"self_attn.{name}_proj.weight", f"attn_{name}.weight")
        return _stacked(sizes, (E, heads, D), ("embed", dim, "head_dim"), "normal", names, (heads * D, E))

    def bias(heads: int, dim: str, name: str) -> Weight:
        names = (f"self_attn.{name}_proj.bias", f"attn_{name}.bias")
        return _stacked(sizes, (heads, D), (dim, "head_dim"), "zeros", names, (heads * D,))

    out_names = ("self_attn.o_proj.weight", "attn_output.weight")
    table = {
        "attn_norm": _norm(sizes, E, "embed", "input_layernorm", "attn_norm"),
        "q": project_in(H, "heads", "q"),
        "k": project_in(K, "kv_heads", "k"),
        "v": project_in(K, "kv_heads", "v"),
        "o": _stacked(sizes, (H, D, E), ("heads", "head_dim", "embed"), "normal", out_names, (E, H * D)),
    }
    if sizes.qkv_bias:
        table |= {
            "q_bias": bias(H, "heads", "q"),
            "k_bias": bias(K, "kv_heads", "k"),
            "v_bias": bias(K, "kv_heads", "v"),
        }
    if sizes.qk_norm:
        table |= {
            "q_norm": _norm(sizes, D, "head_dim", "self_attn.q_norm", "attn_q_norm"),
            "k_norm": _norm(sizes, D, "head_dim", "self_attn.k_norm", "attn_k_norm"),
        }
    return table


def _mlp(sizes: Sizes) -> dict[str, Weight]:
    E, F = sizes.hidden_size, sizes.intermediate_size

    def matrix(name: str) -> Weight:
        shape, dims = ((F, E), ("mlp", "embed")) if name == "down" else ((E, F), ("embed", "mlp"))
        return _stacked(sizes, shape, dims, "normal", (f"mlp.{name}_proj.weight", f"ffn_{name}.weight"), shape[::-1])

    return {
        "mlp_norm": _norm(sizes, E, "embed", "post_attention_layernorm", "ffn_norm"),
        "gate": matrix("gate"),
        "up": matrix("up"),
        "down": matrix("down"),
    }


def _norm(sizes: Sizes, size: int, dim: str, *names: str) -> Weight:
    return _stacked(sizes, (size,), (dim,), "ones", (f"{names[0]}.weight", f"{names[1]}.weight"), (size,))


def _stacked(
    sizes: Sizes,
    shape: tuple[int, ...],
    dims: tuple[str, ...],
    init: Init,
    names: tuple[str, str],
    hf_shape: tuple[int, ...],
) -> Weight:
    """A weight of all layers; shape, dims and names (Hugging Face, GGUF) are those of one layer."""
    hf_name, gguf_name = "model.layers.{layer}." + names[0], "blk.{layer}." + names[1]
    shape, dims = (sizes.num_layers, *shape), ("layers", *dims)
    return Weight(shape, dims, init, hf_name, gguf_name, hf_shape, transpose=len(hf_shape) == 2)
