"""A judge's memory as planned, against what its executor's arrays are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.config import Config, ConfigError, from_mapping
from jaxrl.config.checks import check
from jaxrl.mechanisms.judge.build import _sizes
from jaxrl.mechanisms.judge.memory import judge_memory
from jaxrl.models.shapes import SHAPES
from jaxrl.models.streaming import HOST
from jaxrl.rollout.layout_programs import LayoutPrograms
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

SMOLLM2, QWEN = SHAPES["SmolLM2-135M"], SHAPES["Qwen2.5-7B"]


def config(**judge: Any) -> Config:
    options = {"model": "unused", "max_prompt_tokens": 1000, "max_tokens": 24, "max_num_seqs": 4} | judge
    reward = {"kind": "judge", "judge": options}
    data = {"task": "chain_sum", "task_size": 100, "max_prompt_length": 64, "max_response_length": 64}
    return from_mapping({"model": {"path": "unused"}, "data": data, "reward": reward})


def part(x: Any) -> int:
    """Bytes on one device."""
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("model", [SMOLLM2, QWEN], ids=["smollm2", "qwen"])
def test_planned_bytes_are_those_of_the_arrays(model, num_devices):
    c = config(resident_layers=3)
    plan = judge_memory(c, model, num_devices)
    mesh = make_mesh(jax.devices()[:num_devices])
    programs = LayoutPrograms(model, Layout(mesh, num_devices), _sizes(c, plan, num_devices, True))
    arrays = jax.tree.leaves(programs.abstract_params())
    streamed = sum(part(x) for x in arrays if x.sharding.memory_kind == HOST)
    assert plan.parts["judge: weights that stay"] == sum(map(part, arrays)) - streamed
    assert plan.host_bytes == sum(map(part, arrays))
    assert plan.layer_bytes * (model.num_layers - 3) == streamed
    assert plan.parts["judge: KV pool"] == sum(map(part, jax.tree.leaves(programs.abstract_pool())))
    assert plan.parts["judge: buffers of two layers"] == 2 * plan.layer_bytes


def test_layers_stay_as_memory_allows():
    """More memory keeps more layers, longer inputs fewer, and a budget is kept."""
    counts = [judge_memory(config(max_memory_gib=gib), QWEN, 1).resident_layers for gib in (4, 6, 8, 12, 20)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (2, 28)
    longer = judge_memory(config(max_memory_gib=8, max_prompt_tokens=16000), QWEN, 1)
    shorter = judge_memory(config(max_memory_gib=8), QWEN, 1)
    assert longer.resident_layers < shorter.resident_layers
    for plan in (longer, shorter):
        assert plan.total - plan.parts["judge: logits"] <= 8 << 30


def test_half_of_the_weights_without_a_budget():
    plan = judge_memory(config(), QWEN, 1)
    stays = plan.parts["judge: weights that stay"] + plan.parts["judge: buffers of two layers"]
    assert plan.host_bytes / 2 - plan.layer_bytes < stays <= plan.host_bytes / 2
    assert plan.num_blocks == 4 * 64 + 1


def test_little_memory_makes_the_pool_small_before_it_is_refused():
    whole = judge_memory(config(max_memory_gib=3), QWEN, 1)
    assert whole.resident_layers == 0
    with pytest.raises(ValueError, match=r"reward\.judge\.max_memory_gib \(2, .*must be at least \d+ bytes"):
        judge_memory(config(max_memory_gib=2), QWEN, 1)
    tight = judge_memory(config(max_memory_gib=3, max_num_seqs=4096), QWEN, 1)
    assert 65 <= tight.num_blocks < 4096 * 64
    with pytest.raises(ValueError, match=r"reward\.judge\.resident_layers \(29\) must be at most .*\(28\)"):
        judge_memory(config(resident_layers=29), QWEN, 1)


def test_a_reward_model_has_no_logits():
    model = dataclasses.replace(SMOLLM2, scalar_head=True)
    assert judge_memory(config(), model, 1).parts["judge: logits"] == 0


def test_the_stream_trainer_is_refused_with_a_judge():
    c = config()
    trainer = dataclasses.replace(c.trainer, stream=dataclasses.replace(c.trainer.stream, enable=True))
    with pytest.raises(ConfigError, match=r"trainer\.stream\.enable and reward\.judge\.model \(unused\) exclude"):
        check(dataclasses.replace(c, trainer=trainer))
