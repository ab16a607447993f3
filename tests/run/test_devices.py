"""Which devices a run of several processes uses, and the meshes over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxrl.config import from_mapping
from jaxrl.config.checks import host_problem
from jaxrl.models.shapes import SHAPES
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.run.devices import ProcessDevices, devices_by_process
from jaxrl.run.memory import MemoryPlan, memory_plan
from jaxrl.sharding.memory import DeviceMemory
from jaxrl.sharding.mesh import make_mesh


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


DEVICES = [Device(0, 0), Device(1, 0), Device(2048, 1), Device(2049, 1)]


def test_devices_come_in_the_order_of_processes():
    mixed = [DEVICES[i] for i in (2, 0, 3, 1)]
    assert devices_by_process(mixed, 2) == ((DEVICES[0], DEVICES[1]), (DEVICES[2], DEVICES[3]))
    assert devices_by_process(DEVICES, 2, per_process=1) == ((DEVICES[0],), (DEVICES[2],))
    assert devices_by_process(DEVICES[:3], 2, per_process=2) == ((DEVICES[0], DEVICES[1]), (DEVICES[2],))


@pytest.mark.parametrize(("hosts", "per_host", "each"), [(2, 4, 1), (4, 2, 2), (2, 3, 2), (8, 1, 4)])
def test_a_group_of_hosts_has_the_minor_axes_of_all(hosts: int, per_host: int, each: int):
    devices = tuple(jax.devices()[: hosts * per_host])
    own = [devices[i * per_host : (i + 1) * per_host] for i in range(hosts)]
    places = [ProcessDevices(i, hosts, own[i], devices, DeviceMemory("cpu", None, 1)) for i in range(hosts)]
    for first in range(0, hosts, each):
        (mesh,) = {place.rollout_mesh(each) for place in places[first : first + each]}
        assert mesh.devices.ravel().tolist() == [device for host in own[first : first + each] for device in host]
        whole, names = places[0].mesh, mesh.axis_names
        assert names == whole.axis_names[len(whole.axis_names) - len(names) :]
        assert all(mesh.shape[name] == whole.shape[name] for name in names)


def test_workers_stay_inside_their_hosts():
    def problem(num_devices: int, **rollout: int) -> str | None:
        config = from_mapping({"model": {"path": "m"}, "rollout": rollout, "hosts": {"num": 2}})
        return host_problem(config, num_devices)

    assert problem(4) is None
    assert problem(3) is None
    assert problem(4, num_workers=4, tensor_model_parallel_size=2) is None
    assert problem(2, tensor_model_parallel_size=4) == (
        "on each of 2 hosts rollout.tensor_model_parallel_size (4) must divide the devices of a host (2); a worker "
        "stays inside its host, but with rollout.hosts_per_worker"
    )
    assert problem(2, tensor_model_parallel_size=4, hosts_per_worker=2) is None
    assert problem(4, tensor_model_parallel_size=4, hosts_per_worker=2) == (
        "rollout.tensor_model_parallel_size (4) must be all devices of a worker where it spans hosts: "
        "rollout.hosts_per_worker (2) × the devices of a host (4)"
    )


def test_training_counts_all_devices_and_the_rollout_those_of_a_host():
    def plan(hosts: int, **rollout: int) -> MemoryPlan:
        config = from_mapping({"model": {"path": "m"}, "rollout": rollout, "hosts": {"num": hosts}})
        return memory_plan(config.with_types("gpu"), SHAPES["SmolLM2-135M"], 8, 40 << 30, "gpu")

    several, alone = plan(4, tensor_model_parallel_size=2), plan(1, num_workers=4, tensor_model_parallel_size=2)
    assert replace(several, config=alone.config) == alone, "one process with as many workers"
    assert several.worker_devices == 2
    assert several.resident["master weights"] < 2 * plan(1).resident["master weights"]


def test_a_sync_is_for_the_largest_degree_that_any_host_may_use():
    """Which degrees are in use elsewhere, no host knows; one program must do for all."""
    devices = jax.devices()[:4]
    executors: Any = [
        SimpleNamespace(tp=1, config=SimpleNamespace(max_tp=2), layout=SimpleNamespace(mesh=make_mesh(devices[:2])))
    ]
    mesh = make_mesh(devices[:2])
    (of_one,) = WorkerSet(mesh, executors)._layouts()
    (of_two,) = WorkerSet(mesh, executors, make_mesh(devices, 2))._layouts()
    assert (of_one.tp, of_two.tp) == (1, 2)
