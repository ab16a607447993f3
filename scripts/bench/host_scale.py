"""Simulated runs on many hosts, with the code of process 0 timed while it runs.

`configured` is the run: tail batching, 16 responses a prompt, a worker of eight H100s on each host, a 7B model at
tensor parallelism 2. `play` runs it, and returns for each step what it took in simulated seconds and what the code of
process 0 took in this process: merging, deciding and publishing are those of a real run
(`jaxrl.runtime.simulated_hosts`), so their CPU seconds are a real process's too. What stands for the other hosts, for
devices and for the shared store is left out (`Stopwatch`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from jaxrl.config import Config, from_mapping
from jaxrl.runtime.simulation import Simulation
from jaxrl.sim.configured import with_simulated_hosts

from .simulated import simulate
from .worker import resident_bytes

SAMPLES = 16
_ELSEWHERE = ""
KEPT = ("timing_s/gen", "timing_s/step", "hosts/order_wait_s", "hosts/stream_s", "hosts/waited_s")
"""The metrics that a step keeps: whoever looks at memory over many steps keeps little."""
PARTS = ("events", "round", "commands", "end")
"""events: merging, publishing and handing over; round: the rule and the round; commands: carrying out what they say;
end: of the round."""


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """A step: its kind of round, its metrics, the CPU seconds of process 0's code by part, events handled, and resident
    memory afterwards."""

    is_long: bool
    metrics: dict[str, float]
    cpu_s: dict[str, float]
    events: int
    memory_mib: float

    @property
    def share(self) -> float:
        """Of process 0's code in the step."""
        return sum(self.cpu_s.values()) / self.metrics["timing_s/step"]


class Stopwatch:
    """CPU seconds of this thread by part; an inner part's are not an outer one's."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open = [_ELSEWHERE]
        self._since = time.thread_time()

    def around(self, owner: Any, method: str, name: str) -> None:
        """Has a method of one object timed."""
        own = getattr(owner, method)

        def timed(*args: Any, **more: Any) -> Any:
            self._turn()
            self._open.append(name)
            try:
                return own(*args, **more)
            finally:
                self._turn()
                self._open.pop()

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Seconds of the parts since the last call."""
        found, self._seconds = self._seconds, {}
        return {name: found.get(name, 0.0) for name in PARTS}

    def _turn(self) -> None:
        now, name = time.thread_time(), self._open[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def configured(
    hosts: int, rows: int, seed: int, steps: int, lengths: tuple[float, float, int], **simulate: Any
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
            "task": {"response": {"median": median, "sigma": sigma}, "prompt_median": 200.0},
            **simulate,
        },
    }
    return with_simulated_hosts(from_mapping(values))


def play(config: Config) -> list[ScaleStep]:
    """All steps of a run."""
    watch, found, events = Stopwatch(), list[ScaleStep](), [0]

    def ended(step: int, measured: dict[str, float], groups: Any) -> None:
        is_long = measured.get("rollout/long_round", 0.0) == 1.0
        kept = {name: measured[name] for name in KEPT}
        found.append(ScaleStep(is_long, kept, watch.take(), events[0], resident_bytes() / 2**20))
        events[0] = 0

    simulate(config, ended, lambda simulation: _watch(simulation, watch, events))
    return found


def _watch(simulation: Simulation, watch: Stopwatch, events: list[int]) -> None:
    """Has the parts of process 0 timed, without what stands for other hosts and devices."""
    loop: Any = simulation.loop
    backend: Any = loop._backend
    hosts: Any = simulation.hosts
    assert hosts is not None, "one host has nothing to merge"
    wait = backend.wait

    def counted() -> Any:
        events[0] += 1
        return wait()

    backend.wait = counted
    for owner, method, name in (
        (loop, "_handle", "round"),
        (loop.rule, "plan", "round"),
        (loop.rule, "settle", "round"),
        (backend, "wait", "events"),
        (backend, "apply", "commands"),
        (backend, "end", "end"),
    ):
        watch.around(owner, method, name)
    for owner, methods in (
        (hosts.board, ("put", "get", "folder", "delete")),
        (hosts, ("on_launch", "on_abort", "on_completion", "handed", "commanded", "counts", "round_ends", "exchange")),
        (backend._plans, ("run_synchronized", "show")),
    ):
        for method in methods:
            watch.around(owner, method, _ELSEWHERE)
