"""Folders with matrices in float8: every number is code times scale, rounded once, however the matrix is cut."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import load_layerwise, load_model
from jaxrl.models.safetensors import SINGLE, export_hf
from jaxrl.sharding.mesh import make_mesh

from .conftest import lively, tiny_config

WEIGHTS = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
TOKEN = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}


def group(strategy: str, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": WEIGHTS | {"strategy": strategy} | more, "input_activations": TOKEN}


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"},
        **{"config_groups": {f"group_{i}": each for i, each in enumerate(groups)}, "ignore": ["lm_head"], **more},
    }


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 24]}
FORMS: dict[str, tuple[dict[str, Any], str, tuple[int, int] | None]] = {
    "blocks": (BLOCKS, "weight_scale_inv", (16, 24)),
    "fp8, one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", None),
    "fp8, one for each output": ({"quant_method": "fp8"}, "weight_scale_inv", (1, 10**6)),
    "tensor": (compressed(group("tensor")), "weight_scale", None),
    "channel": (compressed(group("channel")), "weight_scale", (1, 10**6)),
    "block": (compressed(group("block", block_structure=[8, 40])), "weight_scale", (8, 40)),
    "tensor beside channel": (compressed(group("tensor"), group("channel")), "weight_scale", (1, 10**6)),
}


def narrow(x: float) -> float:
    """The bfloat16 nearest to a number; between two, the one whose last bit is zero."""
    near = int(np.asarray(x, np.float32).view(np.uint32)) >> 16
    codes = range(max(near - 1, 0), near + 2)
    around = [float(np.asarray(code << 16, np.uint32).view(np.float32)) for code in codes]
    return min((abs(found - x), code & 1, found) for code, found in zip(codes, around, strict=True))[2]


def write(
    folder: Path, form: str, family: str = "llama", change: Callable[[Any], Any] = len, **sizes: Any
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """A folder whose layers' matrices are in float8; and what its tensors stand for, in float64. `change` is given the
    tensors before they are written."""
    content, scale_name, block = FORMS[form]
    config = tiny_config(family, **sizes)
    export_hf(lively(config), config, folder, dtype=jnp.float32)
    tensors, stand_for = load_file(folder / SINGLE), {}
    random = np.random.default_rng(3)
    for name, x in list(tensors.items()):
        stand_for[name] = x.astype(np.float64)
        if ".layers." not in name or x.ndim != 2:
            continue
        rows, columns = block or x.shape
        shape = () if block is None else (-(-x.shape[0] // rows), -(-x.shape[1] // columns))
        scales = np.asarray(
            random.uniform(1e-4, 1e-2, shape), np.float32 if "scale_inv" in scale_name else jnp.bfloat16
        )
        codes = random.normal(0, 30, x.shape).astype(ml_dtypes.float8_e4m3fn)
        stem = name.removesuffix("weight")
        tensors |= {name: codes, stem + scale_name: scales}
        for (i, j), code in np.ndenumerate(codes):
            scale = scales if block is None else scales[i // rows, j // columns]
            stand_for[name][i, j] = float(code) * float(scale)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": content}
    (folder / "config.json").write_text(json.dumps(written))
    return config, stand_for


def in_files(config: ModelConfig, params: Any, folder: Path, dtype: Any) -> dict[str, np.ndarray]:
    export_hf(params, config, folder, dtype=dtype)
    return load_file(folder / SINGLE)


@pytest.mark.parametrize("form", FORMS)
def test_every_number_is_a_code_times_its_scale(form, tmp_path):
    config, stand_for = write(tmp_path / "m", form)
    found, params = load_model(tmp_path / "m")
    assert found == config
    for name, x in in_files(config, params, tmp_path / "f32", jnp.float32).items():
        assert np.array_equal(x, stand_for[name].astype(np.float32)), name
    _, params = load_model(tmp_path / "m", dtype=jnp.bfloat16)
    for name, x in in_files(config, params, tmp_path / "bf16", jnp.bfloat16).items():
        if ".layers." in name and x.ndim == 2:
            assert np.array_equal(x.astype(np.float64), np.vectorize(narrow)(stand_for[name])), name
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())


@pytest.mark.parametrize(("form", "family"), [("channel", "qwen3"), ("block", "phi3"), ("blocks", "qwen3_moe")])
def test_each_device_has_its_part_of_the_same_numbers(form, family, tmp_path):
    """Cuts of blocks included, and of tensors that hold several matrices; and layer by layer."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 4}
    if family == "qwen3_moe":  # the matrices of each expert, too
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "qk_norm": True}
    config, stand_for = write(tmp_path / "m", form, family, **sizes)
    mesh = make_mesh(jax.devices()[:8])
    _, params = load_model(tmp_path / "m", mesh)
    for name, x in in_files(config, params, tmp_path / "again", jnp.float32).items():
        assert np.array_equal(x, stand_for[name].astype(np.float32)), name
    _, outer, layers = load_layerwise(tmp_path / "m", mesh)
    for i, layer in enumerate(layers):
        jax.tree.map(np.testing.assert_array_equal, layer, jax.tree.map(lambda x, i=i: x[i : i + 1], params["layers"]))
    jax.tree.map(np.testing.assert_array_equal, outer, {name: params[name] for name in outer})


def test_scales_of_activations_are_left_out_with_a_line(tmp_path, caplog):
    config, _ = write(tmp_path, "tensor")
    _, before = load_model(tmp_path)
    assert not caplog.records
    more = {"self_attn.q_proj.input_scale": (), "self_attn.k_scale": (1,), "mlp.up_proj.output_scale": ()}
    of_activations = {f"model.layers.1.{name}": np.ones(shape, np.float32) for name, shape in more.items()}
    write(tmp_path, "tensor", change=lambda x: x.update(of_activations))
    with caplog.at_level(logging.WARNING):
        found, params = load_model(tmp_path)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, params, before)
    (record,) = caplog.records
    assert "scales of activations are not used" in record.getMessage()


UP = "model.layers.0.mlp.up_proj"
IN_BLOCKS = f"{UP}.weight_scale_inv"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda x: x.pop(IN_BLOCKS),
            f"tensor {UP}.weight is in float8: it must be a matrix with {UP}.weight_scale_inv or weight_scale",
        ),
        (
            lambda x: x.update({IN_BLOCKS: x[IN_BLOCKS][:1]}),
            f"tensor {UP}.weight of shape (80, 48) has scales of shape (1, 2), which is not what quantization_config",
        ),
        (
            lambda x: x.update({f"{UP}.weight_zero_point": np.zeros((5, 2), np.float32)}),
            f"tensor {UP}.weight_zero_point of shape (5, 2) has no place in a model of this config",
        ),
    ],
)
def test_damaged_files_are_refused_with_the_tensor(how, message, tmp_path):
    write(tmp_path, "blocks", change=how)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported; it must be 'e4m3'"),
        (BLOCKS | {"weight_block_size": [128]}, "weight_block_size ([128]) must be two whole numbers above 0"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not supported; weights must"),
        (compressed(), "config_groups ({}) must be an object with a group of matrices at least"),
        (compressed(group("token")), "config_groups.group_0.weights: strategy 'token' is not supported; it must be"),
        ({"quant_method": "awq"}, "quant_method 'awq' is not supported; it must be 'fp8', 'mxfp4' or 'compressed-"),
        (compressed(group("tensor", num_bits=4)), "config_groups.group_0.weights: num_bits 4 is not supported"),
    ],
)
def test_other_quantisation_is_refused_by_name(content, message):
    with pytest.raises(ValueError, match=re.escape(f"config: quantization_config: {message}")):
        ModelConfig.from_hf(tiny_config("llama").to_hf() | {"quantization_config": content})
