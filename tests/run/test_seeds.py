"""The largest seed goes through everything that takes one, and is not another seed's double."""

import jax
import numpy as np

from jaxrl.rollout.sampling import request_key
from jaxrl.schema.declared import MAX_SEED
from jaxrl.sim.workload import uniform
from jaxrl.types import SampleKey


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
