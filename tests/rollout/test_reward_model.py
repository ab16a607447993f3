"""A reward model with a scalar head: read from a folder, run by the engine, against its last hidden state in numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import model_of, weights_of

from jaxrl.kernels.reference import MaskInputs, packed_attention
from jaxrl.models import decoder
from jaxrl.models.loading import load_layerwise, load_model
from jaxrl.models.safetensors import export_hf
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.host_weights import HostWeights
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import SampleKey, SamplingParams

TEXTS = [(5, 6, 7, 8, 9), tuple(range(10, 31)), (3,)]  # the second needs two chunks


@pytest.fixture
def folder(tmp_path):
    config = dataclasses.replace(model_of("qwen2"), scalar_head=True, tie_word_embeddings=False, pad_token_id=0)
    params = {name: value for name, value in weights_of("qwen2", "float32").items() if name != "lm_head"}
    params["score"] = np.random.default_rng(3).normal(size=(config.hidden_size, 1)).astype("float32")
    export_hf(params, config, tmp_path, dtype=jnp.float32)
    return tmp_path


def expected(folder) -> list[float]:
    """For each text: all of them padded behind their ends, where nothing looks back from."""
    config, params = load_model(folder, dtype=jnp.float64)
    tokens = np.array([[*text, *[0] * (24 - len(text))] for text in TEXTS])
    ends = [len(text) - 1 for text in TEXTS]

    @jax.jit
    def last(params, tokens):
        positions, ones = jnp.broadcast_to(jnp.arange(24), tokens.shape), jnp.ones_like(tokens)

        def attend(q, k, v):
            return packed_attention(q, k, v, MaskInputs(ones, positions, ones))

        hidden = decoder.forward_scan(params, tokens, positions, attend, config, dtype=jnp.float64)
        return hidden[jnp.arange(len(TEXTS)), jnp.array(ends)]

    return (np.asarray(last(params, tokens)) @ np.asarray(params["score"])[:, 0]).tolist()


@pytest.mark.usefixtures("x64")
def test_its_number_is_that_of_the_last_token(folder):
    mesh = make_mesh(jax.devices()[:1])
    config, outer, layers = load_layerwise(folder, mesh, jnp.float64)
    assert config.scalar_head
    sizes = ExecutorConfig(
        num_slots=2, block_size=8, max_length=24, max_prefill_tokens=16, dtype=jnp.float64, resident_layers=1
    )
    executor = MeshExecutor(config, Layout(mesh, 1), sizes)
    HostWeights(executor, outer, layers).enter()
    executor.allocate()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    asked = [Request(i, SampleKey(0, 0, i), text, params) for i, text in enumerate(TEXTS)]
    samples = Engine(executor, BatcherConfig()).generate(asked)
    numbers = [float(sample.sampled_logprobs[0]) for sample in samples]
    assert numbers == pytest.approx(expected(folder), rel=1e-6)
    assert {shape[0] for shape in executor.shapes()} == {"prefill"}, "nothing is decoded"
