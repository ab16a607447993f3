"""A real run over two Ray nodes of this machine: with a killed process in its middle, as the local launcher's."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_runs import SMALL, HostRun, assert_same_run, gone_after
from runs import Runs

DETECTION_S = 2.0
OPTIONS = (*SMALL, "trainer.total_training_steps=8", "trainer.compilation_cache_dir=")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without a CPU, and two nodes with one each."""
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "200")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.slow
def test_a_run_on_ray_ends_as_the_local_launchers(tmp_path: Path, tiny_model: Path, cluster: Any):
    runs = Runs(tmp_path, tiny_model)
    with HostRun(runs, tmp_path / "local", *OPTIONS) as local:
        local.finish()
    hosts = ("hosts.launcher=ray", "hosts.devices_per_host=1", f"hosts.address={cluster.address}")
    with HostRun(runs, tmp_path / "ray", *OPTIONS, hosts=hosts) as run:
        began_s = time.monotonic()
        run.start()
        run.until_at(1, "gen of step 1")
        print(f"the first step began after {time.monotonic() - began_s:.1f} s")
        run.until_at(1, "of step 4")
        both = [run.where(process)[0] for process in range(2)]
        began_s = time.monotonic()
        os.kill(both[1], signal.SIGKILL)
        seconds = gone_after(both, 60)
        run.until(lambda: run.where(1)[0] not in both and "of step" in run.place(1))
        print(f"gone after {seconds:.2f} s; the step after it began after {time.monotonic() - began_s:.1f} s")
        output = run.end()
    assert seconds < DETECTION_S
    assert "jaxrl: host 1 was ended by SIGKILL after " in output
    assert_same_run(tmp_path / "ray", tmp_path / "local", "reward/retries")
