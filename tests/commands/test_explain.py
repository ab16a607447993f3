"""Counts and memory of a configuration, checked against numbers worked out by hand and against real arrays."""

import math
from dataclasses import replace

import jax
from known_sizes import TINY, config

from jaxrl.commands.explain import explain
from jaxrl.models.decoder import init
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings


def test_counts():
    c = config(
        data={"task": "t", "task_size": 100, "train_batch_size": 8, "max_prompt_length": 24, "max_response_length": 40},
        rollout={"n": 4, "max_num_seqs": 16, "tensor_model_parallel_size": 2, "val_kwargs": {"n": 3}},
        actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2, "ppo_max_token_len_per_gpu": 200},
        trainer={"total_epochs": 2},
    )
    e = explain(c, TINY, num_devices=4)
    assert "rollout dp 2 × tp 2" in e.summary[0]
    assert e.columns == ("prompts", "samples", "tokens, at most")
    assert e.sizes == {
        "a step": (8, 32, 32 * 64),
        "an optimizer update": (2, 8, 8 * 64),
        # an update has no more than 94 for each of 4 devices
        "a microbatch, per device": ("", "1 or more", 64),
        "rows that decode at once": ("", 32, ""),
    }
    assert e.steps == (
        "8 updates per step, at most 2 microbatches per update; 300 samples per evaluation",
        "25 steps; an epoch of 100 prompts takes 12.5",
    )


def test_a_critic():
    """A second model's weights and moments, without the vocabulary head, on the devices of the trainer."""
    sections: dict = {
        "data": {"train_batch_size": 8, "max_prompt_length": 24, "max_response_length": 40},
        "critic": {"ppo_mini_batch_size": 4, "ppo_epochs": 3},
        "trainer": {"total_training_steps": 5},
    }
    plain, gae = (explain(config(**sections, algorithm={"adv_estimator": name}), TINY, 2) for name in ("grpo", "gae"))
    tree = init(replace(TINY, scalar_head=True), jax.random.key(0))
    mesh = make_mesh(jax.devices()[:2])
    shardings = train_shardings(replace(TINY, scalar_head=True), mesh)
    one = sum(
        math.prod(sharding.shard_shape(x.shape)) * 4
        for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    )
    added = {name: size for name, size in gae.memory.resident.items() if name not in plain.memory.resident}
    assert added == {"critic: master weights": one, "critic: optimizer (adam m, v)": 2 * one}
    assert gae.memory.update == plain.memory.update, "what an update of the policy adds is more than its own does"
    assert "critic: 6 updates per step, of 4 prompts each\n" in str(gae)
    assert "critic" not in str(plain)
