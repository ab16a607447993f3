"""MXFP4: every code with every scale, against the values that the standard's tables give."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models.coded_files import MXFP4_BLOCK, dequantize
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init
from jaxrl.models.loading import load_model
from jaxrl.models.safetensors import export_hf
from jaxrl.sharding.mesh import make_mesh

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP MX v1.0, table 5; the fourth bit is the sign


def value(code: int, scale: int) -> float:
    return (-1) ** (code >> 3) * MAGNITUDES[code & 7] * 2.0 ** (scale - 127)


def test_every_code_with_every_scale():
    """In both halves of a byte: row s has the scale s, group by group another pair of codes at each place."""
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)  # [256 rows, 16 groups]
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (256, 16, 16))
    found = dequantize(blocks, scales)
    assert found.dtype == np.float32
    assert found.shape == (256, 16 * MXFP4_BLOCK)
    for scale in range(255):
        wanted = [value(code, scale) for byte in range(256) for code in (byte & 15, byte >> 4)]
        with np.errstate(over="ignore"):
            narrow = np.asarray(wanted, np.float32)
        assert np.array_equal(found[scale], narrow), scale
        assert np.array_equal(np.signbit(found[scale]), np.signbit(narrow)), scale
        assert scale > 252 or np.array_equal(found[scale].astype(np.float64), wanted), scale  # exact, not rounded
    assert np.isnan(found[255]).all()


GPT_OSS = {
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 61, "num_hidden_layers": 2},
    **{"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "max_position_embeddings": 128},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def write_packed(folder: Path, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """A folder as gpt-oss's are: experts' matrices in two tensors, all else plain; returns the matrices by name."""
    config, random = ModelConfig.from_hf(GPT_OSS), np.random.default_rng(3)
    export_hf(init(config, jax.random.key(0)), config, folder, dtype=np.float32)
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // MXFP4_BLOCK, 16), dtype=np.uint8)
        scales = random.integers(118, 124, (experts, outputs, inputs // MXFP4_BLOCK), dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        found[name] = dequantize(blocks, scales).swapaxes(-1, -2)
    tensors = {name: x for name, x in (tensors | changes).items() if x is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    content = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(content))
    return found


def test_a_folder_of_gpt_oss(tmp_path):
    matrices = write_packed(tmp_path)
    config, params = load_model(tmp_path, make_mesh(jax.devices()[:8]))
    assert config == ModelConfig.from_hf(GPT_OSS)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        own = {name: np.asarray(x[layer]) for name, x in params["layers"].items()}
        np.testing.assert_array_equal(own["down"], matrices[f"{at}.down_proj"])
        np.testing.assert_array_equal(own["gate"], matrices[f"{at}.gate_up_proj"][..., ::2])
        np.testing.assert_array_equal(own["up"], matrices[f"{at}.gate_up_proj"][..., 1::2])
    export_hf(params, config, tmp_path / "plain", dtype=np.float32)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "plain")[1], params)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.layers.1.mlp.experts.down_proj_scales": None},
        {"model.layers.1.mlp.experts.down_proj_scales": np.zeros((4, 64, 2), np.uint8)},
        {"model.layers.1.mlp.experts.down_proj": np.ones((4, 32, 64), np.float32)},
    ],
)
def test_what_is_no_matrix_or_two_is_refused(changes, tmp_path):
    write_packed(tmp_path, **changes)
    said = r"safetensors: tensor model.layers.1.mlp.experts.down_proj_\w+ is in MXFP4: .*; found "
    with pytest.raises(ValueError, match=said):
        load_model(tmp_path)
