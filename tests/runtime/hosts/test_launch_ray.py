"""The launcher with Ray: several nodes on this machine, over stand-ins for the run's processes.

Most are slow: a cluster takes its time to start, and a world some seconds.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import BITS, Launched
from worlds import free_port

from jaxrl.config.hosts import HostsSection
from jaxrl.processes.process_tree import descendants, kill
from jaxrl.runtime.hosts.ray_agents import forwarded
from jaxrl.runtime.hosts.ray_hosts import bundle_of, shortage

PATIENCE_S = 280.0
DETECTION_S = 2.0
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def hosts(num: int, each: int = 0) -> HostsSection:
    return HostsSection(num=num, launcher="ray", devices_per_host=each)


def node(**resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": "10.0.0.1", "Resources": resources}


@pytest.mark.parametrize(
    ("num", "each", "nodes", "on_cpu", "expected"),
    [
        (2, 0, [{"CPU": 8, "GPU": 8}, {"CPU": 8, "GPU": 8}], False, {"CPU": 1, "GPU": 8}),
        (2, 0, [{"CPU": 8, "GPU": 8}, {"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}], False, {"CPU": 1, "GPU": 4}),
        (2, 2, [{"CPU": 8, "GPU": 8}], False, {"CPU": 1, "GPU": 2}),  # another node may come
        (2, 0, [{"CPU": 8, "GPU": 8}, {"CPU": 8}], False, None),
        (2, 0, [{"CPU": 8, "TPU": 4}, {"CPU": 8, "TPU": 4}], False, {"CPU": 1, "TPU": 4}),
        (2, 0, [{"CPU": 8, "GPU": 8}, {"CPU": 8, "GPU": 8}], True, {"CPU": 1}),
        (2, 3, [{"CPU": 8}], False, {"CPU": 3}),
        (2, 0, [], False, {"CPU": 1}),
    ],
)
def test_what_a_host_reserves(num, each, nodes, on_cpu, expected):
    assert bundle_of(hosts(num, each), nodes, on_cpu) == expected


def test_what_is_missing():
    bundle = {"CPU": 1.0, "GPU": 4.0}
    assert shortage(hosts(2), bundle, [node(CPU=8, GPU=4), node(CPU=8)]) == (
        "hosts.num (2) needs as many nodes with 1 CPU and 4 GPU each, and 1 fit (10.0.0.1: 8 CPU, 4 GPU; 10.0.0.1: 8 "
        "CPU, 0 GPU)"
    )
    assert shortage(hosts(1), bundle, []) == (
        "hosts.num (1) needs as many nodes with 1 CPU and 4 GPU each, and 0 fit (no node)"
    )
    assert shortage(hosts(1), bundle, [node(CPU=8, GPU=4)]) == (
        "1 nodes with 1 CPU and 4 GPU each are there, but others hold what they have (10.0.0.1: 8 CPU, 4 GPU)"
    )


def test_what_other_nodes_get_of_the_environment():
    given = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--a", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/x", "HOME": "/root"}
    assert forwarded(given | {"API_KEY": "secret"}) == {name: given[name] for name in given if name != "HOME"}


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", "200")
        yield


def start_cluster(num_nodes: int) -> Any:
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(num_nodes)]
    return cluster


@pytest.fixture(scope="module")
def cluster(_patient: None) -> Iterator[Any]:
    """A head without a CPU, and two nodes with one each."""
    made = start_cluster(2)
    yield made
    made.shutdown()


def launched(folder: Path, cluster: Any, plan: dict[str, Any] | None = None, **options: Any) -> Launched:
    return Launched(folder, plan, launcher="ray", address=cluster.address, **({"stall_timeout_s": 120} | options))


@needs_ray
def test_a_killed_process_starts_all_again(tmp_path: Path, cluster: Any):
    run = launched(tmp_path, cluster, {"1.1": {"3": "signal SIGKILL"}}, devices_per_host=1)
    status, out, err = run.end(PATIENCE_S)
    assert (status, run.bits) == (0, BITS), err
    assert out == "process 0 begins with step 0\nprocess 0 begins with step 2\n"
    assert "[host 1] process 1 is about to signal SIGKILL\njaxrl: host 1 was ended by SIGKILL after " in err
    assert (tmp_path / "run" / "hosts" / "1.log").read_text().count("begins") == 2


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill-agent", "kill-guard"])
def test_a_killed_agent_starts_all_again(tmp_path: Path, cluster: Any, what: str):
    run = launched(tmp_path, cluster, {"1.0": {"3": what}})
    status, _, err = run.end(PATIENCE_S)
    assert (status, run.bits) == (0, BITS), err
    assert "jaxrl: host 0: its agent is gone, on node " in err


@needs_ray
@pytest.mark.slow
def test_a_refused_process_ends_the_run_with_its_sentence(tmp_path: Path, cluster: Any):
    status, _, err = launched(tmp_path, cluster, {"1.1": {"0": "exit 2"}}).end(PATIENCE_S)
    assert (status, err) == (2, "jaxrl: host 1: process 1 cannot go on\n")
    assert not (tmp_path / "run" / "hosts").exists()


@needs_ray
@pytest.mark.slow
def test_a_signal_stops_the_run_at_a_boundary(tmp_path: Path, cluster: Any):
    run = launched(tmp_path, cluster, {"step_s": 0.3})
    run.until("at.1.1")
    run.process.send_signal(signal.SIGTERM)
    status, _, err = run.end(PATIENCE_S)
    assert (status, err) == (0, "")
    assert not (tmp_path / "run" / "bits").exists()


def hanging(folder: Path, cluster: Any, **options: Any) -> Launched:
    """A run that goes on only when somebody dies."""
    run = launched(folder, cluster, {"1.0": {"3": "hang"}, "1.1": {"3": "hang"}}, **options)
    run.until("at.1.1")
    time.sleep(1.0)
    return run


def until_gone(run: Launched, old: Collection[int], until_s: float) -> None:
    """Until none of the run's processes of before is left."""
    while any("stand_in" in command for pid, command in run.living().items() if pid in old):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def of_ray(pid: int) -> bool:
    return "ray::HostActor" in Path(f"/proc/{pid}/cmdline").read_text()


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "the process that uses ray", "actor"])
def test_whoever_is_killed_nothing_is_left(tmp_path: Path, cluster: Any, victim: str):
    run = hanging(tmp_path, cluster, heartbeat_s=5)
    old = run.living()
    match victim:
        case "launcher":
            pid = run.process.pid
        case "actor":
            (pid, *_) = [pid for pid in descendants(os.getpid()) if of_ray(pid)]
        case _:
            (pid,) = [pid for pid, command in old.items() if "ray_hosts" in command]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    if victim == "launcher":
        run.process.wait()
        run.assert_nothing_left()
        assert time.monotonic() - began < DETECTION_S
        run.again()
    else:
        until_gone(run, old, began + DETECTION_S + 5)
    status, _, err = run.end(PATIENCE_S)
    assert (status, run.bits) == (0, BITS), err


@needs_ray
@pytest.mark.slow
def test_a_node_that_is_lost_is_replaced(tmp_path: Path):
    cluster = start_cluster(2)
    try:
        run = hanging(tmp_path, cluster)
        old = run.living()
        began = time.monotonic()
        cluster.remove_node(cluster.workers[0], allow_graceful=False)
        until_gone(run, old, began + 2 * DETECTION_S + 1)
        cluster.add_node(num_cpus=1)
        status, _, err = run.end(PATIENCE_S)
        assert (status, run.bits) == (0, BITS), err
    finally:
        cluster.shutdown()


@needs_ray
@pytest.mark.slow
def test_a_cluster_without_room_is_an_end_with_what_is_missing(tmp_path: Path, cluster: Any):
    run = launched(tmp_path, cluster, num=3, stall_timeout_s=7)
    status, _, err = run.end(PATIENCE_S)
    waiting, over = err.splitlines()
    missing = "hosts.num (3) needs as many nodes with 1 CPU each, and 2 fit ("
    assert waiting.startswith(f"jaxrl: waiting for room on the ray cluster: {missing}")
    assert over.startswith(f"jaxrl: hosts.launcher=ray: {missing}")
    assert over.endswith("), for 7 s")
    assert status == 1


@needs_ray
@pytest.mark.slow
def test_no_cluster(tmp_path: Path):
    address = f"127.0.0.1:{free_port()}"
    run = Launched(tmp_path, launcher="ray", address=address)
    status, _, err = run.end(PATIENCE_S)
    assert status == 2
    (line,) = err.splitlines()
    assert line.startswith(f"jaxrl: hosts.address ({address}): there is no ray cluster (")
    assert line.endswith("): start one with `ray start --head`, or name one")


def start_head(address: str, port: int) -> subprocess.Popen[bytes]:
    command = ["start", "--head", "--block", "--num-cpus=1", "--include-dashboard=false"]
    command += [f"--node-ip-address={address}", f"--port={port}"]
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"RAY_gcs_rpc_server_reconnect_timeout_s": "5", "RAY_AUTH_MODE": "disabled"},
    )


def kill_head(head: subprocess.Popen[bytes]) -> None:
    """With all that is on its machine."""
    while found := [*descendants(head.pid), *([] if head.poll() is not None else [head.pid])]:
        for pid in found:
            kill(pid)
        time.sleep(0.01)


@needs_ray
@pytest.mark.slow
def test_a_head_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run waits for it, and goes on from the last checkpoint."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    import ray  # pyright: ignore[reportMissingImports]

    place = ray.util.get_node_ip_address(), free_port()
    address = f"{place[0]}:{place[1]}"
    head = start_head(*place)
    try:
        time.sleep(20)  # until its node is there
        run = Launched(
            *(tmp_path, {"1.0": {"3": "hang"}}),
            **{"launcher": "ray", "num": 1, "address": address, "stall_timeout_s": 150, "heartbeat_s": 5},
        )
        run.until("at.1.0")
        time.sleep(1)
        kill_head(head)
        time.sleep(5)
        head = start_head(*place)
        status, _, err = run.end(PATIENCE_S)
        assert (status, run.bits) == (0, BITS), err
    finally:
        kill_head(head)
