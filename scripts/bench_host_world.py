#!/usr/bin/env python3
"""A real world of processes without a model, beside the simulation of the same.

    python scripts/bench_host_world.py [--processes 12] [--step-s 0.04] [--spread 0.1] [--steps 3] [--json]

Every process is a run's own loop, backend, workers and stream over jax's key-value store, on this machine; only its
devices are made up, and sleep for as long as a plan takes (`scripts/bench/host_world.py`). What a value takes from one
process to another, and a call of the store, is measured in the same world before it plays, and a plan's CPU seconds in
this process; that is what the simulation is given.

Printed for both: seconds of a rollout, seconds for which devices stood idle for the order, and what a notice takes to
process 0 and a batch of the stream to another from being written to being read, each on average (that is either the
store's time or half a plan, for who waits for its devices does not read). Both decide the same: that is checked. The
exit status is 1 where a figure of one is more than --factor times the other's; what is shorter than a decode step in
both counts as the same.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import records
from bench.host_world import MessageLog, configured, host_seconds, one_process, probed, simulated
from bench.measure import say

QUICK = {"processes": 2, "steps": 2, "step_s": 0.004}
_START_S = 300.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--processes", type=int, default=12, help="of the world (12)")
    made.add_argument("--step-s", type=float, default=0.04, help="seconds of a decode step, 8 to a plan (0.04)")
    made.add_argument("--spread", type=float, default=0.1, help="how much slower the slowest is, as a share (0.1)")
    made.add_argument("--steps", type=int, default=3, help="training steps (3)")
    made.add_argument("--factor", type=float, default=2.0, help="by which the two may differ (2)")
    records.record_options(made, "two processes, short plans")
    made.add_argument("--one-of", metavar="FOLDER", help=argparse.SUPPRESS)  # this is a process of the world
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1: a figure is too far from the other's, 2: was asked for nonsense."""
    try:
        options = records.parse_counts(parser(), arguments, QUICK, ("processes", "steps"))
        if options.processes < 2:
            raise ValueError(f"--processes ({options.processes}) must be at least 2")
        if options.step_s <= 0 or options.spread < 0 or options.factor < 1:
            raise ValueError("--step-s must be above 0, --spread at least 0 and --factor at least 1")
    except ValueError as error:
        print(f"bench_host_world: {error}", file=sys.stderr)
        return 2
    if options.one_of:
        _play(options, Path(options.one_of))
        return 0
    head = records.header("host-world", records.describe_host(), records.versions(), records.command(arguments))
    records.print_header(head, say)
    with tempfile.TemporaryDirectory() as folder:
        found = _world(options, Path(folder))
    logs = [MessageLog(**each["log"]) for each in found]
    latency_s = statistics.median(each["latency_s"] for each in found[1:])
    call_s = found[0]["call_s"]
    config = configured(options.processes, options.spread, options.steps)
    host_s = host_seconds(config, options.step_s)
    given_ms = ", ".join(f"{1e3 * seconds:.2f} ms" for seconds in (latency_s, call_s, host_s))
    say(f"a value from process to process, a call of the store, a plan's work: {given_ms}")
    given = {"host_latency_s": latency_s, "host_call_s": call_s, "host_s": host_s}
    modelled = simulated(configured(options.processes, options.spread, options.steps, **given), options.step_s)
    for process, each in enumerate(logs):
        assert each.decided == modelled.decided, f"process {process} has trained on other responses than the simulation"
    rows = {"real": figures(logs), "simulated": figures([modelled])}
    for name, row in rows.items():
        say(f"{name:<10}" + "".join(f"  {figure} {value:.4g} s" for figure, value in row.items()))
    ratios = {
        figure: _ratio(rows["real"][figure], value, options.step_s) for figure, value in rows["simulated"].items()
    }
    say("real over simulated" + "".join(f"  {figure} {ratio:.2f}" for figure, ratio in ratios.items()))
    if options.json is not None:
        results = [given | rows | {"ratios": ratios}]
        print(f"appended to {records.append_record(options.json, head | {'results': results}).name}")
    far = [figure for figure, ratio in ratios.items() if not 1 / options.factor <= ratio <= options.factor]
    if far:
        say(f"more than a factor of {options.factor:g} apart: {', '.join(far)}")
    return int(bool(far))


def _ratio(real: float, modelled: float, least: float) -> float:
    """Of two durations; 1 where both are shorter than `least`, which is nothing to speak of."""
    return 1.0 if max(real, modelled) < least else max(real, 1e-9) / max(modelled, 1e-9)


def figures(logs: Sequence[MessageLog]) -> dict[str, float]:
    """Of a world, by the names that are printed."""
    written = {key: at for each in logs for key, at in each.written.items()}
    notices, batches = [], []
    for each in logs:
        for key, at in each.read.items():
            (notices if "/notices/" in key else batches).append(at - written[key])
    return {
        "rollout": statistics.median(logs[0].rollout_s),
        "order wait": statistics.mean(value for each in logs for value in each.order_wait_s),
        "notice": statistics.mean(notices),
        "batch": statistics.mean(batches),
    }


def _world(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """What the processes of a world have logged, by their numbers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, str(Path(__file__).resolve()), f"--one-of={folder}"]
    for name in ("processes", "step_s", "spread", "steps"):
        command.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
    started: list[subprocess.Popen[bytes]] = []
    try:
        for process in range(options.processes):
            own = {"JAXRL_COORDINATOR": address, "JAXRL_PROCESS_ID": str(process), "JAX_PLATFORMS": "cpu"}
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, env=os.environ | own | threads))
        _wait(started)
    finally:
        for each in started:
            each.kill()
            each.wait()
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(options.processes)]


def _wait(started: Iterable[subprocess.Popen[bytes]]) -> None:
    """Until all have ended. Raises RuntimeError where one has failed."""
    left = list(started)
    while left:
        for each in left:
            if (status := each.poll()) is not None and status != 0:
                raise RuntimeError(f"a process of the world has ended with status {status}")
        left = [each for each in left if each.poll() is None]
        time.sleep(0.1)


def _play(options: argparse.Namespace, folder: Path) -> None:
    """Plays a process of the world, which ends with the one that has started it."""
    from jaxrl.config.hosts import HostsSection
    from jaxrl.runtime.hosts.world import open_world

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    hosts = HostsSection(num=options.processes, devices_per_host=1, stall_timeout_s=_START_S)
    with open_world(hosts) as world:
        latency_s, call_s = probed(world.store)
        config = configured(options.processes, options.spread, options.steps)
        log = one_process(world.store, config, options.step_s)
        text = json.dumps({"latency_s": latency_s, "call_s": call_s, "log": asdict(log)})
        (folder / f"{world.process}.json").write_text(text)
        world.store.barrier("logged", _START_S)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
