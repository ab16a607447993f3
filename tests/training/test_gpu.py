"""The trainer on a GPU: run with JAX_PLATFORMS=cuda and `-m gpu`.

Gradients with the kernels against plain jnp, in float32 as the trainer makes it; and a second trainer's gradients and
weights, which must be the same bits.
"""

import dataclasses

import pytest
from on_gpu import DEPRECATED, INTERPRET, assert_equal_bits, relative, sized

from jaxrl.training.packing import BatchShape, pack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(DEPRECATED)]
LIMIT = {"float32": 1e-4, "bfloat16": 5e-2}
UPDATES = 2


@pytest.fixture
def model(model_config):
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
