"""Muon: each matrix of each layer against a loop in NumPy; sharded, resumed, with adapters."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from drawn_models import draw
from small_models import TRAINED
from trainer_fixtures import LONG, WIDE, distance

from jaxrl.config import OptimSection
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.training import optimizer as optimizers

BIASED = dataclasses.replace(TRAINED, qkv_bias=True, family="qwen2", tie_word_embeddings=False)
# by how many dims a product sums over
MATRICES = {"q": 1, "k": 1, "v": 1, "o": 2, "router": 1, "gate": 1, "up": 1, "down": 1}


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Five steps of Newton and Schulz, of a matrix divided by its norm (Jordan et al. 2024)."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    x, wide = (x, True) if x.shape[0] <= x.shape[1] else (x.T, False)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.T


MIXTURE = ModelConfig.from_hf(draw("gpt_oss", 2) | {"vocab_size": 64})


@pytest.mark.parametrize("model", [BIASED, MIXTURE], ids=lambda model: model.family)
def test_muon_by_hand(model, x64):
    """Every matrix of a layer, or of an expert, is orthogonalised for itself, over all its inputs and outputs; biases,
    norms, embedding and head have AdamW."""
    optim = OptimSection(name="muon", lr=0.1, weight_decay=0.02, momentum=0.9, beta1=0.8, beta2=0.99)
    optimizer = optimizers.build(optim, 0.0, weights=model.weights())
    params = jax.tree.map(np.asarray, decoder.init(model, jax.random.key(0), "float64"))
    state, random = optimizer.chain.init(params), np.random.default_rng(0)
    paths = {optimizers.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    expected = {name: x.copy() for name, x in paths.items()}
    first, second = ({name: np.zeros_like(x) for name, x in paths.items()} for _ in range(2))
    seen = set()
    for t in (1, 2, 3):
        gradients = jax.tree.map(lambda x: random.normal(size=x.shape), params)
        params, state, _ = jax.jit(optimizer.update)(gradients, state, params)
        assert optimizers.update_count(state) == t
        for path, g in jax.tree_util.tree_leaves_with_path(gradients):
            name = optimizers.path_name(path)
            inputs = MATRICES.get(name.removeprefix("layers/")) if name.startswith("layers/") else None
            if inputs is None:
                first[name] = 0.8 * first[name] + 0.2 * g
                second[name] = 0.99 * second[name] + 0.01 * g**2
                step = first[name] / (1 - 0.8**t) / (np.sqrt(second[name] / (1 - 0.99**t)) + 1e-8)
            else:
                seen.add(name)
                first[name] = 0.9 * first[name] + 0.1 * g
                ahead = 0.9 * first[name] / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t)
                step = np.zeros_like(g)
                lead = 1 + (model.num_experts > 0 and name in ("layers/gate", "layers/up", "layers/down"))
                for at in np.ndindex(ahead.shape[:lead]):
                    matrix = ahead[at]
                    rows = int(np.prod(matrix.shape[:inputs]))
                    flat = orthogonalised(matrix.reshape(rows, -1))
                    step[at] = (0.2 * np.sqrt(max(flat.shape)) * flat).reshape(matrix.shape)
            expected[name] = expected[name] - 0.1 * (step + 0.02 * expected[name])
    assert seen == {f"layers/{name}" for name in MATRICES if name != "router" or model.num_experts}
    for path, found in jax.tree_util.tree_leaves_with_path(params):
        # optax keeps the coefficients of the steps as they were at the start, in float32 or better
        np.testing.assert_allclose(found, expected[optimizers.path_name(path)], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_eight_devices_equal_one(x64, make_config, make_batch, make_trainer):
    config = make_config(**WIDE, actor__optim={"name": "muon", "lr": 1e-2})
    one, many = (make_trainer(config, devices, TRAINED, LONG) for devices in (1, 8))
    for seed in range(3):
        for each in (one, many):
            each.accumulate(make_batch(seed=seed))
            assert each.apply()["actor/skipped_updates"] == 0
    assert distance(many.params, one.params) < 1e-7
