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
from safetensors.numpy import load_file, save_file
from small_models import TRAINED

from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import ALL_LINEAR, Lora, adapters_alone, chosen, with_adapters
from jaxrl.models.peft import CONFIG, TENSORS, export_adapter, load_adapter, merged_params, read_lora
from jaxrl.models.safetensors import export_hf
from jaxrl.sharding.mesh import make_mesh

from .conftest import LORAS, TOKENS, lively, lora_config, scan_logits, tiny_config

DATA = Path(__file__).parent / "data"
OF_PEFT = DATA / "peft-adapter"

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


def test_dropout_is_pefts():
    """An adapter has an input divided by what is kept, or not at all; each row and matrix has its own draw."""
    config = dataclasses.replace(lora_config("llama"), lora=Lora(3, 6.0, ("q", "o", "gate"), dropout=0.25))
    lp = {name: jnp.asarray(x[0]) for name, x in lively(config)["layers"].items()}
    keys = jax.random.split(jax.random.key(0), 2)
    weights = decoder._LayerWeights(lp, jnp.float32, config, False, False, keys)
    ones = jnp.ones((2, 500, 48))
    dropped = weights._dropped(ones, "q")
    assert {*np.unique(np.asarray(dropped)).tolist()} == {0.0, np.float32(1 / 0.75)}
    assert float(jnp.mean(dropped == 0)) == pytest.approx(0.25, abs=0.01)
    for other in (dropped[::-1], weights._dropped(ones, "gate")):
        assert not jnp.array_equal(other, dropped)
    x = jax.random.normal(jax.random.key(1), ones.shape)
    a, b = (lp[f"q_lora_{part}"] for part in "ab")
    wanted = x @ lp["q"].reshape(48, -1) + config.lora.scale * (x * dropped) @ a @ b.reshape(3, -1)
    np.testing.assert_allclose(weights.product(x, "q"), wanted, rtol=1e-4, atol=1e-4)
    plain = weights._replace(keys=None)
    np.testing.assert_array_equal(plain._dropped(x, "q"), x)
    np.testing.assert_array_equal(weights.product(x, "k"), plain.product(x, "k"), "it has no adapter")


def test_adapters_that_peft_has_made(x64: None, tmp_path: Path):
    """Recorded by record_peft.py: matrices chosen by a regular expression, another factor, and a folder of peft's; what
    we write of them is what it had written."""
    base = lora_config("llama").base
    lora = read_lora(OF_PEFT, base)
    assert lora == Lora(3, 5.0, ("q", "o", "gate", "down"), use_rslora=True)
    model = dataclasses.replace(base, lora=lora)
    params = with_adapters(lively(base), load_adapter(OF_PEFT, model, None, np.float64))
    logits = scan_logits(params, TOKENS, model, np.float64)
    with np.load(OF_PEFT / "logits.npz") as file:
        np.testing.assert_allclose(logits[:, ::8], file["logits"], rtol=1e-10, atol=1e-10)
    export_adapter(params, model, tmp_path, np.float32, "base")
    assert read_lora(tmp_path, base) == lora
    ours, theirs = (load_file(folder / TENSORS) for folder in (tmp_path, OF_PEFT))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], x) for name, x in theirs.items())
    assert json.loads((tmp_path / CONFIG).read_text())["base_model_name_or_path"] == "base"


def write_fused(folder: Path, config: ModelConfig, **changes: object) -> dict[str, np.ndarray]:
    """A folder of adapters of a model whose files have several matrices in one tensor, as peft writes it."""
    random, tensors = np.random.default_rng(2), dict[str, np.ndarray]()
    for weight in config.weights()["layers"].values():
        for name in weight.names() if weight.is_linear and "down" not in weight.hf_name else ():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = weight.file_shape
            tensors[f"{module}.lora_A.weight"] = random.normal(size=(3, inputs)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = random.normal(size=(outputs, 3)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / TENSORS, {"format": "pt"})
    modules = ["qkv_proj", "o_proj", "gate_up_proj"]
    content = {"peft_type": "LORA", "r": 3, "lora_alpha": 6.0, "target_modules": modules, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(content | changes))
    return tensors


def test_one_adapter_of_a_tensor_is_one_of_each_matrix_in_it(tmp_path: Path):
    """Merged, each tensor is itself and B times A; written again, the folder is what it was."""
    config = tiny_config("phi3")
    tensors = write_fused(tmp_path / "adapter", config)
    lora = read_lora(tmp_path / "adapter", config)
    assert lora == Lora(3, 6.0, ("q", "k", "v", "o", "gate", "up"))
    model = dataclasses.replace(config, lora=lora)
    base = lively(config)
    params = with_adapters(base, load_adapter(tmp_path / "adapter", model, None, np.float32))
    for name, own in (("base", base), ("merged", merged_params(model, params))):
        export_hf(own, config, tmp_path / name, dtype=np.float32)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert sum(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight" in tensors for name in before) == 6
    for name, matrix in before.items():
        a, b = (tensors.get(f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight") for x in "AB")
        wanted = matrix if a is None or b is None else matrix + 2 * b.astype(np.float64) @ a
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-5)
    export_adapter(params, model, tmp_path / "again", np.float32, "base")
    assert read_lora(tmp_path / "again", config) == lora
    again = load_file(tmp_path / "again" / TENSORS)
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())
    mesh = make_mesh(jax.devices()[:2])
    jax.tree.map(
        np.testing.assert_array_equal,
        load_adapter(tmp_path / "adapter", model, mesh, np.float32),
        adapters_alone(params),
    )


def changed(folder: Path, **changes: object) -> Path:
    folder.joinpath(CONFIG).write_text(json.dumps(json.loads((OF_PEFT / CONFIG).read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("wanted", "excluded", "found"),
    [
        ("all-linear", None, ("q", "k", "v", "o", "gate", "up", "down")),
        (["q_proj", "mlp.down_proj", "c_attn"], [], ("q", "down")),
        (r"model\.layers\.\d+\.mlp\..*", r".*(gate|act).*", ("up", "down")),
        ([f"model.layers.{i}.self_attn.v_proj" for i in range(2)], ["proj"], ("v",)),
    ],
)
def test_modules_of_a_folder(tmp_path: Path, wanted: object, excluded: object, found: tuple[str, ...]):
    folder = changed(tmp_path, target_modules=wanted, exclude_modules=excluded)
    assert read_lora(folder, lora_config("llama").base).targets == found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora True is not supported; adapters must be plain ones"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported; the base must be as"),
        ({"target_modules": ["layers.0.mlp.up_proj"], "exclude_modules": []}, "without model.layers.1.mlp.up_proj"),
        ({"target_modules": "(q"}, "target_modules ('(q') must be a list of names or a regular expression (missing )"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; it must be 'LORA'"),
        ({"target_modules": ["c_attn"]}, "target_modules (['c_attn']) must be names of matrices in this model's la"),
        ({"exclude_modules": [1]}, "exclude_modules ([1]) must be a list of names or a regular expression"),
        ({"r": 0}, "r (0) must be a whole number from 1 to 4096"),
    ],
)
def test_folders_that_ask_for_something_else(tmp_path: Path, changes: dict[str, object], words: str):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read_lora(changed(tmp_path, **changes), lora_config("llama").base)
    assert str(error.value).startswith(str(tmp_path / CONFIG))
