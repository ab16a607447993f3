"""Which matrices have adapters, their factor, and the folder that peft reads."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_models import TRAINED

from jaxrl.models import decoder
from jaxrl.models.lora import ALL_LINEAR, Lora, adapters_alone, chosen
from jaxrl.models.peft import CONFIG, TENSORS, export_adapter

from .conftest import LORAS, TOKENS, lively, lora_config, scan_logits

DATA = Path(__file__).parent / "data"

LAYERS = TRAINED.weights()["layers"]


@pytest.mark.parametrize(
    ("targets", "excluded", "found"),
    [
        ([ALL_LINEAR], [], ("q", "k", "v", "o", "gate", "up", "down")),
        ([ALL_LINEAR], ["down_proj", "o_proj"], ("q", "k", "v", "gate", "up")),
        (["v_proj", "q_proj"], [], ("q", "v")),
    ],
)
def test_modules(targets: list[str], excluded: list[str], found: tuple[str, ...]):
    assert chosen(LAYERS, targets, excluded) == found


@pytest.mark.parametrize(
    ("targets", "excluded", "words"),
    [
        (["qkv_proj"], [], "model.target_modules names 'qkv_proj', and the layers of this model have q_proj, k_proj"),
        ([ALL_LINEAR], [ALL_LINEAR], "model.exclude_modules names 'all-linear'"),
        (["q_proj"], ["q_proj"], "leave no matrix"),
    ],
)
def test_modules_that_there_are_not(targets: list[str], excluded: list[str], words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        chosen(LAYERS, targets, excluded)


@pytest.mark.parametrize("family", LORAS)
def test_logits_and_gradients_are_pefts(family: str, x64: None):
    """Recorded by record_peft.py: our base and our adapters, loaded by transformers and peft, in float64."""
    config = lora_config(family)
    with np.load(DATA / f"lora-{family}.npz") as file:
        recorded = dict(file)
    params = jax.tree.map(lambda x: x.astype(np.float64), lively(config))
    logits = np.asarray(scan_logits(params, TOKENS, config, np.float64))
    np.testing.assert_allclose(logits[:, ::8], recorded["logits"], rtol=1e-10, atol=1e-10)
    weight = np.random.default_rng(2).normal(size=logits.shape)

    def total(params):
        return jnp.sum(scan_logits(params, TOKENS, config, np.float64) * weight)

    layers, table = jax.jit(jax.grad(total))(params)["layers"], adapters_alone(config.weights())["layers"]
    for name, declared in table.items():
        expected = recorded[declared.names()[1]]
        found = declared.to_file(np.asarray(layers[name][1]))
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def test_the_factor():
    assert Lora(8, 16.0, ("q",)).scale == 2
    assert Lora(16, 8.0, ("q",), use_rslora=True).scale == 2


def test_a_folder_of_pefts(tmp_path: Path):
    """Each adapter under the name and in the shape that peft gives it: B A is what is added to a matrix in files."""
    model = dataclasses.replace(TRAINED, lora=Lora(3, 6.0, ("q", "o", "down")))
    params = decoder.init(model, jax.random.key(0))
    random = np.random.default_rng(0)
    for name in ("q", "o", "down"):
        b = params["layers"][f"{name}_lora_b"]
        params["layers"][f"{name}_lora_b"] = random.normal(size=b.shape).astype(np.float32)
    export_adapter(params, model, tmp_path, np.float32, "base")
    tensors = load_file(tmp_path / TENSORS)
    assert len(tensors) == 2 * 3 * model.num_layers
    for name, module in (("q", "self_attn.q_proj"), ("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        place = f"base_model.model.model.layers.1.{module}."
        a, b = tensors[place + "lora_A.weight"], tensors[place + "lora_B.weight"]
        weight = model.weights()["layers"][name]
        in_files = 2 * b @ a
        assert in_files.shape == weight.hf_shape
        layer = {each: np.asarray(x[1]) for each, x in params["layers"].items()}
        added = model.merged(name, layer) - layer[name]
        np.testing.assert_allclose(weight.to_file(added), in_files, atol=1e-5)
    content = json.loads((tmp_path / CONFIG).read_text())
    assert (content["r"], content["lora_alpha"], content["base_model_name_or_path"]) == (3, 6.0, "base")
    assert content["target_modules"] == ["q_proj", "o_proj", "down_proj"]
