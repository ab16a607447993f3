"""Weights that are streamed from the host's memory against the same weights on the devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import model_of, weights_of

from jaxrl.models.streaming import HOST, STREAMED, streamed_layers
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.host_weights import HostWeights
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.types import SampleKey, SamplingParams

LAYERS = 3
SIZES = ExecutorConfig(num_slots=2, block_size=16, max_length=32, max_prefill_tokens=32, decode_steps=8)


def deep(name: str):
    """(config, params) of a small model with `LAYERS` different layers."""
    config, params = dataclasses.replace(model_of(name), num_layers=LAYERS), weights_of(name, "float64")
    scale = np.linspace(0.5, 1.5, LAYERS)

    def more(x):
        return np.stack([x[i % 2] * scale[i] for i in range(LAYERS)])

    return config, params | {"layers": jax.tree.map(more, params["layers"])}


def executor_with(name: str, resident: int, tp: int = 1) -> MeshExecutor:
    config, params = deep(name)
    mesh = make_mesh(jax.devices()[:tp])
    own = dataclasses.replace(SIZES, dtype=jnp.float64, resident_layers=resident, max_tp=tp)
    executor = MeshExecutor(config, Layout(mesh, tp), own)
    placed = jax.device_put(params, train_shardings(config, mesh))
    outer = {key: value for key, value in placed.items() if key != "layers"}
    layers = ({key: x[i : i + 1] for key, x in placed["layers"].items()} for i in range(LAYERS))
    HostWeights(executor, outer, layers).enter()
    executor.allocate()
    return executor


def drawn(executor: MeshExecutor):
    params = SamplingParams(max_tokens=9)
    asked = [Request(i, SampleKey(0, 0, i), (5, 6, 7, 8), params) for i in range(2)]
    samples = Engine(executor, BatcherConfig(decode_steps=8)).generate(asked)
    return [(s.token_ids.tolist(), s.rollout_logprobs.tolist(), s.sampled_logprobs.tolist()) for s in samples]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("resident", "tp"), [(1, 1), pytest.param(0, 4, marks=pytest.mark.slow)])
def test_streamed_layers_give_the_same_numbers(resident, tp):
    """Bit for bit, however many layers are resident."""
    executor = executor_with("smollm2", resident, tp)
    assert drawn(executor) == drawn(executor_with("smollm2", LAYERS, tp))
    (programs,) = executor.programs_of([1])
    for index, layer in enumerate(programs.abstract_params()["layers"]):
        kinds = {name for name, x in layer.items() if x.sharding.memory_kind == HOST}
        assert kinds == (STREAMED & set(layer) if index in streamed_layers(LAYERS, resident) else set())
    executor.release(weights=True)
    assert not executor.has_weights
