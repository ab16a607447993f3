"""A small world of real processes without a model, and the same world simulated.

Each process is a run's own loop, backend, workers and stream over jax's key-value store; only its devices are made up:
`WallClock` is a simulated clock that sleeps, so a plan takes the seconds that `MadeUpCost` says, whatever the machine
has besides. `one_process` plays a process of a world, `simulated` the whole world in this one. Both log the same
(`MessageLog`): seconds of the rollout, seconds of waiting for the order, and when each value of the stream was written
and read; a process that waits for its devices does not look.

Departures: nothing is scored by a clock, tokens are not exchanged, and updates take no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from jaxrl.config import Config, from_mapping
from jaxrl.loop import Hooks
from jaxrl.runtime.hosts.event_stream import EventStream
from jaxrl.runtime.round_end import Hosts
from jaxrl.runtime.simulation import Simulation, build
from jaxrl.scheduling.layouts.latency_profile import SwitchCost
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.configured import with_simulated_hosts, workload_of
from jaxrl.sim.cost_model import CostModel, TrainLoad
from jaxrl.sim.timed_workers import TimedWorkers

DECODE_STEPS = 8
_PROBES = 40


class WallClock(SimulatedClock):
    """The machine's clock since this was made; what would let simulated time pass sleeps."""

    def __init__(self) -> None:
        self._began_ns = time.monotonic_ns()

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    @now_ns.setter
    def now_ns(self, at_ns: int) -> None:
        raise AssertionError("the machine's clock cannot be set")

    def advance(self, seconds: float) -> None:
        if seconds:
            time.sleep(seconds)

    def reach(self, at_ns: int) -> None:
        if (left_ns := at_ns - self.now_ns) > 0:
            time.sleep(left_ns / 1e9)

    def at_once(self, acts: Any) -> None:
        for act in acts:
            act()


@dataclass(frozen=True)
class MadeUpCost:
    """`step_s` for a decode step whatever its rows, a sixteenth of it for each 16 tokens of a prompt, and nothing for
    all else."""

    step_s: float

    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        return self.step_s if batch else 0.0

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        return np.where(batch_S > 0, self.step_s, 0.0)

    def verify_steps_s(self, tp: int, batch_S: np.ndarray, width: int, context_S: np.ndarray) -> np.ndarray:
        return np.full(len(batch_S), self.step_s)

    def prefill_s(self, tp: int, tokens: int, pairs: float = 0.0) -> float:
        return self.step_s * tokens / 256

    def train_step_s(self, load: TrainLoad, num_devices: int) -> float:
        return 0.0

    def forward_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        return 0.0

    def gradients_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        return 0.0

    def regroup_s(self, num_devices: int, part: int) -> float:
        return 0.0

    def swap_s(self, num_devices: int) -> float:
        return 0.0

    def weight_sync_s(self, tp: int, num_devices: int) -> float:
        return 0.0

    def rollout_fixed_s(self) -> float:
        return 0.0

    def switch_cost(self, tp: int, new_tp: int) -> SwitchCost:
        return SwitchCost(tp, new_tp, 0.0, 0.0, 0.0)

    def move_s_per_token(self, tp: int, new_tp: int, num_devices: int) -> float:
        return 0.0

    def num_kv_blocks(self, tp: int, block_size: int, memory_fraction: float, reserved_bytes: float = 0.0) -> int:
        return 4096


@dataclass
class MessageLog:
    """What a process, or a simulated world, has logged.

    Attributes:
      rollout_s: of each step. order_wait_s: of this process's workers, of all steps.
      written, read: of values of the stream, when this process wrote or read them; seconds of a clock that all have.
      decided: of each step, what has to be the same everywhere.
    """

    rollout_s: list[float] = field(default_factory=list)
    order_wait_s: list[float] = field(default_factory=list)
    written: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)
    decided: list[Any] = field(default_factory=list)


def configured(processes: int, spread: float, steps: int, **simulate: Any) -> Config:
    """Tail batching with 16 responses for each process."""
    values = {
        "model": {"path": "none"},
        "data": {
            "task": "chain_sum",
            "train_batch_size": 4 * processes,
            "max_prompt_length": 32,
            "max_response_length": 320,
        },
        "rollout": {
            "n": 4,
            "max_num_seqs": 32,
            "num_blocks": 2048,
            "block_size": 16,
            "decode_steps": DECODE_STEPS,
            "max_num_batched_tokens": 256,
            "tail_batching": {"enable": True, "at_end": "leave"},
        },
        "trainer": {"total_training_steps": steps},
        "simulate": {
            "num_hosts": processes,
            "num_devices": processes,
            "num_prompts": 10_000,
            "host_spread": spread,
            "task": {"response": {"median": 80.0, "sigma": 0.7}, "prompt_median": 16.0, "prompt_sigma": 0.3},
            **simulate,
        },
    }
    return with_simulated_hosts(from_mapping(values))


class LoggedBoard:
    """A store that notes when each value was written and read here. `board`: any key-value store."""

    def __init__(self, board: Any, log: MessageLog) -> None:
        self.process, self.num_processes = board.process, board.num_processes
        self._board, self._log = board, log
        self.delete: Callable[[str], None] = board.delete

    def put(self, key: str, value: bytes) -> None:
        self._log.written[key] = time.monotonic()
        self._board.put(key, value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        found = self._board.get(key, timeout_s)
        if found is not None and self.process:  # process 0 only waits so, and reads the folder
            self._log.read[key] = time.monotonic()
        return found

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        found = self._board.folder(prefix)
        for key, _ in found:
            self._log.read.setdefault(key, time.monotonic())
        return found


def one_process(board: Any, config: Config, step_s: float) -> MessageLog:
    """Plays this process of a world."""
    log = MessageLog()
    hosts = Hosts(EventStream(LoggedBoard(board, log)), lambda samples, owners: None)
    simulation = _built(config, step_s, log, hosts, WallClock())
    board.barrier("begin", 300.0)
    simulation.loop.run()
    board.barrier("end", 300.0)
    return log


def simulated(config: Config, step_s: float) -> MessageLog:
    """Plays all of it, in simulated time."""
    log = MessageLog()
    simulation = _built(config, step_s, log)
    hosts: Any = simulation.hosts
    board, latency_ns = hosts.board, hosts._times.latency_ns
    post, folder = board.post, board.folder

    def posted(process: int, number: int, at_ns: int, value: bytes) -> None:
        log.written[f"stream/notices/{process:05d}/{number:012d}"] = (at_ns - hosts._times.call_ns) / 1e9
        post(process, number, at_ns, value)

    def looked(prefix: str) -> list[tuple[str, bytes]]:
        found = folder(prefix)
        for key, _ in found:
            log.read.setdefault(key, simulation.clock.now_s)
        return found

    board.post, board.folder = posted, looked
    for host in hosts.others:
        _log_receipt(host, latency_ns, log)
    simulation.loop.run()
    return log


def _log_receipt(host: Any, latency_ns: int, log: MessageLog) -> None:
    charge = host._charge

    def charged(known: int) -> None:
        for batch in range(host._num_received, known):
            arrived_ns = host._published.arrivals[batch]
            name = f"{host._num_before + batch} to {host.process}"
            log.written[name] = (arrived_ns - latency_ns) / 1e9
            asleep = host._sleeps_since is not None and arrived_ns >= host._sleeps_since  # it woke for each
            log.read[name] = (arrived_ns if asleep else host.clock.now_ns) / 1e9
        charge(known)

    host._charge = charged


def _built(config: Config, step_s: float, log: MessageLog, hosts: Hosts | None = None, clock: Any = None) -> Simulation:
    def ended(step: int, measured: dict[str, float], groups: Any) -> None:
        log.rollout_s.append(measured["timing_s/gen"])
        waited, workers = measured.get("hosts/order_wait_s"), simulation.workers
        if waited is None and isinstance(workers, TimedWorkers):
            waited = sum(workers.waited_ns.values()) / len(workers.waited_ns) / 1e9
            workers.waited_ns = dict.fromkeys(workers.waited_ns, 0)
        log.order_wait_s.append(waited or 0.0)
        log.decided.append(
            [[s.key.epoch, s.key.prompt_index, s.key.sample_index, len(s)] for g in groups for s in g.samples]
        )

    hooks = Hooks(lambda *_: None, ended, lambda *_: None, lambda *_: None, lambda: False)
    workload, _ = workload_of(config)
    simulation = build(config, cast(CostModel, MadeUpCost(step_s)), workload, hooks, hosts=hosts, clock=clock)
    return simulation


def probed(board: Any) -> tuple[float, float]:
    """Seconds until a value of process 0 is read by the others, while all of them wait for it (0 in process 0), and in
    process 0 those of a call that finds nothing, while the others do nothing (0 in these); each in the middle. Called
    by all processes at once.

    Calls of all processes at the same moment, on fewer cores, would take several times as long, but processes call at
    moments of their own.
    """
    delays: list[float] = []
    calls: list[float] = []
    for i in range(_PROBES):
        board.barrier(f"probe {i}", 300.0)
        if board.process == 0:
            time.sleep(0.02)  # the others wait by then
            board.put(f"probe/{i}", repr(time.monotonic()).encode())
        else:
            value = board.get(f"probe/{i}", 300.0)
            delays.append(time.monotonic() - float(value))
    board.barrier("calls", 300.0)
    for i in range(_PROBES if board.process == 0 else 0):
        began = time.monotonic()
        board.get(f"nothing/{i}", 0.0)
        calls.append(time.monotonic() - began)
    return statistics.median(delays or [0.0]), statistics.median(calls or [0.0])


def host_seconds(config: Config, step_s: float) -> float:
    """CPU seconds of a process for a plan, on one host alone."""
    data, options = replace(config.data, train_batch_size=4), replace(config.simulate, num_hosts=1, num_devices=1)
    alone = with_simulated_hosts(replace(config, data=data, simulate=options))
    simulation = _built(alone, step_s, MessageLog())
    began = time.process_time()
    simulation.loop.run()
    return (time.process_time() - began) / simulation.workers.counters.plans
