"""Files whose matrices are in float8 (e4m3fn): codes, and the scales that they are multiplied with.

Two forms of `quantization_config` are read. `quant_method` `fp8` is DeepSeek's and Qwen's, with a scale for each block
of outputs and inputs (`weight_block_size`, DeepSeek-V3 technical report, arXiv:2412.19437, 3.3), or without blocks that
of AutoFP8, with one for a matrix or for each output. `compressed-tensors` is that of llm-compressor, by `strategy`:
`tensor`, `channel` or `block`. The files themselves say which matrices are in float8.

Matrices are dequantised when they are loaded, so scales of activations have no meaning here. Any other setting that
would change the numbers is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.models.fields import MAX_ID, Fields
from jaxrl.schema.declared import shown

Block = tuple[int | None, int | None]
"""How many outputs and inputs share a scale; None: all."""

DTYPE = "F8_E4M3"
SCALES = ("weight_scale_inv", "weight_scale")
OF_ACTIVATIONS = tuple(f".{x}_scale" for x in ("input", "activation", "output", "q", "k", "v"))

_TENSOR, _CHANNEL = (None, None), (1, None)


def read_blocks(fields: Fields) -> tuple[Block, ...]:
    """The blocks that a model's scales may have, from its config.json; () for plain weights. Raises ValueError for
    an unsupported form of quantisation."""
    if (content := fields.get("quantization_config")) is None:
        return ()
    if not isinstance(content, Mapping):
        fields.wrong("quantization_config", "an object")
    own = Fields(content, f"{fields.file}: quantization_config")
    match own.get("quant_method"):
        case "fp8":
            if (form := own.get("fmt", "e4m3")) != "e4m3":
                own.refuse(f"fmt {shown(form)}", "it must be 'e4m3'")
            size = "weight_block_size"
            return (_sizes(own, size),) if own.get(size) is not None else (_TENSOR, _CHANNEL)
        case "compressed-tensors":
            return _of_groups(own)
        case "mxfp4":  # `jaxrl.models.mxfp4`
            return ()
        case other:
            known = "'fp8', 'mxfp4' or 'compressed-tensors'"
            own.refuse(f"quant_method {shown(other)}", f"it must be {known} (or use a GGUF file)")


def _of_groups(own: Fields) -> tuple[Block, ...]:
    if (status := own.get("quantization_status", "compressed")) != "compressed":
        own.refuse(f"quantization_status {shown(status)}", "it must be 'compressed'")
    for name in ("sparsity_config", "transform_config"):
        if (found := own.get(name)) and found != {"format": "dense"}:
            own.refuse(name, "weights must be dense, and as the model computes with them")
    groups = own.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        own.wrong("config_groups", "an object with a group of matrices at least")
    return tuple(dict.fromkeys(_of_group(group, f"{own.file}: config_groups.{name}") for name, group in groups.items()))


def _of_group(group: Any, place: str) -> Block:
    content = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(content, Mapping):
        raise ValueError(f"{place}: weights must be an object, found {shown(content)}")
    weights = Fields(content, f"{place}.weights")
    for key, wanted in (("type", "float"), ("num_bits", 8), ("symmetric", True)):
        if (found := weights.get(key)) != wanted:
            weights.refuse(f"{key} {shown(found)}", f"it must be {wanted!r}")
    match weights.get("strategy"):
        case "tensor":
            return _TENSOR
        case "channel":
            return _CHANNEL
        case "block":
            return _sizes(weights, "block_structure")
        case other:
            weights.refuse(f"strategy {shown(other)}", "it must be 'tensor', 'channel' or 'block'")


def _sizes(own: Fields, name: str) -> Block:
    found = own.get(name)
    if not isinstance(found, list) or len(found) != 2 or not all(type(x) is int and 0 < x <= MAX_ID for x in found):
        own.wrong(name, "two whole numbers above 0: the outputs and the inputs of a block")
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of one matrix, float32 [blocks of outputs, blocks of inputs]."""

    values: np.ndarray
    block: Block

    @classmethod
    def of(cls, values: np.ndarray, shape: tuple[int, ...], blocks: tuple[Block, ...]) -> Scales | None:
        """The scales of a matrix [outputs, inputs] from its file; None where their shape fits none of `blocks`."""
        two = values.reshape(-1, 1) if values.ndim < 2 else values
        for block in blocks:
            if two.shape == tuple(1 if n is None else -(-size // n) for n, size in zip(block, shape, strict=True)):
                return cls(two.astype(np.float32), block)
        return None

    def times(self, codes: np.ndarray, shape: tuple[int, ...], part: tuple[slice, ...]) -> np.ndarray:
        """The numbers of a part of the matrix of this `shape`, from the part's codes: exact, in float64."""
        scales, cuts = self.values, (*part, *(slice(None),) * (len(shape) - len(part)))
        for dim, (size, cut, n) in enumerate(zip(shape, cuts, self.block, strict=True)):
            scales = scales if n is None else scales.take(np.arange(*cut.indices(size)) // n, axis=dim)
        found = codes.astype(np.float64)
        found *= scales
        return found
