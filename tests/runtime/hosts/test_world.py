"""Worlds of real processes: what jax.distributed does, and that no process is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest
from worlds import Done, ended, free_port, script, started, wait_for

from jaxrl.config import ConfigError
from jaxrl.config.hosts import HostsSection
from jaxrl.runtime.hosts.environment import COORDINATOR, PROCESS_ID
from jaxrl.runtime.hosts.world import open_world

WHOLE = """
sys.path.insert(0, "tests/support")
from stores import check_store
from jaxrl.runtime.hosts.liveness import PROGRAM, STREAM
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
check_store(board)
assert [device.process_index for device in world.devices] == [0, 0, 1, 1], world.devices
assert world.local_devices == jax.local_devices()
mesh = Mesh(np.array(world.devices), "d", axis_types=(jax.sharding.AxisType.Auto,))
cut = NamedSharding(mesh, PartitionSpec("d"))
for step in range(5):
    assert not gate.stop_at(f"step {step}")
    gate.note(STREAM, str(step))
    with gate.phase("update"):
        gate.note(PROGRAM, "sum")
        x = jax.jit(lambda: jax.numpy.arange(8.0), out_shardings=cut)()
        total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
        assert total.addressable_data(0) == 28
if me == 1:
    os.kill(os.getpid(), signal.SIGTERM)
step = 5
while not gate.stop_at(f"step {step}"):
    gate.enter("update")
    step += 1
if me == 1:
    assert said.wait(60)
print("stopped", flush=True)
"""
STOP = """
import threading
from jaxrl.runtime.stop import Stop
said = threading.Event()
def say(text):  # in a thread of its own, for which the process does not wait
    print(text, flush=True)
    said.set()
stop = Stop()
stop.watch()
stop.save_first(say)
"""


def test_a_world_of_two():
    """The store, programs over both processes, and SIGTERM to one of them as a stop of both at one boundary."""
    program = script(WHOLE, before=STOP, wish=", stop")
    heard = []
    with started(program, devices=2) as processes:
        for each in ended(processes):
            assert (each.status, each.err) == (0, ""), each
            lines = each.out.splitlines()
            told = [line for line in lines if "terminated: the run saves" in line]
            assert lines[-2:] == ["stopped", "left"]
            heard.append(bool(told))
    assert heard == [False, True]


ROLLOUT = 'gate.at("rollout")\n'
ENTER = f'{ROLLOUT}gate.enter("update")'


@contextmanager
def opened(program: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes, once both have opened their world."""
    with started(program) as processes:
        for each in processes:
            wait_for(each, "open")
        yield processes


def both_ended(processes: list[subprocess.Popen[str]], within_s: float) -> Done:
    """They end in time from now, alike."""
    began_s = time.monotonic()
    first, second = ended(processes)
    for each in (first, second):
        assert each.ended_s - began_s < within_s, each
    assert (first.status, first.sentence) == (second.status, second.sentence), (first, second)
    return first


def assert_end_well(processes: list[subprocess.Popen[str]]) -> None:
    for done in ended(processes):
        assert (done.status, done.err) == (0, "")


@pytest.mark.parametrize("process", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["process-0", "process-1"])
def test_an_exception_ends_both(process: int):
    fails = f'{ROLLOUT}if me == {process}:\n  time.sleep(0.5); raise ValueError("as it was told")\n'
    with opened(script(fails + ENTER)) as processes:
        first = both_ended(processes, 5)
    assert first.status == 2
    assert first.sentence.startswith(f"process {process} (")
    assert first.sentence.endswith("failed in rollout: as it was told")


@pytest.mark.slow
def test_a_killed_process_is_missed():
    with opened(script(f"{ROLLOUT}time.sleep(60)", heartbeat_s=2)) as processes:
        time.sleep(1)  # it is heard in rollout
        processes[1].kill()
        began_s = time.monotonic()
        first, _ = ended(processes)
    assert 1 < first.ended_s - began_s < 6
    assert first.status == 1
    assert first.sentence.startswith("silent for 2 s (hosts.heartbeat_s): process 1 (")
    assert first.sentence.endswith("last heard in rollout")


@pytest.mark.slow
def test_process_0_is_killed():
    """The store goes with it, and jax aborts the other one at once, in its own words."""
    with opened(script(f"{ROLLOUT}time.sleep(60)", heartbeat_s=2)) as processes:
        time.sleep(1)
        processes[0].kill()
        began_s = time.monotonic()
        _, second = ended(processes)
    assert second.ended_s - began_s < 2
    assert second.status in (1, -signal.SIGABRT)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_stopped_process_is_missed(process: int):
    """SIGSTOP: the other one ends and names it; what is left of the stopped one is the launcher's business."""
    with opened(script(f"{ROLLOUT}time.sleep(60)", heartbeat_s=2)) as processes:
        time.sleep(1.5)
        processes[process].send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        (other,) = ended([processes[1 - process]])
    assert other.ended_s - began_s < 6
    assert other.status == 1
    assert other.sentence.startswith(f"silent for 2 s (hosts.heartbeat_s): process {process} (")


@pytest.mark.slow
def test_a_process_that_was_stopped_for_a_moment_goes_on():
    """Below the time of a heartbeat, process 0 included: nobody ends, and nobody is missed on waking."""
    body = f"{ROLLOUT}time.sleep(6)\ngate.enter('update')"
    with opened(script(body, heartbeat_s=5)) as processes:
        for each in processes:
            each.send_signal(signal.SIGSTOP)
            time.sleep(2.5)
            each.send_signal(signal.SIGCONT)
        assert_end_well(processes)


COLLECTIVE = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(world.devices), "d", axis_types=(jax.sharding.AxisType.Auto,))
x = jax.jit(lambda: jax.numpy.ones(2), out_shardings=NamedSharding(mesh, PartitionSpec("d")))()
gather = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, PartitionSpec()))
def dispatch():
    gate.note("program", "gather")
    jax.block_until_ready(gather(x))
gate.enter("update")
dispatch()
"""


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_skipped_program_ends_both(process: int):
    """One waits in a collective, which no signal of Python's ends, the other one at the next barrier."""
    body = f'{COLLECTIVE}if me != {process}:\n  dispatch()\ngate.enter("checkpoint")'
    with opened(script(body, stall_timeout_s=60)) as processes:
        first = both_ended(processes, 10)
    assert f"process {process} (" in first.sentence
    assert "has skipped a program of all hosts: it is at the gate before checkpoint" in first.sentence


@pytest.mark.slow
def test_a_collective_that_hangs_ends_both():
    body = f"{COLLECTIVE}if me == 0:\n  dispatch()\nelse:\n  time.sleep(60)"
    with opened(script(body, stall_timeout_s=3)) as processes:
        first = both_ended(processes, 10)
    assert first.sentence.startswith("no progress for 3")
    assert "in update (hosts.stall_timeout_s)" in first.sentence


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_signal_before_anything_can_be_saved_ends_both(process: int):
    before = "from jaxrl.runtime.stop import Stop; stop = Stop(); stop.watch()"
    with opened(script(f"{ROLLOUT}time.sleep(60)", before=before, wish=", stop")) as processes:
        time.sleep(0.5)
        processes[process].terminate()
        first = both_ended(processes, 5)
    assert first.status == 143
    assert first.sentence == f"process {process} ({os.uname().nodename}) failed in rollout: terminated"


# ---------------------------------------------------------------- starting


@pytest.mark.slow
def test_unequal_numbers_of_devices():
    with started(script("assert False"), devices=[2, 1]) as processes:
        first = both_ended(processes, 60)
    host = os.uname().nodename
    assert (first.status, first.sentence) == (
        2,
        f"all hosts must have as many devices: process 0 ({host}) has 2, process 1 ({host}) has 1; set "
        "hosts.devices_per_host",
    )


@pytest.mark.slow
def test_fewer_devices_of_each():
    body = "assert (len(world.devices), len(world.local_devices)) == (2, 1), world\ngate.enter('update')"
    before = "import dataclasses; hosts = dataclasses.replace(hosts, devices_per_host=1)"
    with started(script(body, before=before), devices=[2, 3]) as processes:
        assert_end_well(processes)


@pytest.mark.slow
def test_not_all_come():
    with started(script("assert False", stall_timeout_s=3), 1) as processes:
        began_s = time.monotonic()
        (done,) = ended(processes)
    assert done.ended_s - began_s < 15
    assert done.status == 1
    assert done.sentence.startswith(
        "waited 3 s (hosts.stall_timeout_s) for 2 processes (hosts.num) to meet at 127.0.0.1:"
    )


def refusal(monkeypatch: pytest.MonkeyPatch, address: str, process: int) -> str:
    """What a process says of an address before jax has it."""
    monkeypatch.setenv(COORDINATOR, address)
    monkeypatch.setenv(PROCESS_ID, str(process))
    monkeypatch.setattr("jaxrl.runtime.hosts.world._TRY_S", 0)
    with pytest.raises(ConfigError) as caught, open_world(HostsSection(num=2)):
        raise AssertionError
    return str(caught.value)


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch):
    """jax would crash."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(monkeypatch, address, 0)
    assert said.startswith(f"{COORDINATOR} ({address}): process 0 cannot listen on port")
    assert "Address already in use" in said


@pytest.mark.parametrize("process", [0, 1])
def test_a_coordinator_without_an_address(monkeypatch: pytest.MonkeyPatch, process: int):
    def unknown(*arguments: object, **named: object):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # no test asks the network
    said = refusal(monkeypatch, "no.such.host.invalid:12321", process)
    assert said.startswith(f"{COORDINATOR} (no.such.host.invalid:12321): {os.uname().nodename} does not know")


def test_an_address_that_is_not_of_process_0(monkeypatch):
    def connect(*arguments: object, **named: object):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr("jaxrl.runtime.hosts.world._TRY_S", 0)
    hosts = HostsSection(num=2, coordinator=f"localhost:{free_port()}")
    monkeypatch.setenv(PROCESS_ID, "0")
    with (
        pytest.raises(ConfigError, match="it does not lead to process 0, which runs on"),
        open_world(hosts),
    ):
        raise AssertionError


@pytest.mark.slow
def test_what_is_waited_for_is_said_soon():
    with started(script("assert False", stall_timeout_s=20), 1, own={0: {PROCESS_ID: "1"}}) as processes:
        (done,) = ended(processes)
    assert "jaxrl: still waiting at 127.0.0.1:" in done.err
    assert "process 0 does not answer ([Errno 111] Connection refused)" in done.err


@pytest.mark.slow
def test_one_process_with_a_coordinator():
    """As several: its collectives are gloo's, so that sums have the same order."""
    body = """
import jax
assert jax.distributed.is_initialized()
assert (world.num_processes, len(world.devices)) == (1, 2)
gate.enter("update")
"""
    with started(script(body, num=1), 1, devices=2) as processes:
        assert_end_well(processes)


def test_one_process_alone():
    with open_world(HostsSection()) as world:
        assert not jax.distributed.is_initialized()
        assert (world.process, world.num_processes) == (0, 1)
        assert world.devices == world.local_devices == jax.devices()
    with open_world(HostsSection(devices_per_host=2)) as world:
        assert world.devices == jax.devices()[:2]


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        ({"num": 2, "coordinator": "here"}, {}, "hosts.coordinator must be host:port of process 0, found 'here'"),
        ({"num": 2, "coordinator": "here:x"}, {}, "hosts.coordinator must be host:port"),
        (
            {"num": 2, "coordinator": "localhost:99999"},
            {},
            "'localhost:99999': a port is a number from 1 to 65535",
        ),
        ({"num": 2, "coordinator": "localhost:0"}, {}, "found 'localhost:0': a port is a number from 1 to 65535"),
        ({"num": 2}, {COORDINATOR: ":1"}, f"{COORDINATOR} must be host:port of process 0, found ':1'"),
        ({"num": 2}, {PROCESS_ID: "2"}, f"{PROCESS_ID} must be a whole number below hosts.num (2), found '2'"),
        ({"num": 2}, {PROCESS_ID: "-1"}, f"{PROCESS_ID} must be a whole number below hosts.num (2), found '-1'"),
        ({"devices_per_host": 99}, {}, "hosts.devices_per_host (99) must be at most the devices that there are on"),
    ],
)
def test_what_is_refused_at_once(monkeypatch, options, variables, words: str):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught, open_world(HostsSection(**options)):
        raise AssertionError
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("coordinator", ["", "127.0.0.1:{port}"])
def test_nothing_says_which_process_this_is(coordinator: str):
    before = (
        f"import dataclasses; hosts = dataclasses.replace(hosts, coordinator={coordinator.format(port=free_port())!r})"
    )
    own = {0: {COORDINATOR: ""}}
    program = script("assert False", before=f"{UNSET}; {before}")
    with started(program, 1, own=own) as processes:
        (done,) = ended(processes)
    assert done.status == 1  # no command line here: the error passes
    assert "ConfigError: hosts.num is 2 and nothing says which process this is: set hosts.coordinator" in done.err


def slurm(num: int, port: int) -> dict[int, dict[str, str]]:
    """What Slurm sets for each of `num` tasks, one on a node; all of them are on this machine."""
    common = {
        COORDINATOR: "",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(num),
        "SLURM_LOCALID": "0",
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
    }
    return {i: common | {"SLURM_PROCID": str(i)} for i in range(num)}


UNSET = f"del os.environ[{PROCESS_ID!r}]"


@pytest.mark.slow
def test_slurm_says_who_is_who():
    """And takes no device away, as jax would have it do for one process per device."""
    body = """
import jax
assert (me, world.num_processes) == (int(os.environ["SLURM_PROCID"]), 2)
assert jax.config.read("jax_cuda_visible_devices") == "all"
"""
    with started(script(body, before=UNSET), own=slurm(2, free_port())) as processes:
        assert_end_well(processes)


@pytest.mark.slow
def test_another_number_of_processes():
    with started(script("assert False", num=3, before=UNSET), own=slurm(2, free_port())) as processes:
        first = both_ended(processes, 60)
    assert (first.status, first.sentence) == (
        2,
        "hosts.num (3) must be the number of processes that were started (2)",
    )
