"""`jaxrl hosts`: who is there, do they agree, and how fast they hear each other; trains nothing.

Every process of the run is started with it, as with `jaxrl train`. Process 0 prints; a disagreement is the same
sentence on all of them. Times are what a run pays: of the key-value store (`jaxrl.runtime.hosts.key_value_store`)
for notices and barriers, of collectives over all devices for weights, tokens and gradients.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl
from jaxrl.config import Config, ConfigError
from jaxrl.config.checks import host_problem
from jaxrl.record.files import Removing, refuse_file, write_whole
from jaxrl.record.run_dir import inputs_of, refuse_overwriting
from jaxrl.runtime.hosts.consistency import check_consistency
from jaxrl.runtime.hosts.liveness import PROGRAM
from jaxrl.runtime.hosts.world import World, open_world
from jaxrl.runtime.stop import Stop
from jaxrl.sharding.memory import device_bytes, in_bytes
from jaxrl.sharding.mesh import platform_of

_CALLS = 50  # of the store, of each kind
_REPEATS = 5  # of a collective; the median counts
_BYTES = {"cpu": 2**22}
_BYTES_ELSEWHERE = 2**27
_VALUE = b"x" * 1024


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one kind of call: the median, and what one in twenty exceeds."""

    p50_ms: float
    p95_ms: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Of a collective over all devices.

    Attributes:
      num_bytes: of the whole array that every device ends with.
      seconds: the median.
      bytes_per_s: that a device must receive from others, by the least that the collective can do.
    """

    num_bytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class HostsReport:
    """What `jaxrl hosts` prints.

    Attributes:
      hosts: a row for each process.
      device_bytes: memory of one device, the least of all; None if the platform does not tell.
      start_s: until the world was open. agreement_s: for the comparison.
      board: latencies of the key-value store by call; empty with one process.
      collectives: by name; empty with one device.
    """

    hosts: list[dict[str, Any]]
    device_bytes: int | None
    start_s: float
    agreement_s: float
    board: Mapping[str, Latency]
    collectives: Mapping[str, Bandwidth]

    def lines(self) -> list[str]:
        rows: list[tuple[str, ...]] = [("process", "host", "devices", "kind", "memory of each", "jaxrl", "jax")]
        for each in self.hosts:
            memory = "not told" if each["device_bytes"] is None else in_bytes(each["device_bytes"])
            rows.append((*(str(each[k]) for k in ("process", "host", "devices", "kind")), memory, *each["versions"]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.append(f"they agree (world {self.start_s:.1f} s, comparison {self.agreement_s:.2f} s)")
        lines += [
            f"{name:<12}  p50 {each.p50_ms:.2f} ms  p95 {each.p95_ms:.2f} ms" for name, each in self.board.items()
        ]
        lines += [
            f"{name:<12}  {in_bytes(each.num_bytes)} in {each.seconds * 1e3:.2f} ms  {each.bytes_per_s / 1e9:.3g} GB/s"
            for name, each in self.collectives.items()
        ]
        return lines


def hosts(
    config: Config,
    out: str = "",
    *,
    stop: Stop | None = None,
    say: Callable[[str], None] = print,
    removing: Removing = nullcontext,
) -> HostsReport:
    """Opens the world, compares the hosts, measures, and lets process 0 say what it found.

    Args:
      out: a file for the report as JSON, written by process 0; empty: none.
      stop: the signals of the program; without one they are the caller's.
      say: shows a line. removing: of those signals.

    Raises:
      ConfigError: what the hosts were given does not go together, or does not fit them.
    """
    began_s = time.monotonic()
    with open_world(config.hosts, stop) as world:
        if out and world.process == 0:
            refuse_file(out, "--json")
            refuse_overwriting(out, "--json", inputs_of(config))
        started_s = time.monotonic()
        if (problem := host_problem(config, len(world.local_devices))) is not None:
            raise ConfigError(problem)
        least_bytes = check_consistency(world.barrier, config, world.local_devices)
        agreed_s = time.monotonic()
        rows = _rows(world)
        latencies = _store_latencies(world) if world.num_processes > 1 else {}
        collectives = _bandwidths(world) if len(world.devices) > 1 else {}
        report = HostsReport(rows, least_bytes, started_s - began_s, agreed_s - started_s, latencies, collectives)
        if world.process == 0:
            if out:
                write_whole(out, json.dumps(asdict(report), indent=2) + "\n", removing=removing)
            for line in report.lines():
                say(line)
    return report


def _rows(world: World) -> list[dict[str, Any]]:
    """What the table says of each process; on other processes than 0 nothing."""
    device, store = world.local_devices[0], world.store
    row = {
        "process": world.process,
        "host": world.host,
        "devices": len(world.local_devices),
        "kind": f"{platform_of(device)} {device.device_kind}" if device.platform != device.device_kind else "cpu",
        "device_bytes": device_bytes(world.local_devices),
        "versions": [jaxrl.__version__, jax.__version__],
    }
    store.put(f"row/{store.process}", json.dumps(row).encode())
    world.barrier.enter("showing who is there")
    world.barrier.leave()
    if world.process:
        return []
    return sorted((json.loads(value) for _, value in store.folder("row")), key=lambda row: row["process"])


def _store_latencies(world: World) -> dict[str, Latency]:
    """All processes at once, as in a run; process 0's times."""
    store, barrier = world.store, world.barrier
    own = f"latency/{store.process}"

    def read_of_next(i: int) -> None:
        """A value that another process has just written, as the stream's are."""
        assert store.get(f"latency/{(store.process + 1) % store.num_processes}/{i}", barrier.stall_timeout_s)

    calls: dict[str, Callable[[int], object]] = {
        "put 1 KiB": lambda i: store.put(f"{own}/{i}", _VALUE),
        "get 1 KiB": read_of_next,
        "barrier": lambda i: store.barrier(f"latency {i}", barrier.stall_timeout_s),
        "gate": lambda i: barrier.enter("measuring the gate"),
    }
    found = {}
    for name, call in calls.items():
        barrier.enter(f"measuring {name}")
        times = []
        for i in range(_CALLS):
            began_s = time.perf_counter()
            call(i)
            times.append((time.perf_counter() - began_s) * 1e3)
        times.sort()
        found[name] = Latency(statistics.median(times), times[-(-95 * _CALLS // 100) - 1])
    store.delete(own)
    barrier.leave()
    return found


def _bandwidths(world: World) -> dict[str, Bandwidth]:
    """All-gather and all-reduce of float32 over all devices.

    A device must receive (n - 1) / n of an all-gather's result, and twice as much for an all-reduce (a reduce-scatter
    and an all-gather).
    """
    count = len(world.devices)
    mesh = Mesh(np.asarray(world.devices, dtype=object), ("d",), axis_types=(AxisType.Auto,))
    total = _BYTES.get(world.devices[0].platform, _BYTES_ELSEWHERE)
    length = max(total // 4 // count, 1) * count
    cut, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    world.barrier.enter("measuring collectives")
    # each program and its argument: an all-gather of shards, and a sum of a whole array of each device
    make = jax.jit(lambda: jax.numpy.ones(length, jax.numpy.float32), out_shardings=cut)
    make_all = jax.jit(lambda: jax.numpy.ones((count, length), jax.numpy.float32), out_shardings=cut)
    gather = jax.jit(lambda x: x, out_shardings=whole)
    reduce = jax.jit(lambda x: x.sum(0), out_shardings=whole)
    found = {}
    for name, argument, program, passes in (
        ("all-gather", make(), gather, 1),
        ("all-reduce", make_all(), reduce, 2),
    ):
        seconds = statistics.median(_collective_times(world, name, program, argument))
        received = passes * 4 * length * (count - 1) / count
        found[name] = Bandwidth(4 * length, seconds, received / seconds)
    world.barrier.leave()
    return found


def _collective_times(world: World, name: str, program: Callable[[Any], Any], argument: Any) -> Sequence[float]:
    jax.block_until_ready(program(argument))  # compiles
    times = []
    for _ in range(_REPEATS):
        world.barrier.enter(f"measuring an {name}")  # all begin at once
        world.barrier.note(PROGRAM, name)
        began_s = time.perf_counter()
        jax.block_until_ready(program(argument))
        times.append(time.perf_counter() - began_s)
    return times
