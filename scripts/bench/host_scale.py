"""Simulated runs on many hosts, with the controller's code timed while it runs, and plans without devices.

`configured` is the run: tail batching, 16 responses a prompt, a worker of eight H100s on each host, a 7B model at
tensor parallelism 2. `play` runs it, and returns for each step what it took in simulated seconds and what the
controller took in this process: everything but what stands for devices. `plan_seconds` measures the engine with its
batcher alone; `call_seconds` what Ray takes to bring a plan to an actor and its result back.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.config import Config, from_mapping
from jaxrl.runtime.simulation import Simulation
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Plan, PlanResult, Request, Ticket
from jaxrl.scheduling.tokens.stacks import WHOLE
from jaxrl.sim.configured import with_simulated_hosts
from jaxrl.types import SampleKey, SamplingParams

from .simulated import simulate

SAMPLES = 16


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """A step: its kind of round, seconds of the rollout and of all, CPU seconds of the controller, and its plans."""

    is_long: bool
    rollout_s: float
    step_s: float
    cpu_s: float
    plans: int


def configured(
    hosts: int, rows: int, seed: int, steps: int, order: str, lengths: tuple[float, float, int], **simulate: Any
) -> Config:
    """A run of `hosts` hosts with a batch of `rows` responses for each. `lengths`: median, sigma and longest."""
    median, sigma, longest = lengths
    values = {
        "model": {"path": "Qwen2.5-7B"},
        "data": {
            "task": "chain_sum",
            "train_batch_size": hosts * rows // SAMPLES,
            "max_prompt_length": 1024,
            "max_response_length": longest,
        },
        "rollout": {
            "n": SAMPLES,
            "order": order,
            "dtype": "bfloat16",
            "tensor_model_parallel_size": 2,
            "max_num_seqs": max(rows // 2, 1),
            "decode_steps": 16,
            "block_size": 256,
            "max_num_batched_tokens": 8192,
            "tail_batching": {"enable": True},
        },
        "actor": {"ppo_max_token_len_per_gpu": longest + 1024, "old_logprobs": "rollout"},
        "trainer": {"total_training_steps": steps, "seed": seed},
        "simulate": {
            "hardware": "H100",
            "num_hosts": hosts,
            "num_devices": 8 * hosts,
            "num_prompts": 1_000_000,
            "tasks": {"simulated": {"response": {"median": median, "sigma": sigma}, "prompt_median": 200.0}},
            **simulate,
        },
    }
    return with_simulated_hosts(from_mapping(values))


def play(config: Config) -> list[ScaleStep]:
    """All steps of a run."""
    watch, found = Stopwatch(), list[ScaleStep]()

    def ended(step: int, measured: dict[str, float], groups: Any) -> None:
        is_long = measured.get("rollout/long_round", 0.0) == 1.0
        found.append(ScaleStep(is_long, measured["timing_s/gen"], measured["timing_s/step"], *watch.take()))

    def before(simulation: Simulation) -> None:
        for executor in simulation.run.executors.executors:
            watch.leave_out(executor)
        watch.take()

    simulate(config, ended, before)
    return found


class Stopwatch:
    """CPU seconds of this thread without those of executors, and their plans."""

    def __init__(self) -> None:
        self._since, self._elsewhere_s, self._plans = time.thread_time(), 0.0, 0

    def leave_out(self, executor: Any) -> None:
        """Does not count what an executor takes to run its plans."""
        own = executor.submit

        def submit(plan: Plan) -> Ticket:
            began = time.thread_time()
            ticket = own(plan)
            self._elsewhere_s += time.thread_time() - began
            self._plans += 1
            return ticket

        executor.submit = submit

    def take(self) -> tuple[float, int]:
        """Since the last call."""
        now = time.thread_time()
        found = now - self._since - self._elsewhere_s, self._plans
        self._since, self._elsewhere_s, self._plans = now, 0.0, 0
        return found


class _NoDevices:
    """Runs plans in no time: every row gets as many tokens as it may."""

    num_groups, block_size, max_prefill_tokens, stacks = 1, 16, 1 << 30, WHOLE

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self.num_slots, self.num_blocks = num_slots, num_blocks
        self._results: deque[PlanResult] = deque()
        self.last: tuple[Plan, PlanResult] | None = None
        self._ids, self._logprobs = np.zeros(64 * num_slots, np.int32), np.zeros(64 * num_slots, np.float32)

    def check(self, request: Request) -> None: ...

    def submit(self, plan: Plan) -> Ticket:
        rows = plan.rows
        counts = rows.max_new + rows.is_new
        tokens = self._ids[: counts.sum()], self._logprobs[: counts.sum()], self._logprobs[: counts.sum()]
        result = PlanResult(plan.index, rows.request_ids, counts, np.zeros(len(rows), bool), *tokens, plan.num_steps)
        self._results.append(result)
        self.last = plan, result
        return result

    def collect(self, ticket: Ticket) -> PlanResult:
        return self._results.popleft()


def _decoding(num_rows: int, plans: int) -> tuple[LocalWorkers, _NoDevices]:
    """A worker whose rows all decode, for so many plans of 16 steps."""
    longest = 16 * (plans + 8)
    executor = _NoDevices(num_rows, num_rows * (longest // 16 + 2))
    modelled: Any = executor
    workers = LocalWorkers([Engine(modelled, BatcherConfig(decode_steps=16, max_model_len=longest + 64))])
    params = SamplingParams(max_tokens=longest)
    for i in range(num_rows):
        workers.add(Request(i, SampleKey(0, i, 0), (1,) * 8, params))
    for _ in range(4):  # the prefill
        workers.step()
    return workers, executor


def plan_seconds(num_rows: int, plans: int = 200) -> float:
    """CPU seconds of the engine and the batcher for a plan of so many rows."""
    workers, _ = _decoding(num_rows, plans)
    began = time.thread_time()
    for _ in range(plans):
        workers.step()
    return (time.thread_time() - began) / plans


def call_seconds(num_rows: int, calls: int = 300) -> tuple[float, float]:
    """Of submitting a plan of so many rows to a Ray actor and collecting its result: seconds until it is there, and CPU
    seconds of this process."""
    import ray

    class Echo:  # here, so that it goes to the actor with its code
        def submit(self, plan: Plan) -> None: ...

        def collect(self) -> PlanResult:
            return result

    _, executor = _decoding(num_rows, 1)
    assert executor.last is not None
    plan, result = executor.last
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    remote: Any = ray.remote(Echo)
    actor = remote.remote()

    def call() -> None:
        ray.get([actor.submit.remote(plan), actor.collect.remote()])

    for _ in range(20):
        call()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    found = (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls
    ray.kill(actor)
    return found
