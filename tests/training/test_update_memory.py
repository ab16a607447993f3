"""What an update adds to a device: activations, scores and shards, beside what XLA and real arrays say of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known_sizes import SMOLLM2, TINY, config
from uneven_models import normal_params, placed

from jaxrl.commands.explain import explain
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import to_rollout, train_shardings
from jaxrl.training.update_memory import device_numbers, update_phases

MIB = 1 << 20


def test_a_chunk_of_logits_takes_half_of_what_is_left():
    c = config(actor={"logprob_chunk_tokens": "auto"})
    room = {gib: explain(c, SMOLLM2, 1, gib << 30).memory for gib in (3, 5, 8, 80)}
    chunks = [memory.config.actor.logprob_chunk_tokens for memory in room.values()]
    assert chunks == sorted(chunks)
    assert (chunks[0], chunks[-1]) == (128, 4096)
    assert 128 < chunks[1] < 4096
    assert explain(c, SMOLLM2, 1).memory.config.actor.logprob_chunk_tokens == 1024
    fixed = config(actor={"logprob_chunk_tokens": 300})
    assert explain(fixed, SMOLLM2, 1, 80 << 30).memory.config.actor.logprob_chunk_tokens == 300
    assert "logits of 4096 tokens at a time, remat dots" in str(explain(c, SMOLLM2, 1, 80 << 30))


def test_rows_too_short_for_tiles_hold_their_scores():
    held, lengths = {}, {"max_prompt_length": 24, "max_response_length": 40}
    for budget in (64, 512):
        c = config(data=lengths, actor={"ppo_max_token_len_per_gpu": budget})
        parts = layers(c, "cpu")
        held[budget] = parts.get("attention scores (rows too short for tiles)", 0)
    assert held == {64: 9 * 64 * 64 * 4 * 3, 512: 0}


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_activations_are_near_what_xla_reports(remat):
    parts = layers(config(actor={"remat": remat}), "cpu")
    names = (f"activations kept (remat {remat}, estimate)", "one layer at work (estimate)")
    # what XLA reports as temporaries of the gradient, see the module's docstring
    reported = {"full": 265, "dots": 1375, "none": 3710}[remat]
    # reported for 1920 tokens; a microbatch has 2048
    assert sum(parts[name] for name in names) / MIB * 1920 / 2048 == pytest.approx(reported, rel=0.15)
    assert not any("scores" in name for name, size in parts.items() if size)


def layers(c, platform):
    """Bytes of what an update of SmolLM2 adds while the layers' gradients are made."""
    remat = "dots" if c.actor.remat == "auto" else c.actor.remat
    c = c.replace(actor=c.actor.replace(remat=remat, logprob_chunk_tokens=128))
    return {name: size for name, size in update_phases(c, SMOLLM2, 1, platform)["layers"].items() if size}


@pytest.mark.parametrize(("model", "tp"), [(TINY, 2), (TINY, 8), (SMOLLM2, 4)], ids=["tiny-2", "tiny-8", "smollm2"])
def test_weights_are_as_large_as_the_shardings_make_them(model, tp):
    layout = Layout(make_mesh(jax.devices()[:8]), tp)
    trained = [
        math.prod(sharding.shard_shape(weight.shape))
        for sharding, weight in zip(
            jax.tree.leaves(train_shardings(model, layout.mesh)),
            jax.tree.leaves(model.weights(), is_leaf=lambda x: hasattr(x, "hf_name")),
            strict=True,
        )
    ]
    assert device_numbers(model, 8) == sum(trained)
    if model is TINY:
        params = placed(normal_params(model, np.float32), model, layout.mesh)
        rolled = to_rollout(params, model, layout, jnp.float32)
        held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(rolled))
        e = explain(config(rollout={"tensor_model_parallel_size": tp}), model, 8)
        assert e.memory.rollout["rollout weights"] == 4 * held
        narrow = to_rollout(params, model, layout, jnp.float32, quantization="int8")
        held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(narrow))
        e = explain(config(rollout={"tensor_model_parallel_size": tp, "quantization": "int8"}), model, 8)
        assert e.memory.rollout["rollout weights"] == held
