"""MXFP4 as gpt-oss's files have it: two codes of four bits a byte, and for each 32 of them one scale, a power of two.

Source: OCP Microscaling Formats (MX) v1.0, 5.3.3 (codes are E2M1, scales E8M0); the order of the codes is that of
transformers' `integrations/mxfp4.py`, `convert_moe_packed_tensors`. Departure: the scale 255 is NaN, as in OCP; there
it is 2 ** 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl.models.fields import Fields

DTYPE = "U8"
BLOCK = 32
"""Values that share a scale."""
_VALUES = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)  # the lower half comes first


def is_meant(fields: Fields) -> bool:
    """Whether config.json says that experts are in MXFP4."""
    content = fields.get("quantization_config")
    return isinstance(content, Mapping) and content.get("quant_method") == "mxfp4"


class PackedExperts(NamedTuple):
    """Matrices of experts as two tensors, codes and scales, each with `shape` and `read`."""

    codes: Any
    scales: Any

    @property
    def is_sound(self) -> bool:
        """Whether codes and scales fit each other."""
        return len(self.codes.shape) == 4 and self.codes.shape == (*self.scales.shape, BLOCK // 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """(experts, inputs, outputs), as gpt-oss computes with them."""
        experts, outputs, groups = self.scales.shape
        return experts, groups * BLOCK, outputs

    def read(self, *part: slice) -> np.ndarray:
        """A part, in float32."""
        experts, inputs, outputs = (*part, *(slice(None),) * (3 - len(part)))
        start, stop, _ = inputs.indices(self.shape[1])
        first = start // BLOCK
        cut = experts, outputs, slice(first, -(-stop // BLOCK))
        whole = dequantize(self.codes.read(*cut), self.scales.read(*cut))
        return whole[..., start - first * BLOCK : stop - first * BLOCK].swapaxes(-1, -2)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values of codes [..., rows, groups, 16] uint8 (two a byte, the first in the lower half) and scales [...,
    rows, groups] uint8, as float32 [..., rows, groups * 32]: exact, but for values beyond float32's range, which are
    infinite.

    The last dim is the inputs of a product; the one before it, of gpt-oss's experts, the outputs (transformers'
    parameters have the two the other way round).
    """
    assert blocks.dtype == scales.dtype == np.uint8, (blocks.dtype, scales.dtype)
    assert blocks.shape == (*scales.shape, BLOCK // 2), (blocks.shape, scales.shape)
    values = _PAIRS[blocks].reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scales.view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
    return values.reshape(*scales.shape[:-1], -1)
