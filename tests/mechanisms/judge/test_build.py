"""A judge's memory as planned, against what its executor's arrays are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from run_parts import made_run

from jaxrl.config import Config, ConfigError, from_mapping
from jaxrl.mechanisms.judge import device
from jaxrl.mechanisms.judge.device import judge_memory, read_judge, rollout_memory
from jaxrl.models.config import ModelConfig
from jaxrl.models.shapes import SHAPES
from jaxrl.models.streaming import HOST
from jaxrl.rollout.layout_programs import LayoutPrograms
from jaxrl.sharding.mesh import make_mesh

SMOLLM2, QWEN = SHAPES["SmolLM2-135M"], SHAPES["Qwen2.5-7B"]


def config(**judge: Any) -> Config:
    options = {"model": "unused", "max_prompt_tokens": 1000, "max_tokens": 24, "max_num_seqs": 4} | judge
    reward = {"kind": "judge", "judge": options}
    data = {"task": "chain_sum", "task_size": 100, "max_prompt_length": 64, "max_response_length": 64}
    return from_mapping({"model": {"path": "unused"}, "data": data, "reward": reward})


def part(x: Any) -> int:
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


class MadeError(Exception):
    """With what a judge's executor is made of: no weights are read."""


@pytest.mark.parametrize(("model", "num_devices"), [(SMOLLM2, 1), (QWEN, 8)], ids=["smollm2", "qwen"])
def test_planned_bytes_are_those_of_the_arrays(model: ModelConfig, num_devices: int, monkeypatch: pytest.MonkeyPatch):
    def stop(*of_executor: Any) -> None:
        raise MadeError(*of_executor)

    monkeypatch.setattr(device, "read_judge", lambda _: (None, model))
    monkeypatch.setattr(device, "host_bytes", lambda: 1 << 60)
    monkeypatch.setattr(device, "MeshExecutor", stop)
    c = config(resident_layers=3)
    plan = judge_memory(c, model, num_devices)
    with pytest.raises(MadeError) as made:
        device.build_judge(made_run(None, None, None, config=c), make_mesh(jax.devices()[:num_devices]))
    programs = LayoutPrograms(*made.value.args)
    arrays = jax.tree.leaves(programs.abstract_params())
    streamed = sum(part(x) for x in arrays if x.sharding.memory_kind == HOST)
    assert plan.parts["judge: weights that stay"] == sum(map(part, arrays)) - streamed
    assert plan.host_bytes == sum(map(part, arrays))
    assert plan.layer_bytes * (model.num_layers - 3) == streamed
    assert plan.parts["judge: KV pool"] == sum(map(part, jax.tree.leaves(programs.abstract_pool())))
    assert plan.parts["judge: buffers of two layers"] == 2 * plan.layer_bytes


def test_a_limit_of_the_memory_is_kept_or_refused():
    with pytest.raises(ValueError, match=r"max_memory_gib \(0.01, \d+ bytes\) must be at least \d+ bytes: \d+ of w"):
        judge_memory(config(max_memory_gib=0.01), SMOLLM2, 1)
    with pytest.raises(ValueError, match=r"resident_layers \(31\) must be at most the judge's layers \(30\)"):
        judge_memory(config(resident_layers=31), SMOLLM2, 1)
    for gib in (0.2, 0.25, 0.3):
        plan = judge_memory(config(max_memory_gib=gib, resident_layers=-1), SMOLLM2, 1)
        used = sum(plan.parts.values()) - plan.parts["judge: logits"]
        assert used <= gib * 2**30 < used + plan.layer_bytes, "no more layers would fit"


def test_what_is_read_of_a_judge(tiny_model: Path):
    tokenizer, model = read_judge(config(model=str(tiny_model), max_prompt_tokens=9))
    assert (tokenizer.vocab_size, model.num_layers) == (260, 2)
    memory = rollout_memory(config(model=str(tiny_model)), 1)
    assert memory.line.startswith("judge: 2 of 2 layers stay")
    scalar = {"reward": {"kind": "model", "judge": {"model": str(tiny_model)}}}
    with pytest.raises(ConfigError, match="is a language model, which needs reward"):
        read_judge(from_mapping({"model": {"path": "m"}} | scalar))
