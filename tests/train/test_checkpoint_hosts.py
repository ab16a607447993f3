"""Checkpoints between runs of one, two and four processes: the same bits in every direction.

`tests/runtime/hosts/test_global_training.py` has the quick one, from one process to two.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from host_worlds import assert_same_bits, of, run_world

SIZES = {1: 4, 2: 2, 4: 1}  # processes, and the devices of each


def saved(folder: Path, num_processes: int) -> dict[str, np.ndarray]:
    """A checkpoint of step 2 in `folder/checkpoints`; what the process that wrote it had."""
    checkpoints = folder / "checkpoints"
    hosts = run_world("save", folder / "save", num_processes, SIZES[num_processes], folder=str(checkpoints))
    files = {str(path.relative_to(checkpoints / "2")) for path in checkpoints.rglob("*") if path.is_file()}
    for process, found in enumerate(hosts):
        written = {name for name in files if f"/ocdbt.process_{process}/" in name}
        written |= {"arrays/arrays.arrow"} if process == 0 else set()
        assert set(found["hashed"].tolist()) == {f"{process} {name}" for name in written}
        assert any("state/" in name for name in written)
        assert_same_bits(found, of(hosts[0], "state"))
        assert found["steps"].tolist() == [2], "max_to_keep is 1, for every process"
    assert [path.name for path in checkpoints.iterdir()] == ["2"], "one step, and nothing that was left"
    assert json.loads((checkpoints / "2" / "host" / "metadata").read_text())["values"]["by"] == 0
    return hosts[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", SIZES)
def test_in_every_direction(tmp_path: Path, num_processes: int):
    expected = saved(tmp_path, num_processes)
    checkpoints = str(tmp_path / "checkpoints")
    for reading, devices in SIZES.items():
        for found in run_world("restore", tmp_path / f"restore {reading}", reading, devices, folder=checkpoints):
            assert_same_bits(found, of(expected, "state"))
            assert found["host"].tolist() == [1, 2, 0, 1, 0], "the cursor, the queue, and who wrote them"
