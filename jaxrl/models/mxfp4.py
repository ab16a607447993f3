"""MXFP4 as gpt-oss's files have it: two codes of four bits a byte, and for each 32 of them one scale, a power of two.

Source: OCP Microscaling Formats (MX) v1.0, 5.3.3 (codes are E2M1, scales E8M0); the order of the codes is that of
transformers' `integrations/mxfp4.py`, `convert_moe_packed_tensors`. Departure: the scale 255 is NaN, as in OCP; there
it is 2 ** 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxrl.models.safetensors import Tensor

DTYPE = "U8"
BLOCK = 32
"""Values that share a scale."""
_VALUES = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)  # the lower half comes first


class _PackedExperts(NamedTuple):
    """Matrices of experts as two tensors, codes and scales, each with `shape` and `read`."""

    codes: Any
    scales: Any

    @property
    def is_sound(self) -> bool:
        return len(self.codes.shape) == 4 and self.codes.shape == (*self.scales.shape, BLOCK // 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """(experts, inputs, outputs), as gpt-oss computes with them."""
        experts, outputs, groups = self.scales.shape
        return experts, groups * BLOCK, outputs

    def read(self, *part: slice) -> np.ndarray:
        experts, inputs, outputs = (*part, *(slice(None),) * (3 - len(part)))
        start, stop, _ = inputs.indices(self.shape[1])
        first = start // BLOCK
        cut = experts, outputs, slice(first, -(-stop // BLOCK))
        whole = dequantize(self.codes.read(*cut), self.scales.read(*cut))
        return whole[..., start - first * BLOCK : stop - first * BLOCK].swapaxes(-1, -2)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantises to float32 [..., rows, groups * 32]. Codes are [..., rows, groups, 16] uint8 (two a byte, the first
    in the lower half), scales [..., rows, groups] uint8. The result is exact, except that values beyond float32's range
    are infinite. The last dim is the inputs of a product."""
    assert blocks.dtype == scales.dtype == np.uint8, (blocks.dtype, scales.dtype)
    assert blocks.shape == (*scales.shape, BLOCK // 2), (blocks.shape, scales.shape)
    values = _PAIRS[blocks].reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scales.view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Joins the two tensors of each matrix in MXFP4."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != DTYPE or name not in found:
            continue
        stem = name.removesuffix("_blocks").removesuffix("_scales")
        codes, scales, plain = (found.pop(f"{stem}{part}", None) for part in ("_blocks", "_scales", ""))
        there = [each for each in (codes, scales, plain) if each is not None]
        own = None if codes is None or scales is None or plain is not None else _PackedExperts(codes, scales)
        if own is None or not own.is_sound or any(each.dtype != DTYPE for each in there):
            raise ValueError(
                f"{tensor.file}: tensor {name} is in MXFP4: {stem}_blocks must have four dims, the last of "
                f"{BLOCK // 2}, and {stem}_scales the others, both of dtype {DTYPE} and without {stem}; "
                f"found {', '.join(f'{each.name} {each.dtype} {each.shape}' for each in there)}"
            )
        found[stem] = replace(tensor, name=stem, shape=own.shape, dequantized=own.read)
    return found
