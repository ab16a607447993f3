"""The hosts of a run as Ray actors: one on each, and calls to all of them in one order.

With `hosts.num` above 1 the process that the user has started is the controller. `open_cluster` starts an actor
(`jaxrl.run.host_actor`) on each host, in a placement group with a bundle per host, and joins them to one world of
`jax.distributed`. `RemoteHost` has the methods of `jaxrl.run.host.Host`, and each is a call to all actors: their
programs run on the devices of all hosts, so all must run the same ones in the same order, and the controller's calls
are that order. A batch goes into Ray's object store once.

An actor that dies is Ray's to report. A call that takes long is watched: while any host reports progress the run
continues, and after `hosts.stall_timeout_s` without any it ends, with the host and what it was doing.

Source: Ray's placement groups and actors.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.config.options import HostsSection
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.record.files import reason
from jaxrl.rollout.remote import RemoteExecutor, RemoteWorkers
from jaxrl.run.host import Host, HostDevices, LoadRequest
from jaxrl.run.host_agreement import disagreement, mark_in, software
from jaxrl.training.steps import Choice
from jaxrl.types import HostLost, RunFailed, TrainBatch

_LOOK_S = 1.0
_ASK_S = 5.0
_MOST_SHARED = 4096
_INHERITED = ("JAX_", "XLA_", "JAXRL_", "OMP_", "OPENBLAS_", "HF_", "NCCL_", "LIBTPU_", "PYTHONPATH")
"""Beginnings of the names of environment variables that actors get from the controller."""
_SHARED: OrderedDict[int, Any] = OrderedDict()  # in an actor: what has come, by its number


def shared(numbered: tuple[int, Any]) -> Any:
    """In an actor: the object of a number; the same one each time, while it is among the newest."""
    import ray  # pyright: ignore[reportMissingImports]  (an optional extra)

    number, ref = numbered
    if number not in _SHARED:
        _SHARED[number] = pickle.loads(ray.get(ref))
    return _newest(_SHARED, number)


def _newest(known: OrderedDict[Any, Any], key: Any) -> Any:
    """The value of a key, which is the newest from here on; the oldest go."""
    known.move_to_end(key)
    while len(known) > _MOST_SHARED:
        known.popitem(last=False)
    return known[key]


class Cluster:
    """The actors of a run, in the order of the hosts. `bundle`: what each takes of its node; `beat`: called while a
    call runs and some host reports progress; `names`: of the hosts' machines, with process ids."""

    def __init__(
        self,
        ray: Any,
        actors: Sequence[Any],
        hosts: HostsSection,
        bundle: Mapping[str, float],
        beat: Callable[[str], None],
    ) -> None:
        self._ray, self.actors, self._hosts, self.bundle, self._beat = ray, tuple(actors), hosts, bundle, beat
        self.names = [f"host {i}" for i in range(len(actors))]
        self._seen = [0] * len(actors)
        self._doing = ["starting"] * len(actors)
        self._seen_s = time.monotonic()
        self.committed = -1
        self._lost = ""  # why no call is sent any more
        self._numbers = itertools.count()

    # -- calls -------------------------------------------------------------------------------------------------------

    def send(self, method: str, *arguments: Any, hosts: Sequence[int] | None = None) -> list[Any]:
        """Begins a call of a method of `HostActor` on all hosts, or on some; `receive` takes the result."""
        if self._lost:
            raise HostLost(self._lost)
        chosen = self.actors if hosts is None else [self.actors[i] for i in hosts]
        return [getattr(actor, method).remote(*arguments) for actor in chosen]

    def receive(self, sent: Sequence[Any]) -> list[Any]:
        """Waits for the answers to calls, by host. Raises what a call has raised, and HostLost where a host has died or
        there was no progress for too long."""
        self._seen_s = time.monotonic()
        while True:
            try:
                return self._ray.get(list(sent), timeout=_LOOK_S)
            except self._ray.exceptions.GetTimeoutError:
                self.look()
            except self._ray.exceptions.RayTaskError as error:
                if silent := self._ask():  # a sum over all hosts fails where one of them is gone
                    raise self._losing(f"{self._named(silent[0])} does not answer") from error
                raise error.cause from None
            except self._ray.exceptions.RayActorError as error:
                self._ask()
                raise self._losing("a host has died") from error

    def first(self, sent: Sequence[Sequence[Any]]) -> int:
        """Waits for the answer of one host to one of several calls; which one it is. Raises HostLost as `receive`."""
        self._seen_s, refs = time.monotonic(), [answers[0] for answers in sent]
        while not (done := self._ray.wait(refs, timeout=_LOOK_S)[0]):
            self.look()
        return refs.index(done[0])

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """A call to all hosts; their answers."""
        return self.receive(self.send(method, *arguments))

    def put(self, value: Any) -> Any:
        """Puts a value into the object store, once; as an argument it arrives as itself."""
        return self._ray.put(value)

    def share(self, kind: type) -> None:
        """Sends an object of this class once: later calls have its number, by which actors know it again."""
        known: OrderedDict[Any, tuple[int, Any]] = OrderedDict()

        def numbered(value: Any) -> tuple[int, Any]:
            if value not in known:
                known[value] = next(self._numbers), self._ray.put(pickle.dumps(value))
            return _newest(known, value)

        self._ray.util.register_serializer(kind, serializer=numbered, deserializer=shared)

    def look(self) -> None:
        """Asks all hosts how far they are. Raises HostLost where one has died, or none makes progress for too long."""
        silent = self._ask()
        waited_s = time.monotonic() - self._seen_s
        if waited_s > self._hosts.stall_timeout_s:
            who = ", ".join(self._named(i) for i in silent or range(len(self.actors)))
            raise self._losing(f"no host made progress for {waited_s:.0f} s (hosts.stall_timeout_s); silent: {who}")

    def _ask(self) -> list[int]:
        """Takes in how far all hosts are; returns those that do not answer. Raises HostLost where one has died."""
        refs = [actor.progress.remote() for actor in self.actors]
        answered, _ = self._ray.wait(refs, num_returns=len(refs), timeout=_ASK_S)
        for i, ref in enumerate(refs):
            if ref not in answered:
                continue
            try:
                beats, self._doing[i], committed = self._ray.get(ref)
            except self._ray.exceptions.RayActorError as error:
                raise self._losing(f"{self._named(i)} has died") from error
            self.committed = max(self.committed, committed) if i == 0 else self.committed
            if beats != self._seen[i]:
                self._seen[i], self._seen_s = beats, time.monotonic()
                self._beat("")
        return [i for i, ref in enumerate(refs) if ref not in answered]

    def _losing(self, sentence: str) -> HostLost:
        self._lost = sentence
        return HostLost(sentence)

    def _named(self, host: int) -> str:
        return f"{self.names[host]}, in {self._doing[host]!r}"


@contextmanager
def open_cluster(
    hosts: HostsSection, beat: Callable[[str], None], before: Mapping[str, float] | None = None
) -> Iterator[Cluster]:
    """Starts the actors and joins them; ends them however the block ends. Raises ConfigError where Ray is not installed
    or its cluster lacks the requested hosts, and RunFailed where it has them no more, since one was lost. `before`:
    what an actor took of its node before that; None: the run starts."""
    software()  # before an actor starts: the source may change during a run
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")  # it is said here, in a sentence
    try:
        import ray  # pyright: ignore[reportMissingImports]  (an optional extra)
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            PlacementGroupSchedulingStrategy,
        )
    except ImportError as error:
        raise ConfigError(f"hosts.num ({hosts.num}) needs ray: pip install 'jaxrl[ray]' ({error})") from None
    from jaxrl.run.host_actor import GROUPS, HostActor

    _connect(ray, hosts)
    actors: list[Any] = []
    group = None
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        bundle = before or bundle_of(hosts, nodes, on_cpu=os.environ.get("JAX_PLATFORMS") == "cpu")
        strategy = "STRICT_SPREAD" if len(nodes) >= hosts.num else "SPREAD"
        group = ray.util.placement_group([dict(bundle)] * hosts.num, strategy=strategy)
        until_s = time.monotonic() + hosts.stall_timeout_s
        while not (is_there := group.wait(min(_ASK_S, hosts.stall_timeout_s))) and time.monotonic() <= until_s:
            beat("")  # a cluster may have to start nodes first
        if not is_there:
            room = f"hosts.num ({hosts.num}): Ray's cluster has no room for that many bundles of {dict(bundle)}"
            if before is None:
                raise ConfigError(room)
            raise RunFailed(f"{room} since a host was lost; the same command resumes once it has")
        members: Any = {
            name: ray.method(concurrency_group=group)(getattr(HostActor, name)) for name, group in GROUPS.items()
        }
        remote: Any = ray.remote
        kind = remote(concurrency_groups=dict.fromkeys(GROUPS.values(), 1))(type("HostActor", (HostActor,), members))
        variables = {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}
        for i in range(hosts.num):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            rest = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")}
            options = kind.options(
                num_cpus=1,
                num_gpus=bundle.get("GPU", 0),
                resources=rest,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": variables},
            )
            actors.append(options.remote(i, hosts))
        cluster = Cluster(ray, actors, hosts, bundle, beat)
        found = cluster.receive([actor.address.remote() for actor in actors])
        cluster.names = [f"host {i} ({name}, process {pid})" for i, (_, name, pid) in enumerate(found)]
        machines = [name for _, name, _ in found]
        joining = [
            actor.join.remote(found[0][0], machines.count(name)) for actor, name in zip(actors, machines, strict=True)
        ]
        counts = cluster.receive(joining)
        if len(set(counts)) > 1:
            raise ConfigError(f"all hosts must have as many devices, found {counts}: set hosts.devices_per_host")
        yield cluster
    finally:
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor, no_restart=True)
        if group is not None:
            with suppress(Exception):
                ray.util.remove_placement_group(group)
        ray.shutdown()


def bundle_of(hosts: HostsSection, nodes: Sequence[Mapping[str, float]], *, on_cpu: bool) -> dict[str, float]:
    """The resources that an actor takes of a node. `nodes`: each node's resources, as Ray names them; `on_cpu`: whether
    the run computes on CPUs even if there are accelerators."""
    actors = -(-hosts.num // len(nodes))  # on a node
    for kind in () if on_cpu else ("GPU", "TPU"):
        if any(node.get(kind) for node in nodes):
            least = min(node[kind] for node in nodes if node.get(kind))
            return {"CPU": 1.0, kind: float(hosts.devices_per_host or least // actors)}
    return {"CPU": 1.0}


def _connect(ray: Any, hosts: HostsSection) -> None:
    """Joins the cluster at `hosts.address`; without one, makes a cluster on this machine."""
    address = hosts.address or os.environ.get("RAY_ADDRESS", "")
    _refuse_silent(address)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address=address, **options)
        else:
            ray.init(address="local", num_cpus=max(os.cpu_count() or 1, hosts.num), **options)
    except (ConnectionError, ValueError) as error:
        hint = "; RAY_AUTH_MODE (token, disabled) must be what its nodes were started with" if address else ""
        raise ConfigError(f"hosts.address ({address}): {error}{hint}") from None
    for number, handler in kept.items():
        signal.signal(number, handler)  # signals stay the program's


def _refuse_silent(address: str) -> None:
    """Raises ConfigError where nothing answers at host:port; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), _ASK_S).close()
        except OSError as error:
            raise ConfigError(f"hosts.address ({address}): nothing answers there ({reason(error)})") from None


class RemoteTrainer:
    """The policy or the critic in training on all hosts: `jaxrl.training.training_step.Trainer`."""

    def __init__(self, cluster: Cluster, name: Literal["trainer", "critic"]) -> None:
        self._cluster, self._name = cluster, name

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        return self._call("train_step", batch)

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"] = "actor") -> list[np.ndarray]:
        return self._call("token_logprobs", batch, which)

    def token_values(self, batch: TrainBatch) -> list[np.ndarray]:
        return self._call("token_values", batch)

    def _call(self, method: str, batch: TrainBatch, *arguments: str) -> Any:
        return self._cluster.all("learn", f"{self._name}.{method}", self._cluster.put(batch), *arguments)[0]


class RemoteTeacher:
    """A teacher on all hosts."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def annotate(self, batch: TrainBatch) -> None:
        found = self._cluster.all("annotate", self._cluster.put(batch))[0]
        batch.teacher_logprobs, batch.teacher_top_logprobs, batch.teacher_ids = found


class RemoteStore:
    """The checkpoints of a run on several hosts, as its controller knows them."""

    def __init__(self, cluster: Cluster, chosen: Choice | None, latest: int | None, on_commit: Callable[[int], None]):
        self._cluster, self.chosen, self._latest, self._on_commit = cluster, chosen, latest, on_commit

    def latest_step(self) -> int | None:
        self._cluster.look()
        if self._cluster.committed > (-1 if self._latest is None else self._latest):
            self._latest = self._cluster.committed
            self._on_commit(self._latest)
        return self._latest

    def last_good(self) -> str:
        step = self._latest
        return "there is no checkpoint yet" if step is None else f"the last good checkpoint is step {step}"

    def tidy(self) -> None:
        self._cluster.all("call", "store.tidy")

    def wait(self) -> None:
        self._cluster.all("call", "store.wait")
        self.latest_step()

    def close(self) -> None:
        with suppress(HostLost):
            self._cluster.all("call", "store.close")


class RemoteHost:
    """All hosts of a run as one: the methods of `jaxrl.run.host.Host`, each a call to all. Those that need no more
    than that are not written here (`__getattr__`)."""

    params = None  # they are on the hosts
    rollout_mesh = None
    models = ()  # whose programs are compiled beside the rollout's: hosts compile theirs

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.trainer = RemoteTrainer(cluster, "trainer")
        self.critic: RemoteTrainer | None = None
        self.teacher: RemoteTeacher | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of `Host`; the first host's answer counts."""
        if name.startswith("_") or not callable(getattr(Host, name, None)):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self.cluster.all("call", name, *arguments)[0]

    def open(self, config: Config, kind: str, earlier: Config | None) -> HostDevices:
        """Raises ConfigError for hosts with other versions, sources, files or settings, or another run directory."""
        self.config, names, folder = config, self.cluster.names, config.trainer.run_dir
        with mark_in(folder) as mark:
            found = self.cluster.all("facts", config, mark)
        if problem := disagreement([software(), *(facts for facts, _ in found)], ["the controller", *names]):
            raise ConfigError(problem)
        for name, (_, problem) in zip(names, found, strict=True):
            if problem:
                raise ConfigError(f"all hosts must share the folder trainer.run_dir ({folder}): on {name} {problem}")
        self.devices: HostDevices = self._call("open", config, kind, earlier)
        return self.devices

    def place_rollout(self, earlier: Config | None) -> tuple[Config, list[str], int, int]:
        found = self._call("place_rollout", earlier)
        self.config, self._num_rollout = found[0], found[3]
        return found

    def open_store(self, folder: Path, on_commit: Callable[[int], None]) -> RemoteStore:
        chosen, latest = self.cluster.all("open_store", folder)[0]
        return RemoteStore(self.cluster, chosen, latest, on_commit)

    def load(self, asked: LoadRequest, tokenizer: Tokenizer | None = None) -> str | None:
        del tokenizer  # a host reads it again
        self.critic = RemoteTrainer(self.cluster, "critic") if asked.critic_updates else None
        self.teacher = None if asked.teacher is None else RemoteTeacher(self.cluster)
        return self.cluster.all("load", asked)[0]

    def build_workers(self) -> RemoteWorkers:
        """The executors of all hosts, in the order of the workers' numbers."""
        cluster, span = self.cluster, self.config.rollout.hosts_per_worker
        facts = cluster.all("build_workers")
        executors = [
            RemoteExecutor(_HostsOfWorker(cluster, range(first, first + span)), worker, each, self.devices.platform)
            for first in range(0, len(facts), span)
            for worker, each in enumerate(facts[first])
        ]
        self.workers = RemoteWorkers(cluster, executors, self._num_rollout)
        return self.workers


class _HostsOfWorker:
    """The channel to the hosts of one worker: each carries out a call, and the first one's answer counts."""

    def __init__(self, cluster: Cluster, hosts: Sequence[int]) -> None:
        self._cluster, self._hosts = cluster, hosts

    def send(self, method: str, *arguments: Any) -> list[Any]:
        return self._cluster.send(method, *arguments, hosts=self._hosts)

    def receive(self, sent: list[Any]) -> Any:
        return self._cluster.receive(sent)[0]

    def first(self, sent: Sequence[list[Any]]) -> int:
        return self._cluster.first(sent)

    def share(self, kind: type) -> None:
        self._cluster.share(kind)
