"""What a run's weights are when it begins: of which types, and a quantised base from the model's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny import write_tiny_model

from jaxrl.config import from_mapping
from jaxrl.models.loading import config_of, load_model
from jaxrl.models.lora import is_adapter
from jaxrl.models.quantized import ABSMAX, quantize
from jaxrl.run.weights import adapted, load_weights
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.programs import TrainPrograms


def test_a_base_in_the_types_of_training(tmp_path: Path):
    """Layer by layer what the files have, cast or quantised; split over two devices as the programs want it."""
    folder = write_tiny_model(tmp_path, hidden_size=64, intermediate_size=64, head_dim=16)
    own: dict[str, Any] = {"path": str(folder), "random_init": True, "lora_rank": 2, "base_quantization": "nf4"}
    config = from_mapping({"model": own, "actor": {"dtype": "bfloat16"}, "data": {"task": "chain_sum"}})
    mesh = make_mesh(jax.devices()[:2])
    model = adapted(config, config_of(str(folder)))
    found = load_weights(config, model, mesh)
    programs = TrainPrograms(config, model, mesh)
    given = jax.tree.map(lambda x: (x.dtype.name, x.sharding), found)
    wanted = jax.tree.map(lambda dtype, sharding: (dtype, sharding), programs.dtypes, programs.shardings)
    assert given == wanted

    _, plain = load_model(str(folder), mesh, random_init_seed=config.trainer.seed)
    for name, weight in model.base.weights()["layers"].items():
        x, layers = np.asarray(plain["layers"][name]), range(model.num_layers)
        if weight.transpose:
            codes, magnitudes = zip(*(quantize("nf4", jnp.asarray(weight.to_file(x[i]))) for i in layers), strict=True)
            assert np.array_equal(found["layers"][name], np.stack(codes)), name
            assert np.array_equal(found["layers"][name + ABSMAX], np.stack(magnitudes)), name
        else:
            assert np.array_equal(found["layers"][name], x.astype(found["layers"][name].dtype)), name
    again = load_weights(config, model, mesh)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), found, again))
    assert sum(map(is_adapter, found["layers"])) == 14
