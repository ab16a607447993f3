"""The scoring of a round, as the round receives it: verdicts in logical order, those of a clock from the journal.

Purpose: `Verdicts` stands between the backend and the scoring. It hands verdicts over in the order in which their
samples completed, however late one arrives. `OwnScoring` is the part of it that every one of several processes has
(`jaxrl.runtime.ordered` hands over their verdicts). What a clock or something outside the run has decided
(`Verdict.outside`, a time-out, a crash) is written to the journal, whole, before the round receives it; a step that
runs again after a crash takes it from there and does not ask again. A simulated clock needs no journal.

Source: docs/architecture.md.

Departures: of what a scorer says besides its reward, the journal keeps what is short (`MAX_VALUE_CHARS` of a value's
JSON, `MAX_INFO_CHARS` of all). A replayed verdict has that, and no seconds: they are not counted again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl.record.files import to_json
from jaxrl.record.journal import Journal
from jaxrl.rewards.reward_metrics import PoolMetrics
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.busy_time import BusyTime
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

MAX_VALUE_CHARS, MAX_INFO_CHARS = 8192, 65536
_CLOCKS = ("timeout", "crash")


class Scoring(Protocol):
    """Scores samples beside the rollout: a reward pool (`jaxrl.rewards.pool.RewardPool` says what each method does), or
    `jaxrl.sim.scoring.ScoringWorkers`."""

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = (), /) -> None: ...

    def cancel(self, keys: Collection[SampleKey], /) -> None: ...

    def completed(self) -> list[Verdict]: ...

    def wait(self, timeout_s: float, /) -> list[Verdict]: ...

    @property
    def num_pending(self) -> int: ...

    def take_metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A verdict as it comes in. `limits_s`: what its sample was sent with. `is_decided`: a clock, or something outside
    the run, has decided it, so it has to be in the journal before the round receives it."""

    verdict: Verdict
    limits_s: tuple[float, ...] = ()
    is_decided: bool = False


class OwnScoring:
    """The samples that this process has scored.

    Args:
      scoring: scores finished samples.
      clock: stamps verdicts that the journal gives.
      journal: read for verdicts that were decided before; None: there are none.
      mechanisms: may give the samples of training prompts time limits, and are called with their verdicts.
    """

    def __init__(
        self,
        scoring: Scoring,
        clock: Callable[[], float],
        journal: Journal | None = None,
        mechanisms: Sequence[Mechanism] = (),
    ) -> None:
        self._scoring, self._clock, self._journal, self._mechanisms = scoring, clock, journal, mechanisms
        self.step, self.round = -1, 0
        self._sent: dict[SampleKey, tuple[Prompt, tuple[float, ...]]] = {}  # with time limits
        self._found: list[Arrival] = []  # in the journal, or known without a scorer
        self._failed = PoolMetrics()  # of what no pool has scored
        self._busy = BusyTime()

    def begin(self, step: int, round_index: int) -> None:
        """A round of training step `step` starts; `round_index`: 0 of a training round, 1 of an evaluation."""
        self.step, self.round = step, round_index

    def send(self, prompt: Prompt, sample: Sample) -> None:
        """Has a finished sample scored, unless its environment has failed, or the journal has its verdict."""
        key, episode = sample.key, sample.episode
        if episode is not None and episode.failed:
            failed = Verdict(self._clock(), key, 0.0, episode.failed, {"error": episode.error})
            self._found.append(Arrival(self._failed.add(failed)))
            return
        entry = None if self._journal is None else self._journal.find(self.step, "verdict", self.place(key))
        limits_s = ()
        if not self.round:
            limits_s = next(filter(None, (each.limits(prompt) for each in self._mechanisms)), ())
        self._sent[key] = prompt, limits_s
        if entry is None:
            self._busy.begin(key, self._clock())
            self._scoring.submit(prompt, sample, limits_s)
        else:
            verdict = replayed(entry, self._clock(), key)
            self._sent.pop(key)
            self._found.append(Arrival(verdict, limits_s))

    @property
    def num_pending(self) -> int:
        """Samples with a verdict still to come."""
        return len(self._found) + self._scoring.num_pending

    def completed(self) -> list[Arrival]:
        """The verdicts that have come; never waits."""
        return self._taken(self._scoring.completed())

    def wait(self, timeout_s: float) -> list[Arrival]:
        """The same; waits for one."""
        return self._taken([] if self._found else self._scoring.wait(timeout_s))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """No verdict on these samples is wanted."""
        self._scoring.cancel(keys)
        now_s = self._clock()
        for key in keys:
            self._busy.end(key, now_s)
            self._sent.pop(key, None)
        self._found = [arrival for arrival in self._found if arrival.verdict.key not in keys]

    def clear(self, keys: Collection[SampleKey]) -> None:
        """The round is dropped; `keys`: of what may be scored still."""
        self._scoring.cancel({*keys, *self._sent})
        for kept in (self._sent, self._found):
            kept.clear()
        self._busy = BusyTime()

    def learn(self, prompt: Prompt, arrival: Arrival) -> None:
        """Mechanisms take in what the scorer has said."""
        if not self.round:
            for each in self._mechanisms:
                each.scored(prompt, arrival.limits_s, arrival.verdict)

    def end(self) -> dict[str, float]:
        """The round is over; what the scoring itself has counted in it. `reward/busy_s`: the seconds in which anything
        was being scored."""
        measured = self._scoring.take_metrics()
        self._sent.clear()
        measured["reward/busy_s"] = self._busy.take()
        return measured

    def place(self, key: SampleKey) -> tuple[int, ...]:
        """The key of a verdict in the journal."""
        return (self.round, key.epoch, key.prompt_index, key.sample_index, key.attempt)

    def _taken(self, verdicts: Sequence[Verdict]) -> list[Arrival]:
        found, self._found = self._found, []
        for verdict in verdicts:
            prompt, limits_s = self._sent.pop(verdict.key, (None, ()))
            is_close = prompt is not None and self._is_close(prompt, verdict)
            found.append(Arrival(verdict, limits_s, verdict.outside or verdict.status in _CLOCKS or is_close))
            self._busy.end(verdict.key, verdict.time_s)
        return found

    def _is_close(self, prompt: Prompt, verdict: Verdict) -> bool:
        """Whether other time limits might have changed it."""
        return not self.round and any(each.is_close(prompt, verdict) for each in self._mechanisms)


class Verdicts:
    """What of a round is being scored, where one process has all of it and what is commanded takes effect at once.

    Args:
      scoring, clock, mechanisms: as in `OwnScoring`.
      journal: where decisions of the clock go; None: they are not kept, and there are no earlier ones.
    """

    def __init__(
        self,
        scoring: Scoring,
        clock: Callable[[], float],
        journal: Journal | None = None,
        mechanisms: Sequence[Mechanism] = (),
    ) -> None:
        self.own = OwnScoring(scoring, clock, journal, mechanisms)
        self._journal = journal
        self._due: deque[SampleKey] = deque()  # in the order in which the samples completed
        self._prompts: dict[SampleKey, Prompt] = {}  # of these
        self._arrived: dict[SampleKey, Verdict] = {}

    @property
    def due(self) -> SampleKey | None:
        """The sample whose verdict is to be handed over next; None: none is."""
        return self._due[0] if self._due else None

    def begin(self, step: int, round_index: int) -> None:
        """As in `OwnScoring`."""
        self.own.begin(step, round_index)

    def send(self, prompt: Prompt, sample: Sample) -> None:
        """Has a finished sample scored, unless the journal has its verdict."""
        self._due.append(sample.key)
        self._prompts[sample.key] = prompt
        self.own.send(prompt, sample)

    def completed(self) -> list[Verdict]:
        """The verdicts that are due and have come; never waits."""
        return self._take(self.own.completed())

    def wait(self, timeout_s: float) -> list[Verdict]:
        """The same; waits for what is due. Raises RuntimeError where nothing is being scored."""
        if not self.own.num_pending:
            raise RuntimeError(f"step {self.own.step}: the reward pool has lost {self._due[0]}")
        return self._take(self.own.wait(timeout_s))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """No verdict on these samples is handed over."""
        self.own.cancel(keys)
        self._due = deque(key for key in self._due if key not in keys)
        for key in keys:
            self._arrived.pop(key, None)
            self._prompts.pop(key, None)

    def clear(self) -> None:
        """The round is dropped."""
        self.own.clear(set(self._due))
        for kept in (self._due, self._arrived, self._prompts):
            kept.clear()

    def _take(self, arrivals: Sequence[Arrival]) -> list[Verdict]:
        """Notes verdicts as they arrive; returns those that are due and have arrived."""
        for arrival in arrivals:
            verdict = arrival.verdict
            if arrival.is_decided and self._journal is not None:
                self._journal.append(self.own.step, "verdict", self.own.place(verdict.key), recorded(verdict))
            prompt = self._prompts.pop(verdict.key, None)
            if prompt is not None:
                self.own.learn(prompt, arrival)
            self._arrived[verdict.key] = verdict
        ready: list[Verdict] = []
        while self._due and self._due[0] in self._arrived:
            ready.append(self._arrived.pop(self._due.popleft()))
        return ready


def recorded(verdict: Verdict) -> dict[str, Any]:
    """What the journal keeps of a verdict: `status`, `reward` and the short values of `info`."""
    if len(to_json(verdict.info)) <= MAX_VALUE_CHARS:  # so is each value
        return {"status": verdict.status, "reward": verdict.reward, "info": dict(verdict.info)}
    info: dict[str, Any] = {}
    left = MAX_INFO_CHARS
    for name, value in verdict.info.items():
        size = len(to_json({name: value}))
        if size <= min(MAX_VALUE_CHARS, left):
            info[name] = value
            left -= size
    return {"status": verdict.status, "reward": verdict.reward, "info": info}


def replayed(entry: Mapping[str, Any], time_s: float, key: SampleKey) -> Verdict:
    """The verdict that an entry of the journal tells of."""
    return Verdict(time_s, key, float(entry["reward"]), entry["status"], entry["info"], outside=True, is_replayed=True)
