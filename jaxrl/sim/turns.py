"""Turns of a simulated run: where they end, how long tools take, and how long answers are.

Model: a response has 1 + Poisson turns, each of equally many of its tokens; an answer takes lognormal seconds and has
always as many tokens. All are pure functions of (seed, identity).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from jaxrl.config import Config
from jaxrl.config.simulation import SimulatedTool
from jaxrl.mechanisms.turns.rule import Conversation, Observed, max_trajectory_tokens
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases, nanoseconds
from jaxrl.sim.workload import ModelledWorkload, normal, uniform, words
from jaxrl.types import Prompt, SampleKey

_TURNS, _SECONDS = 40, 41  # what a random number is for; different from those of the workloads
_MOST_S = 3600.0  # of an answer
_ANSWER = ({"role": "tool", "content": ""},)


@dataclass(frozen=True, slots=True)
class TurnModel:
    """Where the turns of responses end."""

    tool: SimulatedTool
    seed: int
    length: Callable[[SampleKey, int], int]  # of a response, by its identity and its step
    longest: int  # of a response with answers
    counts_answers: bool = False  # whether `length` is with answers

    def num_turns(self, key: SampleKey) -> int:
        """One at least."""
        left, count, term = uniform(_TURNS, self.seed, *words(key)), 0, math.exp(1 - self.tool.turns)
        while (left := left - term) > 0 and count < 1000:
            count += 1
            term *= (self.tool.turns - 1) / count
        return 1 + count

    def end(self, key: SampleKey, step: int, kept: int) -> int:
        """The tokens of a response, answers included, at the end of the turn that begins after `kept` of them."""
        count = self.num_turns(key)
        answered = (count - 1) * self.tool.answer_tokens if self.counts_answers else 0
        tokens = max(self.length(key, step) - answered, count)
        ends = (tokens * (k + 1) // count + k * self.tool.answer_tokens for k in range(count))
        return min(next((end for end in ends if end > kept), kept + 1), self.longest)


class SimulatedTools:
    """Implements `jaxrl.mechanisms.turns.rule.Acting`: workers that take as long as the model says, for one turn at a
    time each. `next_verdict_ns`: when the next verdict comes, for which a wait for an answer ends as well."""

    keeps = True

    def __init__(
        self,
        model: TurnModel,
        num_workers: int,
        clock: SimulatedClock,
        phases: SimulatedPhases,
        next_verdict_ns: Callable[[], int | None],
    ) -> None:
        self._model, self._clock, self._phases, self._next_verdict_ns = model, clock, phases, next_verdict_ns
        self._free_ns = [(0, worker) for worker in range(num_workers)]  # heaps
        self._coming: list[tuple[int, int, Observed]] = []
        self._sequence = itertools.count()
        self._wanted: dict[SampleKey, int] = {}

    def submit(self, key: SampleKey, prompt: Prompt, text: str, state: bytes | None) -> None:
        turn, tool = 0 if state is None else int(state), self._model.tool
        z = normal(_SECONDS, self._model.seed, *words(key), turn)
        free_ns, worker = heapq.heappop(self._free_ns)
        begin_ns = max(free_ns, self._clock.now_ns)
        end_ns = begin_ns + nanoseconds(min(tool.median_s * math.exp(tool.sigma * z), _MOST_S))
        heapq.heappush(self._free_ns, (end_ns, worker))
        self._phases.complete(f"tool {worker}", "answer", begin_ns / 1e9, end_ns / 1e9)
        done, seconds = turn + 1 >= self._model.num_turns(key), (end_ns - self._clock.now_ns) / 1e9
        answer = Observed(key, done, () if done else _ANSWER, state=b"%d" % (turn + 1), seconds=seconds)
        sequence = self._wanted[key] = next(self._sequence)
        heapq.heappush(self._coming, (end_ns, sequence, answer))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        for key in keys:
            self._wanted.pop(key, None)

    def completed(self, timeout_s: float = 0.0) -> list[Observed]:
        """A wait moves the clock to the next answer, however far, or to the next verdict before it."""
        if timeout_s and self._coming:
            verdict_ns = self._next_verdict_ns()
            self._clock.reach(min([self._coming[0][0], *([] if verdict_ns is None else [verdict_ns])]))
        found: list[Observed] = []
        while self._coming and self._coming[0][0] <= self._clock.now_ns:
            _, sequence, answer = heapq.heappop(self._coming)
            if self._wanted.get(answer.key) == sequence:
                del self._wanted[answer.key]
                found.append(answer)
        return found


def conversation(
    model: TurnModel,
    num_workers: int,
    clock: SimulatedClock,
    phases: SimulatedPhases,
    next_verdict_ns: Callable[[], int | None],
) -> Conversation:
    """Turns that a model answers; arguments as in `SimulatedTools`."""
    tools = SimulatedTools(model, num_workers, clock, phases, next_verdict_ns)
    answer = (0,) * model.tool.answer_tokens
    return Conversation(tools, lambda prompt: True, lambda ids: "", lambda messages, drawn: answer)


def turn_model(config: Config, workload: ModelledWorkload) -> TurnModel:
    """Models the tools that `simulate.tool` describes. A recorded length is with the answers of its tools."""
    simulated, longest = config.simulate, max_trajectory_tokens(config)
    return TurnModel(simulated.tool, config.trainer.seed, workload.length, longest, bool(simulated.recorded_run))
