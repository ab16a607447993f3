"""The pool on clusters that break: an actor, a head or a node that is lost. Slow: ray takes seconds to start."""

import os
import signal
import time
from pathlib import Path

import pytest
from reward_pools import collect, make, submit

from jaxrl.processes.process_tree import descendants
from jaxrl.types import RunFailed

pytestmark = pytest.mark.slow
PATIENCE_S = 280.0


def named(name: bytes) -> list[int]:
    return [pid for pid in descendants(os.getpid()) if name in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_an_actor_that_is_killed(tmp_path: Path):
    """Its sample is scored by another, and its workers end."""
    pytest.importorskip("ray")
    pool = make(tmp_path, "ray", num_workers=1, timeout_s=0.0)
    pool.warm()
    submit(pool, "modules")
    worker = collect(pool, PATIENCE_S)[0].info["pid"]
    gate = tmp_path / "gate"
    submit(pool, f"until {gate}", "say 2")
    time.sleep(0.5)
    (actor,) = named(b"ray::RayActor")
    os.kill(actor, signal.SIGKILL)
    gate.touch()
    assert {i: verdict.reward for i, verdict in collect(pool, PATIENCE_S).items()} == {0: 0.8, 1: 2.0}
    assert pool.take_metrics()["reward/retries"] == 1
    assert not Path(f"/proc/{worker}").exists()
    pool.close()


def test_a_head_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ray ends the process that uses it; another is started, with a cluster of its own, and what waits is scored."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    monkeypatch.setattr("jaxrl.rewards.pool.PAUSES_ON_RAY_S", (0.0, 1.0, 1.0))
    pool = make(tmp_path, "ray", num_workers=1)
    pool.warm()
    submit(pool, "say 1")
    assert collect(pool, PATIENCE_S)[0].reward == 1.0
    pool.take_metrics()
    (head,) = named(b"gcs_server")
    os.kill(head, signal.SIGKILL)
    submit(pool, "say 2", "say 3")
    assert {i: verdict.reward for i, verdict in collect(pool, PATIENCE_S).items()} == {0: 2.0, 1: 3.0}
    restarts, deadline = 0.0, time.monotonic() + PATIENCE_S
    while not restarts and time.monotonic() < deadline:
        assert pool.completed() == []
        restarts = pool.take_metrics()["reward/pool_restarts"]
        time.sleep(0.1)
    assert restarts == 1
    submit(pool, "say 4")
    assert collect(pool, PATIENCE_S)[0].reward == 4.0
    pool.close()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # by ray, for what it starts
def test_a_node_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its actor is waited for, and the other one goes on with the samples of both."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    pool = make(tmp_path, "ray", num_workers=2, timeout_s=0.0)
    try:
        pool.warm()
        gate = tmp_path / "gate"
        submit(pool, f"until {gate}", f"until {gate}", "say 2", "say 3")
        pool.wait(1.0)
        cluster.remove_node(nodes[0], allow_graceful=False)
        gate.touch()
        verdicts = collect(pool, PATIENCE_S)
        assert {i: verdict.reward for i, verdict in verdicts.items()} == {0: 0.8, 1: 0.8, 2: 2.0, 3: 3.0}
    finally:
        pool.close()
        cluster.shutdown()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_cluster_without_room_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    pool = make(tmp_path, "ray", num_workers=1, start_timeout_s=1.0)
    try:
        message = "reward: the ray cluster gives no worker: a ray actor was not ready after 61 s; it has 0 CPUs"
        with pytest.raises(RunFailed, match=message):
            pool.warm()
    finally:
        pool.close()
        cluster.shutdown()
