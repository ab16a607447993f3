"""Devices of several processes on one machine, from a description of it."""

import pytest

from jaxrl.config import ConfigError
from jaxrl.config.hosts import HostsSection
from jaxrl.runtime.hosts.local_devices import (
    dealt,
    environments,
    has_tpu,
    platform_of,
    visible_gpus,
    with_device_count,
)

GPUS = ["0", "1", "2", "3", "4", "5", "6", "7"]
NONE: list[str] = []


def hosts(num: int, each: int) -> HostsSection:
    return HostsSection(num=num, launcher="local", devices_per_host=each)


@pytest.mark.parametrize(
    ("num", "each", "platform", "gpus", "expected"),
    [
        (2, 4, "cpu", NONE, [{"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=4"}] * 2),
        (2, 0, "cpu", NONE, [{}, {}]),
        (2, 0, "gpu", GPUS, [{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}]),
        (2, 1, "gpu", GPUS, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (3, 0, "gpu", GPUS, [{"CUDA_VISIBLE_DEVICES": each} for each in ("0,1", "2,3", "4,5")]),
        (2, 1, "gpu", ["GPU-a", "MIG-b"], [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "MIG-b"}]),
        (1, 0, "tpu", NONE, [{}]),
    ],
)
def test_devices_are_dealt_out_in_order(num, each, platform, gpus, expected):
    flags = "--a=1 --xla_force_host_platform_device_count=8"
    assert dealt(hosts(num, each), platform, gpus, flags) == expected


@pytest.mark.parametrize(
    ("num", "each", "platform", "gpus", "sentence"),
    [
        (
            *(3, 4, "gpu", GPUS),
            "hosts.launcher=local: hosts.num (3) × hosts.devices_per_host (4) needs 12 GPUs on this machine, which "
            "shows 8 (0, 1, 2, 3, 4, 5, 6, 7)",
        ),
        (2, 0, "gpu", NONE, "hosts.launcher=local: hosts.num (2) needs 2 GPUs on this machine, which shows 0 (none)"),
        (
            *(2, 0, "tpu", NONE),
            "hosts.launcher=local: hosts.num (2) must be 1 on a TPU, whose chips belong to one process; take another "
            "launcher, with a machine for each process",
        ),
    ],
)
def test_too_few_devices(num, each, platform, gpus, sentence):
    with pytest.raises(ConfigError) as caught:
        dealt(hosts(num, each), platform, gpus, "")
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "has_plugin", "has_tpu", "platform"),
    [
        ("", 8, True, False, "gpu"),
        ("", 8, False, False, "cpu"),
        ("", 0, True, False, "cpu"),
        ("", 0, False, True, "tpu"),
        ("cpu", 8, True, True, "cpu"),
        ("cuda,cpu", 0, True, False, "gpu"),
        ("tpu", 0, False, False, "tpu"),
    ],
)
def test_the_platform_that_jax_will_use(wanted, num_gpus, has_plugin, has_tpu, platform):
    environment = {"JAX_PLATFORMS": wanted} if wanted else {}
    assert platform_of(environment, num_gpus, has_plugin=has_plugin, has_tpu=has_tpu) == platform


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, False),
        ({"dev/accel0": ""}, True),
        ({"dev/vfio/0": "", "pci/0000:00:05.0/vendor": "0x1ae0\n", "pci/0000:00:05.0/device": "0x006f\n"}, True),
        # a GPU that is handed on, the network card of a cloud, and another maker's device of a TPU's number
        ({"dev/vfio/1": "", "dev/vfio/vfio": "", "pci/a/vendor": "0x10de\n", "pci/a/device": "0x2330\n"}, False),
        ({"pci/a/vendor": "0x1ae0\n", "pci/a/device": "0x0042\n"}, False),
        ({"pci/a/vendor": "0x10de\n", "pci/a/device": "0x0063\n"}, False),
        ({"pci/a/vendor": "0x1ae0\n"}, False),
    ],
)
def test_a_tpu_is_found_by_its_numbers(tmp_path, files, found):
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert has_tpu(tmp_path / "dev", tmp_path / "pci") == found


def test_visible_gpus_are_those_that_the_environment_leaves():
    seen = [visible_gpus({"CUDA_VISIBLE_DEVICES": text}) for text in ("2,3", "1, GPU-x", "", "-1", "0,-1,1")]
    assert seen == [["2", "3"], ["1", "GPU-x"], [], [], ["0"]]


def test_a_cpu_by_name_needs_no_gpu():
    given = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": "--b"}
    assert environments(hosts(2, 3), given) == [{"XLA_FLAGS": "--b --xla_force_host_platform_device_count=3"}] * 2


def test_another_count_replaces_the_one_that_was_there():
    assert with_device_count("--xla_force_host_platform_device_count=8 --c", 2) == (
        "--c --xla_force_host_platform_device_count=2"
    )
