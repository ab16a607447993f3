"""A judge's memory as planned, against what its executor's arrays are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from known_sizes import config as sizes
from tiny import write_tiny_model

from jaxrl.commands.explain import explain
from jaxrl.config import Config, from_mapping
from jaxrl.mechanisms.judge.build import _sizes
from jaxrl.mechanisms.judge.memory import judge_memory
from jaxrl.models.shapes import SHAPES
from jaxrl.models.streaming import HOST
from jaxrl.rollout.layout_programs import LayoutPrograms
from jaxrl.runtime.memory import memory_problem
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import in_bytes
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
    programs = LayoutPrograms(model, Layout(mesh, num_devices), _sizes(c, plan, num_devices))
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
        assert sum(plan.parts.values()) - plan.parts["judge: logits"] <= 8 << 30


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
    model = replace(SMOLLM2, scalar_head=True)
    assert judge_memory(config(), model, 1).parts["judge: logits"] == 0


@pytest.mark.parametrize("mixed", [False, True])
def test_beside_gradients_on_a_freed_device(tmp_path: Path, mixed: bool):
    """The judge goes on with all devices, so those that are freed hold it as well; domains of other kinds or not."""
    model = f"random:{write_tiny_model(tmp_path)}"
    stream = {"trainer": {"stream": {"enable": True}}, "rollout": {"num_workers": 2}}
    (plain,) = explain(sizes(**stream), SMOLLM2, 4).memory.freed
    judge = {"model": model, "max_prompt_tokens": 1000}
    reward = {"domains": {"words": {"kind": "judge"}}} if mixed else {"kind": "judge"}
    c = sizes(reward=reward | {"judge": judge}, **stream)
    e = explain(c, SMOLLM2, 4)
    plan = e.memory
    (judge_part,), (freed,) = plan.beside, plan.freed
    assert freed.parts == {**plain.parts, **judge_part.parts}
    (line,) = (line for line in str(e).splitlines() if "judge: KV pool" in line)
    assert line.count("iB") == 2, "in the rollout, and beside gradients"
    short = replace(plan, rollout={"rollout weights": 0, "KV pool": 0}, update={})
    text = memory_problem(c, SMOLLM2, short, 4, plan.freed_bytes(freed) // 2)
    assert text is not None
    assert f"sums and {in_bytes(judge_part.total)} of the judge, and each of 4 has" in text
    assert "or lower reward.judge.max_memory_gib, actor.ppo_max_token_len_per_gpu" in text
