"""Files whose matrices are in float8 (e4m3fn): codes, and the scales that they are multiplied with.

Two forms of `quantization_config` are read. `quant_method` `fp8` is DeepSeek's and Qwen's, with a scale for each block
of outputs and inputs (`weight_block_size`, DeepSeek-V3 technical report, arXiv:2412.19437, 3.3). Without blocks it is
AutoFP8's, with a scale for each matrix or each output. `compressed-tensors` is llm-compressor's, by `strategy`:
`tensor`, `channel` or `block`. Matrices are dequantised when they are loaded; any other setting that would change the
numbers is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxrl.models.fields import MAX_ID, Fields
from jaxrl.schema.declared import shown

if TYPE_CHECKING:
    from jaxrl.models.safetensors import Tensor

_log = logging.getLogger(__name__)

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
        if "data_offsets" in entry and entry["dtype"] == DTYPE:  # not of __metadata__
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
        if tensor.dtype != DTYPE:
            continue
        where, stem = f"{tensor.file}: tensor {name}", name.removesuffix(".weight")
        names = [each for scale in SCALES if (each := f"{stem}.{scale}") in found]
        if len(names) != 1 or len(tensor.shape) != 2 or found[names[0]].dtype == DTYPE:
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
