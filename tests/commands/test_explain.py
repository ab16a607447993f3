"""Counts and memory of a configuration, checked against numbers worked out by hand and against real arrays."""

import math
from dataclasses import replace

import jax
import pytest
from known_sizes import SMOLLM2, TINY, config

from jaxrl.commands.explain import explain, explain_config
from jaxrl.config import from_mapping
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


def test_memory_of_smollm2_on_one_device():
    e = explain(config(actor={"use_kl_loss": True}), SMOLLM2, 1)
    size = SMOLLM2.num_params() * 4
    assert e.num_params == 134_515_008
    assert e.memory.resident == {
        "master weights": size,
        "optimizer (adam m, v)": 2 * size,
        "reference weights": size,
    }
    # 24 blocks hold 384 tokens; 30 layers, keys and values, 3 heads of 64, 16 positions, float32
    assert e.memory.num_blocks == 32 * 24 + 1
    assert e.memory.rollout == {"rollout weights": size, "KV pool": (32 * 24 + 1) * 2 * 30 * 3 * 64 * 16 * 4}
    assert e.memory.update["gradients"] == size
    assert e.memory.pool_requests == 32
    assert e.memory.pool_tokens == 32 * 384
    assert e.memory.rollout_bytes == 5 * size + e.memory.rollout["KV pool"]
    assert e.warnings == ()


def test_devices_of_the_rollouts_own_hold_no_training_state():
    """Four devices train as four alone would; the other four roll out with all their memory for weights and KV."""
    rollout = {"tensor_model_parallel_size": 2, "max_num_seqs": 4096}
    shared = explain(config(data={"task": "t"}, rollout=rollout), SMOLLM2, 4, 4 << 30).memory
    own = rollout | {"num_devices": 4}
    e = explain(config(data={"task": "t"}, rollout=own, trainer={"one_step_off": True}), SMOLLM2, 8, 4 << 30)
    assert (e.memory.update, e.memory.resident) == (shared.update, shared.resident)
    assert e.memory.rollout_bytes == sum(e.memory.rollout.values())
    assert e.memory.num_blocks > 1.1 * shared.num_blocks
    assert "8 devices, rollout alone on 4: dp 2 × tp 2" in str(e)


@pytest.mark.parametrize(
    ("command", "options", "sequences", "reference"),
    [
        ("sft", {}, 8, None),
        ("dpo", {}, 16, "a copy of the run's first weights"),
        ("dpo", {"model": {"path": "SmolLM2-135M", "lora_rank": 4}}, 16, "the base without its adapters"),
    ],
)
def test_what_learns_from_files_has_a_picture_of_its_own(command, options, sequences, reference):
    """No rollout, no reward; the update's memory is that of a run of RL with the same reference."""
    given = {"model": {"path": "SmolLM2-135M"}, "trainer": {"total_training_steps": 5}, **options}
    e = explain_config(from_mapping(given, command), 2, 8 << 30, command)
    text = str(e)
    copied = reference is not None and reference.startswith("a copy")
    alike = from_mapping({**given, "actor": {"use_kl_loss": copied}, "dpo": {}})
    rl = explain_config(alike, 2, 8 << 30)
    assert (e.num_params, e.resident) == (rl.num_params, rl.resident)
    assert ("reference weights" in text) == copied
    assert e.sizes["a step, which is an optimizer update"][:2] == (8, sequences)
    assert "\n5 steps\n" in text
    assert reference is None or f"reference: {reference}\n" in text
    assert not any(word in text for word in ("rollout", "reward", "KV pool", "samples"))
    assert ("of them trained" in text) == ("lora_rank" in given["model"])
