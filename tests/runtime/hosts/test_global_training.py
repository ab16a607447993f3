"""Training over the devices of several processes, and rollouts on each one's own, equal those of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from host_worlds import assert_same_bits, of, run_world


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """One process of four devices that has joined a world of its own: its collectives are those of several."""
    options = {"config": {"rollout__num_workers": 2}}
    return run_world("training", tmp_path_factory.mktemp("alone"), 1, 4, **options)[0]


def test_two_hosts_train_and_draw_as_one(tmp_path: Path, alone: dict[str, np.ndarray]):
    compare(run_world("training", tmp_path, 2, 2), alone)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_with_tensor_parallelism(tmp_path: Path, tp: int):
    config = {"rollout__tensor_model_parallel_size": tp}
    alone = run_world("training", tmp_path / "one", 1, 4, config=config | {"rollout__num_workers": 2})[0]
    compare(run_world("training", tmp_path / "two", 2, 2, config=config), alone)


@pytest.mark.slow
def test_four_hosts_train_and_draw_as_one(tmp_path: Path):
    alone = run_world("training", tmp_path / "one", 1, 4, config={"rollout__num_workers": 4})[0]
    compare(run_world("training", tmp_path / "four", 4, 1), alone)


def compare(hosts: list[dict[str, np.ndarray]], alone: dict[str, np.ndarray]) -> None:
    for found in hosts:
        assert_same_bits(found, of(alone, "state", "logprobs", "metrics"))
        assert_same_bits(found, of(alone, "sample"))
        assert_same_bits(found, of(alone, "weights of 0"))
