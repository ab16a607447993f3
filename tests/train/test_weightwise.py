"""An update whose state lies in the host's memory has the bits of one whose state lies on the devices."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from small_models import TRAINED
from weightwise_runs import WIDE, read, trainer_of, update

from jaxrl.models.lora import Lora
from jaxrl.models.streaming import HOST

MODELS = {
    "untied": dataclasses.replace(TRAINED, tie_word_embeddings=False, qkv_bias=True, family="qwen2"),
    "adapters": dataclasses.replace(TRAINED, lora=Lora(rank=3, alpha=6.0, targets=("q", "o"))),
    "wide": WIDE,
}
OPTIM = {"lr": 1e-2, "weight_decay": 0.1, "lr_warmup_steps": 2}


@pytest.mark.parametrize(
    ("model", "devices", "name", "dtype"),
    [
        ("wide", 8, "adamw", "int8"),
        pytest.param("untied", 8, "muon", "float32", marks=pytest.mark.slow),
        pytest.param("adapters", 2, "muon", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_bits_are_those_of_a_state_on_the_devices(make_config, model, devices, name, dtype):
    """Weights and state, whichever optimizer, with frozen weights and on several devices; a skipped update, too. And a
    state goes on wherever it lies: what one has saved the other loads."""
    options = {"actor__optim": OPTIM | {"name": name, "state_dtype": dtype}}
    here, away = (
        trainer_of(make_config(**options, actor__offload_optimizer=offload), MODELS[model], devices)
        for offload in (False, True)
    )
    for seed, scale in enumerate((1.0, 30.0, np.inf, 0.1)):
        if seed == 3:
            here_state = read(here.state())
            here.load_state(read(away.state()))
            away.load_state(here_state)
        metrics = [update(each, seed, scale) for each in (here, away)]
        assert repr(metrics[0]) == repr(metrics[1])  # NaN is itself there
        assert metrics[0]["actor/skipped_updates"] == (scale == np.inf)
        jax.tree.map(np.testing.assert_array_equal, read(here.state()), read(away.state()))
    state = away.state()["optimizer"]
    assert {x.sharding.memory_kind for x in state.values() if x.ndim > 1} == {HOST}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(away.params)} == {"device"}
