"""Simulated scoring: workers that take as long as the workload says, and verdicts that come at their simulated time.

Purpose: stands for a real run's reward pool in `jaxrl simulate` (`jaxrl.runtime.backend.Scoring`). Each of
`num_workers` processes scores one response at a time, in the order of submission; verdicts still to come lie in a heap
of (time, sequence, verdict). A verdict carries the time at which it came in, even if it is asked for later.

Source: rewards beside the rollout, RollPacker §4.3.

Departures: if scoring reaches the time limit, the response gets a time-out with reward 0, as in the reward pool;
crashes and errors of scorers are not modelled. What a scorer returns besides is `acc`, equal to the reward. A cancelled
scoring keeps its worker until its end, and is counted.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection

from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases, nanoseconds
from jaxrl.sim.workload import Workload
from jaxrl.types import Prompt, Sample, SampleKey


class ScoringWorkers:
    """Implements `jaxrl.runtime.backend.Scoring`.

    Args:
      workload: gives each response its reward and its seconds of scoring.
      clock: shared with the devices and the backend.
      phases: where scoring is drawn.
      num_workers: processes.
      timeout_s: when scoring is cut off; 0: never.
    """

    def __init__(
        self,
        workload: Workload,
        clock: SimulatedClock,
        phases: SimulatedPhases,
        num_workers: int = 1,
        timeout_s: float = 0.0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"reward.num_workers ({num_workers}) must be >= 1")
        self._workload = workload
        self._clock = clock
        self._phases = phases
        self._timeout_ns = nanoseconds(timeout_s)
        self._free = [(0, worker) for worker in range(num_workers)]  # a heap of (free from, worker)
        self._coming: list[tuple[int, int, Verdict]] = []  # a heap
        self._sequence = itertools.count()
        self._pending: dict[SampleKey, int] = {}  # sequence in the heap of each verdict that is still wanted
        self._scored = Counter[str]()
        self._scoring_s = 0.0

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        """Queues a finished sample; its verdict is known now, and comes when it is scored."""
        # 1 + the version of its first token, as for its length in the executor
        key, step = sample.key, int(sample.versions[0]) + 1
        duration_ns = nanoseconds(self._workload.reward_s(key, step))
        timed_out = 0 < self._timeout_ns <= duration_ns
        if timed_out:
            duration_ns = self._timeout_ns
        free_ns, worker = heapq.heappop(self._free)
        start_ns = max(self._clock.now_ns, free_ns)
        end_ns = start_ns + duration_ns
        heapq.heappush(self._free, (end_ns, worker))
        end_s, duration_s = end_ns / 1e9, duration_ns / 1e9
        self._phases.complete(f"reward worker {worker}", "score", start_ns / 1e9, end_s)
        if timed_out:
            verdict = Verdict(end_s, key, 0.0, "timeout", {"error": f"no verdict after {duration_s} s"}, duration_s)
        else:
            reward = self._workload.reward(key, step)
            verdict = Verdict(end_s, key, reward, "ok", {"acc": reward}, duration_s)
        self._scored[verdict.status] += 1
        self._scoring_s += duration_s
        sequence = self._pending[key] = next(self._sequence)
        heapq.heappush(self._coming, (end_ns, sequence, verdict))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """No verdict follows on these samples, unless they are submitted again."""
        for key in keys:
            self._pending.pop(key, None)

    def completed(self) -> list[Verdict]:
        """The verdicts that have come in since the last call."""
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
    def num_pending(self) -> int:
        """Samples with a verdict still to come."""
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, by the names of the reward pool's."""
        scored, seconds = self._scored, self._scoring_s
        self._scored, self._scoring_s = Counter(), 0.0
        return {
            "reward/num_scored": scored.total(),
            "reward/errors": 0,
            "reward/timeouts": scored["timeout"],
            "reward/crashes": 0,
            "reward/pool_restarts": 0,
            "reward/seconds": seconds,
        }
