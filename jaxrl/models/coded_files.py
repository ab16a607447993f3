"""Files whose matrices are codes, and the scales that they are multiplied with: in float8 (e4m3fn), or in MXFP4.

Matrices are dequantised when they are loaded; a setting that would change the numbers otherwise is refused.

**Float8.** Two forms of `quantization_config` are read. `quant_method` `fp8` is DeepSeek's and Qwen's, with a scale for
each block of outputs and inputs (`weight_block_size`, DeepSeek-V3 technical report, arXiv:2412.19437, 3.3). Without
blocks it is AutoFP8's, with a scale for each matrix or each output. `compressed-tensors` is llm-compressor's, by
`strategy`: `tensor`, `channel` or `block`.

**MXFP4** as gpt-oss's files have it: two codes of four bits a byte, and for each 32 of them one scale, a power of two.
Source: OCP Microscaling Formats (MX) v1.0, 5.3.3 (codes are E2M1, scales E8M0); the order of the codes is that of
transformers' `integrations/mxfp4.py`, `convert_moe_packed_tensors`. Departure: the scale 255 is NaN, as in OCP; there
it is 2 ** 128.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl.models.fields import MAX_ID, Fields
from jaxrl.schema.declared import shown

if TYPE_CHECKING:
    from jaxrl.models.safetensors import Tensor

_log = logging.getLogger(__name__)

Block = tuple[int | None, int | None]
"""How many outputs and inputs share a scale; None: all."""

FLOAT8 = "F8_E4M3"
SCALES = ("weight_scale_inv", "weight_scale")
OF_ACTIVATIONS = tuple(f".{x}_scale" for x in ("input", "activation", "output", "q", "k", "v"))

_TENSOR, _CHANNEL = (None, None), (1, None)


def read_blocks(fields: Fields) -> tuple[Block, ...]:
    """The blocks that a model's scales may have, from the `quantization_config` of its config.json. Raises ValueError
    for an unsupported form of quantisation."""
    content = fields.get("quantization_config")
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
        case "mxfp4":
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


def _reader(codes: np.ndarray, values: np.ndarray, blocks: tuple[Block, ...]) -> Callable[..., np.ndarray] | None:
    """Reads parts of the matrix [outputs, inputs] that codes and scales make: exact, in float64. None where the shape
    of the scales fits none of `blocks`."""
    values = (values.reshape(-1, 1) if values.ndim < 2 else values).astype(np.float32)

    def fits(block: Block) -> bool:
        sizes = zip(block, codes.shape, strict=True)
        return values.shape == tuple(1 if n is None else -(-size // n) for n, size in sizes)

    block = next(filter(fits, blocks), None)
    if block is None:
        return None

    def read(*part: slice) -> np.ndarray:
        scales, cuts = values, (*part, *(slice(None),) * (2 - len(part)))
        for dim, (size, cut, n) in enumerate(zip(codes.shape, cuts, block, strict=True)):
            scales = scales if n is None else scales.take(np.arange(*cut.indices(size)) // n, axis=dim)
        return codes[cuts].astype(np.float64) * scales

    return read


def _float8(file: Path) -> dict[str, np.ndarray]:
    """The codes of the float8 tensors of an intact file, mapped into memory."""
    content = np.memmap(file, np.uint8, "r")
    start = 8 + int(content[:8].view(np.uint64)[0])
    found: dict[str, np.ndarray] = {}
    for name, entry in json.loads(bytes(content[8:start])).items():
        if "data_offsets" in entry and entry["dtype"] == FLOAT8:  # not of __metadata__
            first, end = entry["data_offsets"]
            found[name] = content[start + first : start + end].view(jnp.float8_e4m3fn).reshape(entry["shape"])
    return found


def scaled(tensors: Mapping[str, Tensor], blocks: tuple[Block, ...], folder: Path) -> dict[str, Tensor]:
    """Joins float8 matrices with their scales."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    if len(found) < len(tensors):
        _log.warning("%s: scales of activations are not used: products are not computed in float8", folder)
    codes: dict[Path, dict[str, np.ndarray]] = {}
    for name, tensor in list(found.items()):
        if tensor.dtype != FLOAT8:
            continue
        where, stem = f"{tensor.file}: tensor {name}", name.removesuffix(".weight")
        names = [each for scale in SCALES if (each := f"{stem}.{scale}") in found]
        if len(names) != 1 or len(tensor.shape) != 2 or found[names[0]].dtype == FLOAT8:
            ends = " or ".join(SCALES)
            raise ValueError(f"{where} is in float8: it must be a matrix with {stem}.{ends} beside it")
        values = found.pop(names[0]).read()
        if tensor.file not in codes:
            codes[tensor.file] = _float8(tensor.file)
        read = _reader(codes[tensor.file][name], values, blocks)
        if read is None:
            raise ValueError(
                f"{where} of shape {tensor.shape} has scales of shape {values.shape}, which is not what "
                "quantization_config says"
            )
        found[name] = replace(tensor, dequantized=read)
    return found


# ---------------------------------------------------------------- MXFP4

MXFP4 = "U8"
MXFP4_BLOCK = 32
"""Values that share a scale."""
_VALUES = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)  # the lower half comes first


class _PackedExperts(NamedTuple):
    """Matrices of experts as two tensors, codes and scales, each with `shape` and `read`."""

    codes: Any
    scales: Any

    @property
    def is_sound(self) -> bool:
        return len(self.codes.shape) == 4 and self.codes.shape == (*self.scales.shape, MXFP4_BLOCK // 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """(experts, inputs, outputs), as gpt-oss computes with them."""
        experts, outputs, groups = self.scales.shape
        return experts, groups * MXFP4_BLOCK, outputs

    def read(self, *part: slice) -> np.ndarray:
        experts, inputs, outputs = (*part, *(slice(None),) * (3 - len(part)))
        start, stop, _ = inputs.indices(self.shape[1])
        first = start // MXFP4_BLOCK
        cut = experts, outputs, slice(first, -(-stop // MXFP4_BLOCK))
        whole = dequantize(self.codes.read(*cut), self.scales.read(*cut))
        return whole[..., start - first * MXFP4_BLOCK : stop - first * MXFP4_BLOCK].swapaxes(-1, -2)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantises to float32 [..., rows, groups * 32]. Codes are [..., rows, groups, 16] uint8 (two a byte, the first
    in the lower half), scales [..., rows, groups] uint8. The result is exact, except that values beyond float32's range
    are infinite. The last dim is the inputs of a product."""
    assert blocks.dtype == scales.dtype == np.uint8, (blocks.dtype, scales.dtype)
    assert blocks.shape == (*scales.shape, MXFP4_BLOCK // 2), (blocks.shape, scales.shape)
    values = _PAIRS[blocks].reshape(*scales.shape, MXFP4_BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scales.view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Joins the two tensors of each matrix in MXFP4."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != MXFP4 or name not in found:
            continue
        stem = name.removesuffix("_blocks").removesuffix("_scales")
        codes, scales, plain = (found.pop(f"{stem}{part}", None) for part in ("_blocks", "_scales", ""))
        there = [each for each in (codes, scales, plain) if each is not None]
        own = None if codes is None or scales is None or plain is not None else _PackedExperts(codes, scales)
        if own is None or not own.is_sound or any(each.dtype != MXFP4 for each in there):
            raise ValueError(
                f"{tensor.file}: tensor {name} is in MXFP4: {stem}_blocks must have four dims, the last of "
                f"{MXFP4_BLOCK // 2}, and {stem}_scales the others, both of dtype {MXFP4} and without {stem}; "
                f"found {', '.join(f'{each.name} {each.dtype} {each.shape}' for each in there)}"
            )
        found[stem] = replace(tensor, name=stem, shape=own.shape, dequantized=own.read)
    return found
