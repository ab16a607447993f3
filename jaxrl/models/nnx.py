"""A loaded model as a Flax NNX module, and back: for code that takes `nnx` states (MaxText, Tunix, NNX's optimizers).

Needs `jaxrl[flax]`. The weights have the training form (`jaxrl.models.config`), with its names and shardings; nothing
is copied.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.kernels.reference import MaskInputs, packed_attention
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig


class Decoder(nnx.Module):
    """A language model with its weights as variables of the type `nnx.Param`.

    Example::

        model = Decoder(*load_model("model"))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param)
        ...
        params = model.tree()  # for `jaxrl.text.TextEngine`, `jaxrl.models.safetensors.export_hf`, `jaxrl.sharding`

    Attributes:
      config: the model's.
      dtype: of the computation.
      weights: nested `nnx.Dict`, as the training form nests them.
    """

    def __init__(self, config: ModelConfig, params: dict[str, Any], dtype: Any = jnp.float32) -> None:
        """`params`: in training form, as `jaxrl.models.loading.load_model` returns them."""
        self.config, self.dtype = config, dtype
        self.weights = _modules(params)

    def __call__(self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """Logits [B, T, V] in at least float32.

        Args:
          tokens_BT: int32.
          mask_BT: whether a token counts; padding may stand on either side. None: all do.
        """
        counts = jnp.ones(tokens_BT.shape, jnp.int32) if mask_BT is None else mask_BT.astype(jnp.int32)
        positions = jnp.maximum(jnp.cumsum(counts, axis=-1) - 1, 0) * counts
        windows = jnp.asarray([kind.window or 2**30 for kind in self.config.kinds])

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *more: Any) -> jax.Array:
            *kind, sinks = more if self.config.attention_sinks else (*more, None)
            mask = MaskInputs(counts, positions, counts, positions - windows[kind[0] if kind else 0] + 1)
            return packed_attention(q, k, v, mask, self.config.attn_logit_softcapping, sinks)

        params = self.tree()
        hidden = decoder.forward_scan(params, tokens_BT, positions, attend, self.config, dtype=self.dtype)
        return decoder.logits(params, hidden, self.config)

    def tree(self) -> dict[str, Any]:
        """The weights as nested dicts of arrays, in training form."""
        return nnx.to_pure_dict(nnx.state(self.weights, nnx.Param))


def _modules(tree: dict[str, Any]) -> nnx.Dict:
    return nnx.Dict({name: _modules(x) if isinstance(x, dict) else nnx.Param(x) for name, x in tree.items()})
