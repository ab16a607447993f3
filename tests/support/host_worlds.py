"""Worlds of several processes on this machine, over loopback: `start_world` runs `host_process.py` in each.

A process that fails ends its world: the others are killed, and what all of them printed is in the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from quick_xla import flags
from worlds import free_port

from jaxrl.types import SampleKey

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 500.0


def run_world(case: str, out: Path, num_processes: int, devices: int, **options: Any) -> list[dict[str, np.ndarray]]:
    """Runs a case of `host_process.py`, or several with commas between them, on so many processes of so many devices
    each.

    Returns:
      What each process has kept: arrays by name.
    """
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags(devices),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for process in range(num_processes):
            arguments = [case, str(process), str(num_processes), str(port), str(out), json.dumps(options)]
            with open(out / f"{process}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(ROOT / "tests/support/host_process.py"), *arguments],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )
        deadline = time.monotonic() + PATIENCE_S
        while any(each.poll() is None for each in processes):
            assert not any(each.poll() for each in processes), _told(out, processes)
            assert time.monotonic() < deadline, _told(out, processes)
            time.sleep(0.02)
        assert all(each.returncode == 0 for each in processes), _told(out, processes)
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
            each.wait()
    return [kept(out, process) for process in range(num_processes)]


EXCHANGE: dict[str, Any] = {"longest": [5, 40, 3, 900, 0], "num_samples": 24, "max_bytes": 1 << 14}
"""Options of the case `tokens`: in the last turn nothing is drawn; in the one before, what is sent exceeds what a turn
may hold."""


def check_exchange(hosts: list[dict[str, np.ndarray]]) -> None:
    """After the case `tokens` all hosts have the samples of all, as their owners drew them."""
    for found in hosts:
        assert_same_bits(found, of(hosts[0], "exchanged"))
        tokens, moved, turns, seconds = found["figures"].T
        assert turns[3] > 1
        assert turns[0] == turns[-1] == 1
        assert tokens[-1] == 0
        assert all(moved > 0)
        assert all(seconds > 0)
        assert found["programs"] <= 2, "a few sizes serve all"
    for turn, limit in enumerate(EXCHANGE["longest"]):  # made anew as each owner made them
        random = np.random.default_rng(turn)
        for number in range(EXCHANGE["num_samples"]):
            length, _ = int(random.integers(0, limit + 1)), random.integers(len(hosts))
            words = random.integers(-(2**31), 2**31, (4, length)).astype(np.int32)
            fields = ("token_ids", "versions", "rollout_logprobs", "sampled_logprobs")
            for field, expected in zip(fields, words, strict=True):
                name = f"exchanged {SampleKey(turn, number, 0)} {field}"
                assert hosts[0][name].tobytes() == expected.tobytes()


def kept(out: Path, process: int) -> dict[str, np.ndarray]:
    with np.load(out / f"{process}.npz") as found:
        return {name: found[name] for name in found.files}


def _told(out: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    logs = (f"process {i} ({each.poll()}):\n{(out / f'{i}.log').read_text()}" for i, each in enumerate(processes))
    return "\n".join(logs)


def assert_same_bits(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """All of `expected`, in which there must be something, is in `found` with the same bits."""
    assert expected
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), f"{name} differs"


def of(arrays: Mapping[str, np.ndarray], *prefixes: str) -> dict[str, np.ndarray]:
    """Those whose names begin so."""
    return {name: array for name, array in arrays.items() if name.startswith(prefixes)}
