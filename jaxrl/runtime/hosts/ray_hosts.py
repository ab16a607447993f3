"""Ray's side of launching with Ray: a process of its own, which reserves hosts and has an actor on each.

Purpose: ray may end the process that uses it (`jaxrl.processes.ray_process`), so the launcher starts this one. It makes
a placement group with a bundle per host, each on a node of its own (STRICT_SPREAD), which reserves the host's devices;
then an actor in each, which has the host's agent (`jaxrl.processes.process_supervisor`). Actors are never restarted by
ray: the launcher decides what starts again.

Who ends whom: an actor's agent ends when the actor does. An actor ends with the node, with this process (ray's rule),
and by itself when it is not asked for `heartbeat_s`, which also covers a cluster whose head is gone. So what a lost
world has started is gone after that time at the latest.

How a loss is seen: every actor is asked all the time, and answers after a second at the latest. Ray says at once that
an actor is dead; a node that breaks off is unreachable first, for which it has `UNREACHABLE_S`; a node that is silent
has `silence_s`.

Source: ray 2.60 (placement groups, actors); what was tried is in docs/several-hosts.md.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jaxrl.config.hosts import HostsSection
from jaxrl.processes.messages import MAX_REQUEST_BYTES, Channel, read_message, to_bytes
from jaxrl.processes.process_supervisor import END_S, SupervisorProcess
from jaxrl.processes.process_tree import adopt_orphans, kill_descendants
from jaxrl.processes.ray_process import begin, connect
from jaxrl.runtime.hosts.environment import FLAGS
from jaxrl.runtime.hosts.local_agents import silence_s
from jaxrl.runtime.hosts.local_devices import with_device_count
from jaxrl.types import RunFailed

UNREACHABLE_S = 1.0
"""Less than `restarts.SETTLE_S`: others may have failed by then because of it."""
NOTE_S = 5.0
"""After so long of waiting for room, what is missing is said."""
ALIVE_EVERY_S = 5.0
_LISTEN_S = 1.0
_POLL_S = 0.05
CONNECT_S = 120.0
_CONNECT_EVERY_S = 3.0
_PROBE_S = 10.0
_GET_S = 10.0  # for a value that ray says is there
_THREADS = "OMP_NUM_THREADS"  # ray sets it by the CPUs that an actor reserves

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class HostsSetup:
    """What the process must know.

    Attributes:
      env: variables of the launcher's for the processes of the run.
      on_cpu: whether they compute on CPUs, whatever the nodes have.
      again: whether the cluster was there before.
    """

    hosts: HostsSection
    run_dir: str
    env: Mapping[str, str]
    on_cpu: bool
    again: bool


class HostActor:
    """What one ray actor does: it has a host's agent."""

    def __init__(self, run_dir: str, host: str, silent_s: float) -> None:
        adopt_orphans()  # as `LocalAgents` does
        self._agent = SupervisorProcess(run_dir, host)
        self._lock = threading.Lock()
        self._asked_s, self._silent_s = time.monotonic(), silent_s
        threading.Thread(target=self._end_when_forgotten, daemon=True).start()

    def listen(self) -> bytes:
        """What the agent has said; waits up to a second for something."""
        self._asked_s = time.monotonic()
        poll = select.poll()
        poll.register(self._agent, select.POLLIN)
        poll.poll(_LISTEN_S * 1000)
        with self._lock:
            messages = self._agent.receive()
            return to_bytes({"messages": messages, "ended": self._agent.ended})

    def send(self, payload: bytes) -> None:
        message = read_message(payload)
        if "start" in message:  # what ray tells its own processes is not for others
            start = message["start"]
            own = [name for name in os.environ if name.startswith("RAY_") or name == _THREADS]
            start["without"] = sorted({*start["without"], *own} - start["environment"].keys())
        with self._lock:
            self._agent.send(message)

    def end(self) -> None:
        with self._lock:
            self._agent.begin_end()
            self._agent.finish_end(time.monotonic() + END_S)
            kill_descendants(())

    def _end_when_forgotten(self) -> None:
        while time.monotonic() - self._asked_s < self._silent_s:
            time.sleep(0.2)
        self.end()
        os._exit(1)


@dataclass(slots=True)
class _Host:
    process: int
    address: str
    actor: Any
    asked: Any = None  # ref of the listen() under way
    answered_s: float = field(default_factory=time.monotonic)
    broken_s: float | None = None  # since when it cannot be reached
    is_lost: bool = False
    is_there: bool = True  # the actor, for all that is known


class RayHosts:
    """The hosts of one world on a ray cluster.

    Args:
      ray: the module, initialised.
      say: sends the launcher a message: an agent's with `host`, `lost` with the reason, or a `note`.
    """

    def __init__(self, ray: Any, setup: HostsSetup, say: Say) -> None:
        self._ray, self._setup, self._say = ray, setup, say
        self._deadline_s = time.monotonic() + setup.hosts.stall_timeout_s
        self._note_s = time.monotonic() + NOTE_S
        self._group: Any = None
        self._bundle: dict[str, float] = {}
        self._hosts: list[_Host] = []

    def poll(self, timeout_s: float) -> None:
        """Places the hosts; then passes on what agents say, and says who is lost.

        Raises:
          RunFailed: the cluster has no room.
        """
        if not self._hosts:
            self._place(timeout_s)
            return
        refs = [host.asked for host in self._hosts if host.asked is not None]
        if refs:
            self._ray.wait(refs, num_returns=1, timeout=timeout_s)
            done = set(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        else:
            time.sleep(timeout_s)
            done = set()
        for host in self._hosts:
            if host.is_lost:
                continue
            if host.asked in done:
                self._take(host)
            elif time.monotonic() - host.answered_s > (silent_s := silence_s(self._setup.hosts)):
                self._lose(host, f"its ray actor has said nothing for {silent_s:g} s")

    def send(self, process: int, message: dict[str, Any]) -> None:
        if "start" in message:
            start = message["start"]
            start["environment"] = {**self._setup.env, **self._of_cluster(), **start["environment"]}
        host = self._hosts[process]
        if not host.is_lost:
            host.actor.send.remote(to_bytes(message))

    def close(self) -> None:
        """Ends agents and actors; what cannot be reached ends by itself (`HostActor`)."""
        failures = self._ray.exceptions.RayError
        with contextlib.suppress(failures):
            refs = [host.actor.end.remote() for host in self._hosts if host.is_there]
            if refs:
                self._ray.wait(refs, num_returns=len(refs), timeout=END_S)
        for host in self._hosts:
            with contextlib.suppress(failures):
                self._ray.kill(host.actor)
        if self._group is not None:
            with contextlib.suppress(failures):
                self._ray.util.remove_placement_group(self._group)

    # -- placing -----------------------------------------------------------------------------------------------------

    def _place(self, timeout_s: float) -> None:
        hosts, nodes = self._setup.hosts, self._nodes()
        if self._group is None:
            bundle = bundle_of(hosts, [node["Resources"] for node in nodes], self._setup.on_cpu)
            if bundle is not None:
                self._bundle = bundle
                self._group = self._ray.util.placement_group([bundle] * hosts.num, strategy="STRICT_SPREAD")
        if self._group is not None and self._group.wait(timeout_s):
            self._make_actors(nodes)
            return
        if self._group is None:
            time.sleep(timeout_s)
        overdue = time.monotonic() > self._deadline_s
        if overdue or time.monotonic() > self._note_s:
            missing = shortage(hosts, self._bundle or {"CPU": 1.0}, nodes)
            if overdue:
                raise RunFailed(f"hosts.launcher=ray: {missing}, for {hosts.stall_timeout_s:g} s")
            self._note_s = float("inf")
            self._say({"note": f"waiting for room on the ray cluster: {missing}"})

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _make_actors(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """An actor in each bundle; processes are numbered in the order of addresses, this machine first."""
        by_id = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        placed = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        here = self._ray.get_runtime_context().get_node_id()
        order = sorted(placed.items(), key=lambda each: (each[1] != here, by_id.get(each[1], ""), each[1]))
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        bundle = dict(self._bundle)
        asked = {"num_cpus": bundle.pop("CPU"), "num_gpus": bundle.pop("GPU", 0)}
        remote = self._ray.remote(**asked, resources=bundle, max_restarts=0, max_concurrency=4)(HostActor)
        for process, (index, node) in enumerate(order):
            address = by_id.get(node, "")
            host = address if address.startswith("127.") else ""
            where = strategy(placement_group=self._group, placement_group_bundle_index=int(index))
            arguments = self._setup.run_dir, host, self._setup.hosts.heartbeat_s
            actor = remote.options(scheduling_strategy=where).remote(*arguments)
            # the first answer waits for the actor's process
            until_s = max(self._deadline_s - silence_s(self._setup.hosts), time.monotonic())
            self._hosts.append(_Host(process, address, actor, actor.listen.remote(), until_s))

    def _of_cluster(self) -> dict[str, str]:
        """What a process of the run gets to know of the cluster and its devices."""
        found = {"RAY_ADDRESS": self._ray.get_runtime_context().gcs_address}
        count = self._setup.hosts.devices_per_host
        if count and not {"GPU", "TPU"} & self._bundle.keys():
            found[FLAGS] = with_device_count(self._setup.env.get(FLAGS, ""), count)
        return found

    # -- watching ----------------------------------------------------------------------------------------------------

    def _take(self, host: _Host) -> None:
        errors = self._ray.exceptions
        try:
            answer = read_message(self._ray.get(host.asked, timeout=_GET_S))
        except errors.ActorUnavailableError:
            host.broken_s = host.broken_s or time.monotonic()
            if time.monotonic() - host.broken_s > UNREACHABLE_S:
                self._lose(host, "its node cannot be reached")
            else:
                host.asked = host.actor.listen.remote()
            return
        except (errors.RayError, errors.GetTimeoutError) as error:
            self._lose(host, f"its ray actor is gone ({type(error).__name__})")
            return
        host.answered_s, host.broken_s = time.monotonic(), None
        for message in answer["messages"]:
            self._say({**message, "host": host.process, "address": host.address})
        if answer["ended"]:
            self._lose(host, "its agent is gone", is_there=True)
        else:
            host.asked = host.actor.listen.remote()

    def _lose(self, host: _Host, why: str, is_there: bool = False) -> None:
        host.is_lost, host.is_there, host.asked = True, is_there, None
        self._say({"lost": host.process, "why": f"{why}, on node {host.address}"})


def bundle_of(hosts: HostsSection, nodes: Sequence[Mapping[str, float]], on_cpu: bool) -> dict[str, float] | None:
    """What a host reserves; None: it depends on nodes that are not there yet.

    Devices are GPUs where any node has them, else TPUs, else CPUs. With `devices_per_host` 0 a host takes as many as
    each of the `num` largest nodes has.

    Args:
      nodes: resources of each.
    """
    for kind in () if on_cpu else ("GPU", "TPU"):
        counts = sorted((int(node.get(kind, 0)) for node in nodes), reverse=True)
        if counts and counts[0]:
            each = hosts.devices_per_host or (counts[hosts.num - 1] if len(counts) >= hosts.num else 0)
            return {"CPU": 1.0, kind: float(each)} if each else None
    return {"CPU": float(max(hosts.devices_per_host, 1))}


def shortage(hosts: HostsSection, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> str:
    """What the cluster lacks, in words."""
    wanted = " and ".join(f"{count:g} {kind}" for kind, count in bundle.items())
    fit = [node for node in nodes if all(node["Resources"].get(k, 0) >= count for k, count in bundle.items())]
    there = "; ".join(
        f"{node['NodeManagerAddress']}: "
        + ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}" for kind in ("CPU", "GPU", "TPU") if kind in bundle)
        for node in nodes
    )
    if len(fit) >= hosts.num:
        return f"{hosts.num} nodes with {wanted} each are there, but others hold what they have ({there})"
    return f"hosts.num ({hosts.num}) needs as many nodes with {wanted} each, and {len(fit)} fit ({there or 'no node'})"


def main() -> NoReturn:
    """The process; see `jaxrl.processes.ray_process.begin`."""
    sock, setup = begin()
    assert isinstance(setup, HostsSetup)
    channel = Channel(sock, MAX_REQUEST_BYTES)
    try:
        ray = _connected(setup, channel)
        hosts = RayHosts(ray, setup, lambda message: channel.send(to_bytes(message)))
        try:
            _serve(hosts, channel)
        finally:
            hosts.close()
        ray.shutdown()
    except (ValueError, RunFailed) as error:
        channel.send(to_bytes({"fatal": str(error), "users": isinstance(error, ValueError)}))
        while channel.wants_write and not channel.ended:
            time.sleep(_POLL_S)
            channel.flush()
    os._exit(0)


def _connected(setup: HostsSetup, channel: Channel) -> Any:
    """The module ray. A cluster that was there before may come back.

    Raises:
      ValueError: there is no cluster.
      RunFailed: it has not come back.
    """
    address, deadline_s = setup.hosts.address, time.monotonic() + setup.hosts.stall_timeout_s
    while True:
        given_up = threading.Timer(CONNECT_S, _give_up, (setup, channel))  # ray may wait for minutes, in its own words
        given_up.daemon = True
        given_up.start()
        try:
            _probe(address)
            return connect(address)
        except (OSError, RuntimeError) as error:
            said = str(error).strip().partition("\n")[0][:300]
            if not setup.again:
                raise ValueError(_no_cluster(address, said)) from None
            if time.monotonic() > deadline_s or channel.ended:
                raise RunFailed(
                    f"hosts.address ({address}): the ray cluster has not come back in "
                    f"{setup.hosts.stall_timeout_s:g} s ({said})"
                ) from None
        finally:
            given_up.cancel()
        channel.send(to_bytes({"alive": True}))
        time.sleep(_CONNECT_EVERY_S)


def _probe(address: str) -> None:
    """Raises OSError if nobody listens at host:port; other forms of an address are ray's to understand."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()


def _give_up(setup: HostsSetup, channel: Channel) -> None:
    """Ends the process, which waits for ray. Where the cluster was there before, the launcher tries again."""
    if not setup.again:
        said = _no_cluster(setup.hosts.address, f"ray has not connected in {CONNECT_S:g} s")
        channel.send(to_bytes({"fatal": said, "users": True}))
    os._exit(1)


def _no_cluster(address: str, said: str) -> str:
    return (
        f"hosts.address ({address}): there is no ray cluster ({said}): start one with `ray start --head`, or name one"
    )


def _serve(hosts: RayHosts, channel: Channel) -> None:
    """Until the launcher closes the socket."""
    said_s = time.monotonic()
    while not channel.ended:
        for frame in channel.receive():
            hosts.send(*pickle.loads(frame))
        hosts.poll(_POLL_S)
        if time.monotonic() - said_s > ALIVE_EVERY_S:
            said_s = time.monotonic()
            channel.send(to_bytes({"alive": True}))
        channel.flush()
