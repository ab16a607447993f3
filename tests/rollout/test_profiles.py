"""Adaptive layouts of a run: options, profiles that are refused, sizes, and the session between backend and rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl.config import Config, ConfigError, from_mapping
from jaxrl.models.shapes import named_shape
from jaxrl.rollout.profiler import checked_profile, identity_of, load_profile
from jaxrl.run.memory import layout_degrees, layout_sizes
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile
from jaxrl.sharding.mesh import make_mesh, submeshes

MODEL = named_shape("SmolLM2-135M")


def config(layout: dict[str, Any] | None = None, **rollout: Any) -> Config:
    rollout = {"n": 4, "max_num_seqs": 8, **rollout, "layout": {"planner": True, **(layout or {})}}
    return from_mapping({"model": {"path": "models/tiny"}, "rollout": rollout}).with_types("cpu")


def test_degrees():
    assert layout_degrees(config(), 12) == (1, 2, 4, 12)
    assert layout_degrees(config({"degrees": [1, 4]}), 8) == (1, 4)
    assert layout_degrees(config({"planner": False}), 8) == (1,)
    assert layout_degrees(config(num_workers=2), 8) == (1, 2, 4), "of a worker's four devices"
    with pytest.raises(ValueError, match=r"tp 8 must be one of 1, 2, 4 "):
        layout_degrees(config({"degrees": [1, 8]}), 4)


def test_sizes_of_layouts():
    known = layout_sizes(config(num_blocks=101), MODEL, 8, None)
    assert known == {1: (8, 101), 2: (16, 201), 4: (32, 401), 8: (64, 801)}, "rows and blocks of all groups stay"
    alike = layout_sizes(config({"scale_rows": False}, num_blocks=101), MODEL, 8, None)
    assert set(alike.values()) == {(8, 101)}
    tight = layout_sizes(config({"scale_rows": False}, max_num_seqs=512), MODEL, 8, 2 << 30)
    assert tight[1][1] < tight[2][1] < tight[4][1], "a larger tp leaves more memory for KV"
    few = config(tensor_model_parallel_size=8)
    with pytest.raises(ValueError, match=r"^rollout.num_blocks \(4 at tp 1, one of them reserved\) must hold one"):
        layout_sizes(few.replace(rollout=few.rollout.replace(num_blocks=25)), MODEL, 8, None)


def test_profiles_of_something_else_are_refused(tmp_path: Path):
    mesh = make_mesh()
    file = tmp_path / "profile.json"
    c = config({"switch": True, "profile": str(file)})
    with pytest.raises(ConfigError, match=r"profile.json does not exist: make it with `jaxrl profile`"):
        load_profile(file)
    file.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ConfigError, match=r"cannot be used: latency profile of schema 99: this version reads 3"):
        load_profile(file)
    identity = identity_of(c, MODEL, mesh)
    assert identity_of(c, named_shape("Qwen2.5-1.5B"), mesh).fingerprint != identity.fingerprint
    assert (identity.model, identity.device_count, identity.jax_version) == ("tiny", 8, jax.__version__)
    good = Profile(identity, (Measurement(1, 1, 8, 0.1),))
    file.write_text(json.dumps(good.to_json()))
    assert checked_profile(c, MODEL, mesh) == good
    stale = replace(good, identity=replace(identity, jax_version="0.4.1", device_kind="H100"))
    file.write_text(json.dumps(stale.to_json()))
    with pytest.raises(ConfigError, match=r"device_kind is 'H100' there .*jax_version is '0.4.1' there and"):
        checked_profile(c, MODEL, mesh)
    file.write_text(json.dumps(replace(good, source="synthetic").to_json()))
    with pytest.raises(ConfigError, match=r"was made up \(source: synthetic\)"):
        checked_profile(c, MODEL, mesh)
    cut = config({"switch": True, "profile": str(file), "allow_synthetic": True}, num_workers=2)
    with pytest.raises(ConfigError, match=r"device_count is 8 there and 4 here"):
        checked_profile(cut, MODEL, mesh)
    assert identity_of(cut, MODEL, submeshes(mesh, 2)[1]) == replace(identity, device_count=4)
    willing = config({"switch": True, "profile": str(file), "allow_synthetic": True})
    assert checked_profile(willing, MODEL, mesh).source == "synthetic"
