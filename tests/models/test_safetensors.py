"""Hugging Face folders: round trips, shardings, transformers' reading of our exports, and damaged files."""

import json
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import load_model
from jaxrl.models.safetensors import INDEX, SINGLE, export_hf, read_header
from jaxrl.sharding.mesh import make_mesh

from .conftest import TOKENS, lively, scan_logits, tiny_config


def model(family="llama", scaling="none", **changes):
    config = tiny_config(family, scaling, **changes)
    return config, lively(config)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_several_files_with_an_index(tmp_path):
    config, params = model()
    export_hf(params, config, tmp_path, dtype=jnp.float32)
    export_hf(params, config, tmp_path, dtype=jnp.float32, max_file_bytes=30_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert not (tmp_path / SINGLE).exists()
    placed = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert {name for file in files for name in read_header(file)} == set(placed)
    assert_same(load_model(tmp_path)[1], params)


def test_loads_onto_train_shardings(tmp_path):
    config, params = model(hidden_size=64, num_heads=8, num_kv_heads=4)
    export_hf(params, config, tmp_path, dtype=jnp.float32)
    mesh = make_mesh(jax.devices()[:8])
    _, loaded = load_model(tmp_path, mesh)
    assert_same(loaded, params)
    gate, k = loaded["layers"]["gate"], loaded["layers"]["k"]
    assert gate.sharding.spec == PartitionSpec(None, None, ("x0", "x1", "x2"))
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 64, 10)}
    assert k.sharding.spec == PartitionSpec(None, ("x0", "x1", "x2"), None, None), "four heads are too few"
    export_hf(loaded, config, tmp_path / "again", dtype=jnp.float32)
    assert (tmp_path / "again" / SINGLE).read_bytes() == (tmp_path / SINGLE).read_bytes()


def test_transformers_loads_and_writes_back_the_same_tensors(tmp_path, transformers):
    import torch

    config, params = model("qwen2", "llama3")
    export_hf(params, config, tmp_path / "ours", dtype=jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", dtype=torch.float32, output_loading_info=True
        )
        theirs.save_pretrained(tmp_path / "theirs")
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded_config, loaded = load_model(tmp_path / "theirs")
    assert loaded_config == config
    assert_same(loaded, params)


def test_a_model_written_by_transformers_loads(tmp_path, transformers, torch_logits):
    """The common way: random weights that transformers made and wrote, read by us."""
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    ours, params = load_model(tmp_path)
    np.testing.assert_allclose(scan_logits(params, TOKENS, ours), torch_logits(tmp_path, TOKENS), atol=1e-4, rtol=1e-4)


def test_a_head_beside_a_tied_embedding(tmp_path):
    """Files with the same values twice are read, and those that hold the head alone, as transformers reads them."""
    config, params = model(tie_word_embeddings=True)
    untied = replace(config, tie_word_embeddings=False)

    def write(embed, head):
        export_hf(params | {"embed": embed, "lm_head": head.T}, untied, tmp_path, dtype=jnp.float32)
        (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))

    write(params["embed"], params["embed"])
    assert_same(load_model(tmp_path)[1], params)
    tensors = load_file(tmp_path / SINGLE)
    save_file({name: each for name, each in tensors.items() if "embed_tokens" not in name}, tmp_path / SINGLE)
    assert_same(load_model(tmp_path)[1], params)
    write(params["embed"], params["embed"] + np.float32(1e-6) * (np.arange(48) == 7))
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight, though config.json"):
        load_model(tmp_path)


def test_random_weights_do_not_depend_on_the_mesh(tmp_path):
    config, _ = model()
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    loaded_config, alone = load_model(f"random:{tmp_path}", random_init_seed=3)
    _, spread = load_model(f"random:{tmp_path}", make_mesh(), random_init_seed=3)
    assert loaded_config == config == ModelConfig.from_hf(tmp_path)
    assert_same(alone, spread)
    other = load_model(f"random:{tmp_path}")[1]
    assert not np.array_equal(other["embed"], alone["embed"])
