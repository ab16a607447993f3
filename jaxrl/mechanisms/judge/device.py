"""A judge on the rollout's devices, which scores by turns of an engine.

Its engine is like the actor's, over an executor whose weights are streamed (`jaxrl.models.streaming`). It works when
the backend gives it a turn, or where nothing else is left to do.

Source: RollPacker §4.3 (a judge beside the actor on the same devices, layers streamed from the host).

A turn is one plan, which the host waits for, so no plan of the judge is in flight when the actor makes its next one.
The host also sees the end of the actor's plan before the turn. So neither's seconds count as the other's (layouts learn
from the actor's). The judge depends on no clock. Keys decide its tokens; its memory on the devices is allocated at the
first turn of a rollout and freed before the update.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.verdicts import Reading
from jaxrl.rewards.scorers import Scored, ScoreRequest, describe
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.host_weights import HostWeights
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.compiled import CompiledPrograms
from jaxrl.types import Prompt, Sample, SampleKey


class JudgeMachine:
    """The judge's weights and programs.

    Args:
      quiet: waits until nothing else runs on these devices: the actor's plans, and gradients on freed devices.
      alone: whether no program of the judge may run beside one of the actor.
    """

    def __init__(self, executor: MeshExecutor, weights: HostWeights, quiet: Callable[[], None], *, alone: bool) -> None:
        self._executor, self._weights, self._alone = executor, weights, alone
        self.wait_for_actor = quiet

    @property
    def programs(self) -> Sequence[CompiledPrograms]:
        """To be compiled before the first turn."""
        return self._executor.programs_of([self._executor.tp])

    @property
    def recompiles(self) -> int:
        return self._executor.recompiles

    @property
    def runs_alone(self) -> bool:
        """Whether the actor must be idle when the judge's programs begin, or its weights arrive."""
        return self._alone or not self._executor.has_weights

    def enter(self) -> None:
        if not self._executor.has_weights:
            self._weights.enter()
            self._executor.allocate()

    def release(self) -> None:
        self._executor.release(weights=True)


@dataclass(slots=True)
class _Judged:
    """A sample that waits for its verdicts."""

    future: Future[Scored]
    requests: list[int]
    began_s: float
    came: dict[int, Sample] = field(default_factory=dict)


class DeviceJudge:
    """Implements `jaxrl.rewards.reward_pool.ScoringPlace`. `engine`: over the judge's executor; `clock`: counts
    seconds."""

    def __init__(
        self,
        reading: Reading,
        engine: Engine,
        machine: JudgeMachine,
        options: Judge.Options,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.machine = engine, machine
        self._reading, self._options, self._clock = reading, options, clock
        self._ids = itertools.count()
        self._judged: dict[SampleKey, _Judged] = {}
        self._sample_of: dict[int, SampleKey] = {}
        self._turns = self._gap_turns = self._unparsed = self._written = 0
        self._seconds, self._tokens, self._recompiles = 0.0, 0, 0

    # -- where samples are scored --------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Nothing is left to wait for: the weights are there, and programs are compiled with the rollout's."""

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> Future[Scored]:
        assert sample.key not in self._judged, f"{sample.key} is being judged"
        del limits_s  # of test cases
        future: Future[Scored] = Future()
        try:
            ids = self._reading.ids(ScoreRequest.of(prompt, sample))
        except ValueError as error:
            future.set_result(("error", 0.0, {"error": describe(error)}, 0.0))
            return future
        judged = self._judged[sample.key] = _Judged(future, [], self._clock())
        count = self._reading.num_samples
        for number in range(count):  # all that the tokens of a verdict depend on is its key
            key = replace(sample.key, sample_index=sample.key.sample_index * count + number)
            request = Request(next(self._ids), key, ids, self._reading.params, share=sample.key)
            self.engine.add(request)
            self._sample_of[request.request_id] = sample.key
            judged.requests.append(request.request_id)
        future.add_done_callback(lambda ended: self._abort(sample.key) if ended.cancelled() else None)
        return future

    def _abort(self, key: SampleKey) -> None:
        judged = self._judged.pop(key)
        self.engine.abort([each for each in judged.requests if each not in judged.came])
        for each in judged.requests:
            del self._sample_of[each]

    def step(self) -> bool:
        """Runs a plan."""
        if self._judged:
            self._run_plan()
            return True
        return False

    def take_metrics(self) -> dict[str, float]:
        """`reward/judge/{turns,gap_turns,tokens,seconds,unparsed,recompiles}` : plans, those beside a rollout,
        tokens that the judge read and wrote, seconds of its plans, verdicts without a score, programs compiled after
        the warm-up."""
        tokens, recompiles = self._written + self.engine.counters.prefill_tokens, self.machine.recompiles
        measured = {
            "reward/judge/turns": float(self._turns),
            "reward/judge/gap_turns": float(self._gap_turns),
            "reward/judge/tokens": float(tokens - self._tokens),
            "reward/judge/seconds": self._seconds,
            "reward/judge/unparsed": float(self._unparsed),
            "reward/judge/recompiles": float(recompiles - self._recompiles),
        }
        self._turns = self._gap_turns = self._unparsed = 0
        self._seconds, self._tokens, self._recompiles = 0.0, tokens, recompiles
        return measured

    def close(self) -> None:
        for judged in [*self._judged.values()]:
            judged.future.cancel()
        self.release()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def turn(self, busy_rows: int, num_rows: int) -> bool:
        """Takes a turn if there is something to judge and few enough rows are busy; returns whether it did.
        `busy_rows`: as in `jaxrl.scheduling.mechanism.DeviceUser`; `num_rows`: of the rollout."""
        if not self._judged or busy_rows > self._options.busy_share * num_rows:
            return False
        self._run_plan()
        self._gap_turns += busy_rows > 0
        return True

    def release(self) -> None:
        """Frees the devices of the judge; nothing may be judged."""
        assert not self._judged, "the judge's memory is freed while samples wait for it"
        self.engine.drain()
        self.machine.release()

    def _run_plan(self) -> None:
        began_s = self._clock()
        if self.machine.runs_alone:
            began_s += self._wait_for_actor()
        self.machine.enter()
        self.engine.submit()
        began_s += self._wait_for_actor()
        for finished in self.engine.drain():
            self._ended(finished.request_id, finished.sample)
        self._turns += 1
        self._seconds += self._clock() - began_s

    def _wait_for_actor(self) -> float:
        """Waits for the actor's plan before the turn's; the seconds, which are none of the judge's."""
        began_s = self._clock()
        self.machine.wait_for_actor()
        return self._clock() - began_s

    def _ended(self, request_id: int, sample: Sample) -> None:
        key = self._sample_of[request_id]
        judged = self._judged[key]
        judged.came[request_id] = sample
        self._written += len(sample)
        if len(judged.came) < len(judged.requests):
            return
        del self._judged[key]
        for each in judged.requests:
            del self._sample_of[each]
        reward, info = self._reading.reward([judged.came[each] for each in judged.requests])
        self._unparsed += int(info.get("unparsed", 0))
        seconds = self._clock() - judged.began_s
        judged.future.set_result(("error" if "error" in info else "ok", reward, info, seconds))
