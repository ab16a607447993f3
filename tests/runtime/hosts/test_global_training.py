"""Training over several processes, rollouts on the devices of each, and checkpoints equal those of one process; and
tokens of all hosts come to all, bit for bit, whatever the lengths and who has drawn what.

The one process has joined a world of its own: its sums have the order of those of several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_worlds import EXCHANGE, assert_same_bits, check_exchange, of, run_world


def trained(
    folder: Path,
    num_processes: int,
    devices: int,
    restores: tuple[str, ...] = (),
    degrees: tuple[int, ...] = (),
    **config: Any,
) -> list[dict[str, np.ndarray]]:
    options = {"saves": str(folder / "checkpoints"), "restores": restores, "degrees": degrees, "config": config}
    cases = "training" if num_processes == 1 else "training,tokens"
    return run_world(cases, folder, num_processes, devices, **options, **EXCHANGE)


def compare(folder: Path, num_processes: int, devices: int, degrees: tuple[int, ...] = (), **config: Any) -> None:
    """So many devices of so many processes, and all in one with as many workers; `degrees`: which those begin with."""
    workers = {"rollout__num_workers": num_processes}
    (alone,) = trained(folder / "one", 1, num_processes * devices, (), degrees, **config | workers)
    checkpoints = [str(folder / name / "checkpoints") for name in ("one", "several")]
    hosts = trained(folder / "several", num_processes, devices, tuple(checkpoints), degrees, **config)
    check_exchange(hosts)
    for found in hosts:
        assert_same_bits(found, of(alone, "state", "middle", "logprobs", "metrics"))
        assert_same_bits(found, of(alone, "sample"))
        assert_same_bits(found, of(alone, "weights of 0"))
        for number in range(2):
            assert_same_bits(renamed(found, f"restored {number}"), renamed(alone, "middle"))


def renamed(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in of(arrays, prefix).items()}


@pytest.mark.slow  # what two hosts end with by default: tests/commands/test_host_runs.py
def test_two_hosts(tmp_path: Path):
    compare(tmp_path, 2, 1)


@pytest.mark.slow
def test_two_hosts_with_tensor_parallelism(tmp_path: Path):
    compare(tmp_path, 2, 2, rollout__tensor_model_parallel_size=2)


@pytest.mark.slow
def test_two_hosts_in_different_layouts(tmp_path: Path):
    compare(tmp_path, 2, 2, (1, 2), rollout__layout={"planner": True, "degrees": [1, 2]})


@pytest.mark.slow
def test_four_hosts(tmp_path: Path):
    compare(tmp_path, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [2, 4])
def test_two_hosts_whose_devices_share_rows(tmp_path: Path, sharing: int):
    """Inside a host, and across both."""
    compare(tmp_path, 2, 2, actor__context_parallel_size=sharing)
