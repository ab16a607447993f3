"""Matrices in few bits: bitsandbytes' codes, and what is multiplied is what they stand for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.lora import Lora
from jaxrl.models.quantized import ABSMAX, NF4, dequantize, quantize, quantized_layer

from .conftest import lively, tiny_config

KINDS = ("nf4", "int8")


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_values_are_those_of_bitsandbytes(kind):
    """Recorded by record_bitsandbytes.py; a block of zeros among them."""
    with np.load(Path(__file__).parent / "data" / "bitsandbytes.npz") as file:
        recorded = dict(file)
    assert np.array_equal(np.asarray(NF4, np.float32), recorded["values"])
    codes, magnitudes = quantize(kind, jnp.asarray(recorded["matrix"]))
    assert np.array_equal(magnitudes, recorded[f"{kind}_magnitudes"])
    zeros = slice(32, None) if kind == "nf4" else slice(64, None)
    found, wanted = np.array(codes), recorded[f"{kind}_codes"]
    assert found.dtype == wanted.dtype
    if kind == "nf4":
        # bitsandbytes divides a block of zeros by zero; what it decodes to is zero either way
        found[3, zeros] = wanted[3, zeros]
    assert np.array_equal(found, wanted)
    np.testing.assert_allclose(dequantize(codes, magnitudes), recorded[kind], rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_its_matrices_again(kind):
    """In the decoder's shape, near what they were; what is no matrix is as it was."""
    config = tiny_config("qwen2", hidden_size=64, intermediate_size=128, num_heads=8, num_kv_heads=4, head_dim=16)
    model = dataclasses.replace(config, lora=Lora(2, 4.0, ("q",)), quantization=kind)
    table, plain = model.weights()["layers"], config.weights()["layers"]
    layer = {name: x[1] for name, x in lively(config)["layers"].items()}
    own = quantized_layer(kind, plain, layer)
    for name, x in own.items():
        assert x.shape == table[name].layer_shape, name
        assert not table[name].dtype or x.dtype == table[name].dtype, name
    error = {"nf4": 0.1, "int8": 0.01}[kind]
    for name, weight in plain.items():
        whole = np.asarray(model.whole(name, own))
        off = np.abs(whole - layer[name]).max() / np.abs(layer[name]).max()
        assert 0 < off < 2 * error if weight.transpose else off == 0, name
    assert model.num_params() == dataclasses.replace(model, quantization="none").num_params()
    bits = sum(8 * np.asarray(own[name]).nbytes for name in own if name + ABSMAX in own or name.endswith(ABSMAX))
    numbers = sum(np.prod(weight.layer_shape) for weight in plain.values() if weight.transpose)
    outputs = sum(weight.hf_shape[0] for weight in plain.values() if weight.transpose)
    assert bits / numbers == {"nf4": 4 + 32 / 64, "int8": 8 + 32 * outputs / numbers}[kind]
