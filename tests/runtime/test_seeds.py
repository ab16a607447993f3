"""The largest seed goes through everything that takes one, and is not another seed's double."""

import jax
import numpy as np
import pytest

from jaxrl.config import ConfigError
from jaxrl.config.mapping import unchecked
from jaxrl.rollout.sampling import request_key
from jaxrl.schema.declared import MAX_SEED
from jaxrl.sim.workload import uniform
from jaxrl.types import SampleKey


@pytest.mark.parametrize("name", ["trainer.seed", "data.seed"])
def test_options_take_it(name: str):
    section, _, option = name.partition(".")
    assert getattr(unchecked({section: {option: MAX_SEED}}), section).seed == MAX_SEED
    with pytest.raises(ConfigError, match=f"{name} must be at most {MAX_SEED}"):
        unchecked({section: {option: MAX_SEED + 1}})


def test_it_is_no_other_seed():
    import grain

    seeds = (MAX_SEED, MAX_SEED - 1, 2**31 - 1, 2**31, 0)
    draws = {
        "weights": [tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in seeds],
        "tokens": [tuple(request_key(seed, SampleKey(0, 0, 0)).tolist()) for seed in seeds],
        "data": [tuple(grain.MapDataset.range(100).shuffle(seed=seed).repeat(2)) for seed in seeds],
        "simulated order": [tuple(np.random.default_rng((seed, 0)).permutation(100)) for seed in seeds],
        "simulated lengths": [uniform(seed, 0) for seed in seeds],
    }
    for name, drawn in draws.items():
        assert len(set(drawn)) == len(seeds), name
