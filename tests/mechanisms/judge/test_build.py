"""The weights of a judge with adapters are those of the merged model."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from run_parts import made_run
from tiny import write_tiny_model

from jaxrl.config import from_mapping
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.judge.build import build_pool as build_judge
from jaxrl.models import decoder
from jaxrl.models.loading import load_model
from jaxrl.models.lora import Lora, adapters_alone, with_adapters
from jaxrl.models.peft import CONFIG, export_adapter, merged_params
from jaxrl.models.safetensors import export_hf
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.pool import build_pool
from jaxrl.sharding.mesh import make_mesh


def weights_of(**judge: Any) -> list[np.ndarray]:
    """What a judge's executor computes with."""
    data = {"answer_key": "a", "max_prompt_length": 16, "max_response_length": 16}
    own = {"max_prompt_tokens": 128, "max_tokens": 16, "max_num_seqs": 2, "resident_layers": 1, **judge}
    config = from_mapping({"model": {"path": "x"}, "data": data, "reward": {"kind": "judge", "judge": own}})
    with closing(build_pool(config, build_scorer(config))) as pool:
        run = made_run(None, None, pool, config=config)
        weights: Any = build_judge(run, make_mesh(jax.devices()[:2])).machine
        return [np.asarray(leaf) for leaf in jax.tree.leaves(weights._weights._host)]


def test_adapters_are_merged_before_the_type_is_the_judges(tmp_path: Path):
    folder = f"random:{write_tiny_model(tmp_path / 'base')}"
    base, params = load_model(folder, make_mesh(jax.devices()[:1]))
    model = dataclasses.replace(base, lora=Lora(4, 64.0, ("q", "o", "down")))
    new = decoder.init_table(adapters_alone(model.weights()), jax.random.key(1))
    params = with_adapters(
        params, {"layers": {name: jax.random.normal(jax.random.key(2), x.shape) for name, x in new["layers"].items()}}
    )
    export_adapter(params, model, tmp_path / "adapter", np.float32, "base")
    export_hf(merged_params(model, params), base, tmp_path / "merged", dtype=np.float32)
    Tokenizer.from_path(tmp_path / "base").save(tmp_path / "merged")
    found = weights_of(model=folder, lora_adapter_path=str(tmp_path / "adapter"), dtype="bfloat16")
    whole = weights_of(model=str(tmp_path / "merged"), dtype="bfloat16")
    plain = weights_of(model=folder, dtype="bfloat16")
    assert len(found) == len(whole)
    assert all(np.array_equal(one, other) for one, other in zip(found, whole, strict=True))
    assert sum(not np.array_equal(one, other) for one, other in zip(found, plain, strict=True)) >= 2 * base.num_layers


def test_a_folder_without_adapters_is_refused(tmp_path: Path):
    folder = write_tiny_model(tmp_path / "base")
    with pytest.raises(ValueError, match=f"{tmp_path}/none/{CONFIG}: no such file; a folder of adapters"):
        weights_of(model=f"random:{folder}", lora_adapter_path=str(tmp_path / "none"))
