"""The trainer on a GPU: run with JAX_PLATFORMS=cuda and `-m gpu`.

Gradients with the kernels against plain jnp, in float32 as the trainer makes it; and a second trainer's gradients and
weights, which must be the same bits.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from on_gpu import DEPRECATED, INTERPRET, assert_equal_bits, relative, sized

from jaxrl.kernels import reference
from jaxrl.models import decoder
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.packing import BatchShape, pack
from jaxrl.training.vocabulary import Embedding, Split

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(DEPRECATED)]
LIMIT = {"float32": 1e-4, "bfloat16": 5e-2}
UPDATES = 2


@pytest.fixture
def model(model_config):
    """With heads that the kernels take."""
    return dataclasses.replace(model_config, head_dim=sized(64, 16))


def shares_prompts(trainer, batch):
    """Whether a row of the batch has samples that see tokens of another segment."""
    packed = pack(batch, shapes=trainer.programs.microbatches, max_model_length=trainer.config.max_model_length)
    return any((each.prefix_ids != each.segment_ids).any() for each in packed.microbatches)


@pytest.fixture
def trained(make_config, make_batch, make_trainer, model):
    """Gradients of the first minibatch, and the weights after two, by a trainer of its own."""

    def run(dtype: str, attention: str):
        options = {"actor__dtype": dtype, "actor__attention": attention, "actor__ppo_max_token_len_per_gpu": 192}
        trainer = make_trainer(make_config(**options), 1, model, interpret=INTERPRET)
        # long rows: several samples and shared prompts in each
        trainer.programs.microbatches = tuple(BatchShape(1, tokens) for tokens in (48, 96, 144, 192))
        for number in range(UPDATES):
            batch = make_batch(size=sized(64, 12), seed=number, same=True)
            assert shares_prompts(trainer, batch)
            trainer.accumulate(batch)
            if number == 0:
                gradients = trainer.gradients()
            trainer.apply()
        return gradients, trainer.params

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_plain_jnp(dtype, trained):
    expected, _ = trained("float32", "reference")
    found, _ = trained(dtype, "pallas")
    off = relative(found, expected)
    print(f"{dtype}: gradients differ by {off:.1e} of their norm")
    assert off < LIMIT[dtype]


@pytest.mark.parametrize("attention", ["auto", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_run_makes_the_same_bits(dtype, attention, trained):
    assert_equal_bits(trained(dtype, attention), trained(dtype, attention))


def test_gradients_of_the_embedding_are_in_order(model):
    """A token that stands in a hundred places gets the sum of their gradients, the same bits every time. (A scatter
    with atomics adds them in whatever order they come.)"""
    params = decoder.init(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, sized(512, 64)), 0, 5)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = jnp.ones_like(tokens)

    @partial(jax.jit, static_argnums=0)
    def gradient(find, params):
        def objective(params):
            def attend(q, k, v):
                return reference.packed_attention(q, k, v, segments, positions)

            hidden = decoder.forward_scan(params, tokens, positions, attend, model, dtype=jnp.float32, find=find)
            return jnp.sum(jnp.sin(hidden))

        return jax.grad(objective)(params)["embed"]

    with jax.default_matmul_precision("highest"):
        mesh = make_mesh(jax.devices()[:1])
        in_order = Embedding(mesh, PartitionSpec(mesh.axis_names), Split(), jnp.float32, ordered=True)
        found = [gradient(in_order, params) for _ in range(3)]
        expected = gradient(decoder.look_up, params)
    for again in found[1:]:
        assert_equal_bits(again, found[0])
    assert relative(found[0], expected) < 1e-5
