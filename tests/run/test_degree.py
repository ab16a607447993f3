"""`rollout.tensor_model_parallel_size=auto`: what is chosen, kept, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny_model

from jaxrl.config import Config, ConfigError, from_mapping, to_mapping
from jaxrl.models.loading import config_of
from jaxrl.models.shapes import named_shape
from jaxrl.rollout.profiler import identity_of
from jaxrl.run.degree import planned_degree, with_degree
from jaxrl.scheduling.layouts.batch_state import GroupCapacity, fastest_degree
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity
from jaxrl.sharding.mesh import make_mesh

MODEL = named_shape("SmolLM2-135M")


def config(layout: dict[str, Any] | None = None, tp: Any = "auto", **rollout: Any) -> Config:
    return from_mapping(
        {
            "model": {"path": "models/tiny"},
            "data": {"train_batch_size": 4},
            "rollout": {
                "n": 4,
                "max_num_seqs": 8,
                "tensor_model_parallel_size": tp,
                **rollout,
                "layout": {"profile": "p.json", **(layout or {})},
            },
        }
    ).with_types("cpu")


def table(identity: ProfileIdentity, *degrees: int) -> Profile:
    """A row takes 8 / tp ms, and each more in its dp group 0.1 tp: with 16 rows on 8 devices, tp 2 is the fastest."""
    points = [
        Measurement(tp, rows, context, 1e-3 * (8 / tp + 0.1 * tp * (rows - 1)))
        for tp in degrees or (1, 2, 4, 8)
        for rows in (1, 16)
        for context in (8, 4096)
    ]
    return Profile(identity, tuple(points))


def write(path: Path, *degrees: int, count: int = 8) -> str:
    identity = ProfileIdentity("tiny", "f", "H100", count, "0", "float32")
    path.write_text(json.dumps(table(identity, *degrees).to_json()))
    return str(path)


def test_the_fastest_degree_of_the_profile(tmp_path: Path):
    c = config({"profile": write(tmp_path / "p.json")})
    assert c.is_tp_open
    chosen, said = planned_degree(c, MODEL, 8, None)
    assert chosen == c.with_tp(2)
    assert chosen.rollout.tp == 2
    # 128 steps of 8 + 0.1, 4 + 0.6, 2 + 2.8 ms; at tp 8 two waves of 1 + 5.6
    assert said.startswith("rollout.tensor_model_parallel_size: auto is 2 by ")
    assert said.endswith("1.037 s at tp 1, 0.5888 s at tp 2, 0.6144 s at tp 4, 1.69 s at tp 8)")
    assert planned_degree(c.with_tp(4), MODEL, 8, None) == (c.with_tp(4), "")


@pytest.mark.parametrize(
    ("layout", "rollout", "expected"),
    [
        ({"degrees": [4, 8]}, {}, 4),
        ({}, {"max_num_seqs": 2}, 1),  # 2 waves at tp 2
        ({}, {"n": 64}, 1),
    ],
)
def test_it_is_among_what_is_possible(tmp_path: Path, layout: dict[str, Any], rollout: dict[str, Any], expected: int):
    c = config({"profile": write(tmp_path / "p.json"), **layout}, **rollout)
    assert planned_degree(c, MODEL, 8, None)[0].rollout.tp == expected


@pytest.mark.parametrize(
    ("layout", "rollout", "words"),
    [
        ({}, {"num_workers": 2}, r"profile \(.*\) is of 8 devices: the rollout has 4 in each worker$"),
        ({"degrees": [2, 4]}, {}, r"holds tp 1, 8, none of which 8 devices and rollout.layout.degrees allow"),
        ({"profile": ""}, {}, r"^rollout.layout.profile is missing: rollout.tensor_model_parallel_size=auto needs"),
    ],
)
def test_profiles_that_do_not_do(tmp_path: Path, layout: dict[str, Any], rollout: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        planned_degree(config({"profile": write(tmp_path / "p.json", 1, 8)} | layout, **rollout), MODEL, 8, None)


def test_degrees_that_do_not_fit_into_memory_are_left_out(tmp_path: Path):
    """The weights of the rollout and one request: at tp 1 and 2 they do not fit beside the training state."""
    c = config({"profile": write(tmp_path / "p.json")}, memory_fraction=1.0)
    for memory, expected in ((1 << 40, 2), (420 << 20, 4), (310 << 20, 8)):
        assert planned_degree(c, MODEL, 8, memory)[0].rollout.tp == expected
    with pytest.raises(ConfigError, match=r"rollout.memory_fraction \(1.0\) of .* leaves"):
        planned_degree(c, MODEL, 8, 100 << 20)


def test_a_real_run_checks_the_profile_and_says_what_it_chose(tmp_path: Path):
    path = write_tiny_model(tmp_path / "model")
    values = to_mapping(config({"profile": write(tmp_path / "p.json")}))
    values["model"]["path"] = str(path)
    c, mesh, said = from_mapping(values).with_types("cpu"), make_mesh(), []
    with pytest.raises(ConfigError, match=r"the latency profile is of something else"):
        with_degree(c, mesh, said.append)
    identity = identity_of(c, config_of(str(path)), mesh)
    (tmp_path / "p.json").write_text(json.dumps(table(identity).to_json()))
    chosen = with_degree(c, mesh, said.append)
    assert chosen.rollout.tp == 2
    assert len(said) == 1
    assert "auto is 2" in said[0]
    assert with_degree(c, mesh, said.append, c.with_tp(4)).rollout.tp == 4
    assert said[1] == "rollout.tensor_model_parallel_size: auto stays 4, as this run began"


def test_rows_that_have_no_room_come_in_waves():
    """Of four rows at tp 8 three have room, then one: 10 steps of 1 + 1.6 ms, and 10 of 1 ms."""
    model = LatencyPredictor(table(ProfileIdentity("m", "", "", 8, "", "")))
    found = fastest_degree(model, {8: GroupCapacity(3 * 110 + 109, 9)}, 4, 100, 10)
    assert found.predicted_s[8] == pytest.approx(0.036)
