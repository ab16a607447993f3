"""The weights of a decoder, each declared once.

Random initialisation, shardings, loading (safetensors and GGUF), export and padding all derive from this table, so that
a weight's shape, its logical dims and its names in files are written down in one place only.

Logical dims: `vocab`, `embed` (the residual stream), `heads` (query heads), `kv_heads`, `head_dim`, `mlp`, `layers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxrl.models.config import ModelConfig


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
    init: Literal["normal", "ones", "zeros"]
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
    def layer_dims(self) -> tuple[str, ...]:
        """The dims without the leading dim of layers."""
        return self.dims[1:] if self.stacked else self.dims

    @property
    def num_inputs(self) -> int:
        """How many leading dims of a layer's matrix a product sums over; 0 for norms, biases and the embedding."""
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
        """Its tensors' names in a file, one per layer where it is stacked."""
        name = self.hf_name if kind == "hf" else self.gguf_name
        return [name.format(layer=i) for i in range(self.shape[0])] if self.stacked else [name]

    def from_file(self, tensor: Any) -> Any:
        """A file's tensor in the decoder's shape, as a view."""
        return (tensor.T if self.transpose else tensor).reshape(self.layer_shape)

    def to_file(self, array: Any) -> Any:
        """One layer of this weight in the shape that files have."""
        return array.reshape(self.hf_shape[::-1]).T if self.transpose else array.reshape(self.hf_shape)


def leaves(table: dict[str, Any]) -> list[Weight]:
    """Every weight of a table, in the order of declaration."""
    flat = (leaves(value) if isinstance(value, dict) else [value] for value in table.values())
    return [weight for group in flat for weight in group]


def weights(config: ModelConfig) -> dict[str, Any]:
    """The table: the training form's tree with a `Weight` at each leaf."""
    V, E, F = config.vocab_size, config.hidden_size, config.intermediate_size
    H, K, D, L = config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers

    def stack(
        shape: tuple[int, ...],
        dims: tuple[str, ...],
        init: Literal["normal", "ones", "zeros"],
        names: tuple[str, str],
        hf_shape: tuple[int, ...],
    ) -> Weight:
        hf_name, gguf_name = "model.layers.{layer}." + names[0], "blk.{layer}." + names[1]
        return Weight((L, *shape), ("layers", *dims), init, hf_name, gguf_name, hf_shape, len(hf_shape) == 2)

    def norm(size: int, dim: str, *names: str) -> Weight:
        return stack((size,), (dim,), "ones", (f"{names[0]}.weight", f"{names[1]}.weight"), (size,))

    def project_in(heads: int, dim: str, name: str) -> Weight:
        names = (f"self_attn.{name}_proj.weight", f"attn_{name}.weight")
        return stack((E, heads, D), ("embed", dim, "head_dim"), "normal", names, (heads * D, E))

    def bias(heads: int, dim: str, name: str) -> Weight:
        names = (f"self_attn.{name}_proj.bias", f"attn_{name}.bias")
        return stack((heads, D), (dim, "head_dim"), "zeros", names, (heads * D,))

    def mlp(name: str) -> Weight:
        shape, dims = ((F, E), ("mlp", "embed")) if name == "down" else ((E, F), ("embed", "mlp"))
        return stack(shape, dims, "normal", (f"mlp.{name}_proj.weight", f"ffn_{name}.weight"), shape[::-1])

    layers = {
        "attn_norm": norm(E, "embed", "input_layernorm", "attn_norm"),
        "q": project_in(H, "heads", "q"),
        "k": project_in(K, "kv_heads", "k"),
        "v": project_in(K, "kv_heads", "v"),
        "o": stack(
            (H, D, E),
            ("heads", "head_dim", "embed"),
            "normal",
            ("self_attn.o_proj.weight", "attn_output.weight"),
            (E, H * D),
        ),
    }
    if config.qkv_bias:
        layers |= {
            "q_bias": bias(H, "heads", "q"),
            "k_bias": bias(K, "kv_heads", "k"),
            "v_bias": bias(K, "kv_heads", "v"),
        }
    if config.qk_norm:
        layers |= {
            "q_norm": norm(D, "head_dim", "self_attn.q_norm", "attn_q_norm"),
            "k_norm": norm(D, "head_dim", "self_attn.k_norm", "attn_k_norm"),
        }
    layers |= {
        "mlp_norm": norm(E, "embed", "post_attention_layernorm", "ffn_norm"),
        "gate": mlp("gate"),
        "up": mlp("up"),
        "down": mlp("down"),
    }
    tree: dict[str, Any] = {
        "embed": Weight((V, E), ("vocab", "embed"), "normal", "model.embed_tokens.weight", "token_embd.weight", (V, E)),
        "layers": layers,
        "final_norm": Weight((E,), ("embed",), "ones", "model.norm.weight", "output_norm.weight", (E,)),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = Weight(
            (E, V), ("embed", "vocab"), "normal", "lm_head.weight", "output.weight", (V, E), transpose=True
        )
    return tree
