"""Simulated scoring: workers that take as long as the workload says, and verdicts that come at their simulated time.

Each of `num_workers` processes scores one response at a time, in the order of submission; verdicts still to come lie in
a heap. A verdict carries the time at which it came in, even if it is read later. Tasks may have workers of their own,
beside one another or in turn: then a task's scoring begins when that of the tasks before it has ended. A task may be
scored on the rollout's devices (`DeviceScoring`), between two plans. A task of code has one test case for each
response, which takes all of its scoring's seconds; its limit comes with the response.

Source: rewards beside the rollout and adaptive limits, RollPacker §4.3; tasks in turn, as its authors' code waits for a
batch's rewards (Farrrrland/RollPacker, roll/pipeline/rlvr/rlvr_pipeline_batched_reward.py).

Departures: if scoring reaches the time limit, the response gets a time-out with reward 0, and of a task of code reward
0 with a test case that was cut off. Crashes and errors of scorers, and so retries, are not modelled. What a scorer
returns besides is `acc`, equal to the reward. A cancelled scoring keeps its worker until its end, and is counted.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.mechanisms.reward_timeouts import AdaptiveTimeouts
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases, nanoseconds
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import Prompt, Sample, SampleKey


@dataclass(frozen=True, slots=True)
class DeviceScoring:
    """Scoring on the rollout's devices.

    Attributes:
      track: on which it is drawn.
      seconds: by task, for which a response takes the devices.
      occupy: takes them from a moment on, for a duration, both in nanoseconds; when that has ended.
    """

    track: str
    seconds: Mapping[str, float]
    occupy: Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class _Queued:
    sequence: int
    sample: Sample
    limits_s: tuple[float, ...]
    submitted_ns: int


class ScoringWorkers:
    """Implements `jaxrl.run.verdicts.Scoring`.

    Args:
      timeout_s: when scoring is cut off; 0: never.
      own_workers: by task, the processes that score it alone; `num_workers` score all other tasks.
      in_turn: tasks in the order in which they are scored; empty: all at once.
      timeouts: says which tasks are of code, and when a test case without a limit is cut off; None: none are.
      on_devices: scores other tasks; None: none are scored there.
    """

    def __init__(
        self,
        workload: ModelledWorkload,
        clock: SimulatedClock,
        phases: SimulatedPhases,
        num_workers: int = 1,
        timeout_s: float = 0.0,
        own_workers: Mapping[str, int] | None = None,
        in_turn: Sequence[str] = (),
        timeouts: AdaptiveTimeouts | None = None,
        on_devices: DeviceScoring | None = None,
    ) -> None:
        self._workload, self._clock, self._phases = workload, clock, phases
        self._timeout_s, self._timeouts, self._on_devices = timeout_s, timeouts, on_devices
        # heaps of (free from, worker): by task, and under the empty name the one that other tasks share
        pools = {"": num_workers, **(own_workers or {})}
        first = dict(zip(pools, itertools.accumulate((0, *pools.values())), strict=False))
        self._free = {name: [(0, first[name] + i) for i in range(count)] for name, count in pools.items()}
        self._queues: dict[str, list[_Queued]] = {name: [] for name in in_turn}
        self._turn_ns = 0  # when the scoring of the tasks before has ended
        self._coming: list[tuple[int, int, Verdict]] = []  # a heap
        self._sequence = itertools.count()
        self._pending: dict[SampleKey, int] = {}  # sequence in the heap of each verdict that is still wanted
        self._scoring_s = 0.0

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        """Queues a finished sample; its verdict is known now, and comes when it is scored. `limits_s`: of its test
        cases; empty: none is known of its prompt."""
        sequence = self._pending[sample.key] = next(self._sequence)
        queued = _Queued(sequence, sample, limits_s, self._clock.now_ns)
        task = self._workload.kind_name(sample.key.prompt_index)
        if task in self._queues:
            self._queues[task].append(queued)
        else:
            self._score(task, queued, self._clock.now_ns)

    def _take_turns(self) -> None:
        for task, queue in self._queues.items():
            turn_ns = self._turn_ns
            for queued in queue:
                end_ns = self._score(task, queued, max(queued.submitted_ns, turn_ns))
                self._turn_ns = max(self._turn_ns, end_ns)
            queue.clear()

    def _score(self, task: str, queued: _Queued, from_ns: int) -> int:
        """Gives a sample to the worker that is free first; when that is done with it."""
        sample = queued.sample
        # 1 + the version of its first token, as for its length in the executor
        key, step = sample.key, int(sample.versions[0]) + 1
        rule = self._timeouts.rule if self._timeouts is not None and self._timeouts.has_tests(task) else None
        limit_s = self._timeout_s if rule is None else (*queued.limits_s, rule.max_s)[0]
        seconds = self._workload.reward_s(key, step)
        duration_ns = nanoseconds(min(seconds, limit_s) if limit_s else seconds)
        is_over = 0 < nanoseconds(limit_s) <= duration_ns
        devices = self._on_devices
        if devices is not None and task in devices.seconds:
            duration_ns, is_over = nanoseconds(devices.seconds[task]), False
            track, end_ns = devices.track, devices.occupy(from_ns, duration_ns)
        else:
            free = self._free.get(task, self._free[""])
            free_ns, worker = heapq.heappop(free)
            track, end_ns = f"reward worker {worker}", max(from_ns, free_ns) + duration_ns
            heapq.heappush(free, (end_ns, worker))
        end_s, duration_s = end_ns / 1e9, duration_ns / 1e9
        self._phases.complete(track, "score", (end_ns - duration_ns) / 1e9, end_s)
        if is_over and rule is None:
            verdict = Verdict(end_s, key, 0.0, "timeout", {"error": f"no verdict after {duration_s} s"}, duration_s)
        else:
            reward = 0.0 if is_over else self._workload.reward(key, step)
            info = {"acc": reward} | (
                {} if rule is None else _one_case(duration_s, reward, limit_s * is_over, rule.max_s)
            )
            verdict = Verdict(end_s, key, reward, "ok", info, duration_s)
        self._scoring_s += duration_s
        heapq.heappush(self._coming, (end_ns, queued.sequence, verdict))
        return end_ns

    def cancel(self, keys: Collection[SampleKey]) -> None:
        for key in keys:
            self._pending.pop(key, None)

    def completed(self) -> list[Verdict]:
        self._take_turns()
        found: list[Verdict] = []
        while self._coming and self._coming[0][0] <= self._clock.now_ns:
            _, sequence, verdict = heapq.heappop(self._coming)
            if self._pending.get(verdict.key) == sequence:  # else it was cancelled
                del self._pending[verdict.key]
                found.append(verdict)
        return found

    def wait(self, timeout_s: float) -> list[Verdict]:
        """Moves the clock to the next verdict, however far: a caller that waits here has nothing else to wait for."""
        found = self.completed()
        while self._pending and not found:
            self._clock.reach(self._coming[0][0])
            found = self.completed()
        return found

    @property
    def next_ns(self) -> int | None:
        """When the next verdict comes, wanted or not; None: none will."""
        self._take_turns()
        return self._coming[0][0] if self._coming else None

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, by the names of the reward pool's."""
        seconds, self._scoring_s = self._scoring_s, 0.0
        return {"reward/pool_restarts": 0, "reward/seconds": seconds}


def _one_case(duration_s: float, reward: float, cut_off_at_s: float, max_s: float) -> dict[str, Any]:
    """The code scorer's info about a response with one test case."""
    passed = int(reward > 0)
    counts = {"passed": passed, "cases": 1, "cut_off": int(cut_off_at_s > 0)}
    timeouts = {"timeouts": {"case_max" if cut_off_at_s >= max_s else "case": 1}} if cut_off_at_s else {}
    return {"case_s": [duration_s], "correct": bool(passed), **counts, **timeouts}
