"""The scoring of a round, as the round hears of it: verdicts in logical order, those of a clock from the journal.

Purpose: `Verdicts` stands between the backend and the scoring. It hands verdicts over in the order in which their
samples completed, however late one arrives. What a clock or something outside the run has decided (`Verdict.outside`,
a time-out, a crash) is written to the journal, whole, before the round hears of it; a step that runs again after a
crash takes it from there and does not ask again. A simulated clock needs no journal.

Source: docs/architecture.md.

Departures: of what a scorer says besides its reward, the journal keeps what is short (`MAX_VALUE_CHARS` of a value's
JSON, `MAX_INFO_CHARS` of all). A replayed verdict has that, and no seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from jaxrl.record.files import to_json
from jaxrl.record.journal import Journal
from jaxrl.rewards.tally import VerdictTally
from jaxrl.scheduling.rounds.adaptive_timeout import AdaptiveTimeouts
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


class Verdicts:
    """What of a round is being scored.

    Args:
      scoring: scores finished samples.
      clock: stamps verdicts that the journal gives.
      journal: where decisions of the clock go; None: they are not kept, and there are no earlier ones.
      timeouts: gives the test cases of training prompts their time limits, and learns from verdicts; None: the scorer
        has limits of its own.
      tally: counts what the round hears.
    """

    def __init__(
        self,
        scoring: Scoring,
        clock: Callable[[], float],
        journal: Journal | None = None,
        timeouts: AdaptiveTimeouts | None = None,
        tally: VerdictTally | None = None,
    ) -> None:
        self._scoring, self._clock, self._journal, self._timeouts = scoring, clock, journal, timeouts
        self._tally = VerdictTally() if tally is None else tally
        self._step, self._round = -1, 0
        self._due: deque[SampleKey] = deque()  # in the order in which the samples completed
        self._arrived: dict[SampleKey, Verdict] = {}
        self._sent: dict[SampleKey, tuple[Prompt, tuple[float, ...]]] = {}  # with time limits
        self._sources: dict[SampleKey, str] = {}  # of samples whose verdict the round has still to hear
        self._replayed: set[SampleKey] = set()  # of these, whose verdict the journal gave
        self._busy = BusyTime()

    @property
    def due(self) -> SampleKey | None:
        """The sample whose verdict is to be handed over next; None: none is."""
        return self._due[0] if self._due else None

    def begin(self, step: int, round_index: int) -> None:
        """A round of training step `step` starts; `round_index`: 0 of a training round, 1 of an evaluation."""
        self._step, self._round = step, round_index

    def send(self, prompt: Prompt, sample: Sample) -> None:
        """Has a finished sample scored, unless the journal has its verdict."""
        key = sample.key
        self._due.append(key)
        self._sources[key] = prompt.source
        entry = None if self._journal is None else self._journal.find(self._step, "verdict", self._place(key))
        limits_s = ()
        if self._timeouts is not None and not self._round:
            limits_s = self._timeouts.limits(prompt)
            self._sent[key] = prompt, limits_s
        if entry is None:
            self._busy.begin(key, self._clock())
            self._scoring.submit(prompt, sample, limits_s)
        else:
            verdict = self._arrived[key] = replayed(entry, self._clock(), key)
            self._replayed.add(key)
            self._learn(verdict)

    def completed(self) -> list[Verdict]:
        """The verdicts that are due and have come; never waits."""
        return self._take(self._scoring.completed())

    def wait(self, timeout_s: float) -> list[Verdict]:
        """The same; waits for what is due. Raises RuntimeError where nothing is being scored."""
        if not self._scoring.num_pending:
            raise RuntimeError(f"step {self._step}: the reward pool has lost {self._due[0]}")
        return self._take(self._scoring.wait(timeout_s))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """No verdict on these samples is handed over."""
        self._scoring.cancel(keys)
        now_s = self._clock()
        for key in keys:
            self._busy.end(key, now_s)
        self._due = deque(key for key in self._due if key not in keys)
        for key in keys:
            self._arrived.pop(key, None)
            self._sent.pop(key, None)
            self._sources.pop(key, None)
            self._replayed.discard(key)

    def heard(self, verdict: Verdict) -> None:
        """The round hears of this verdict, which counts from here on."""
        self._tally.add(self._sources.pop(verdict.key), verdict, is_replayed=verdict.key in self._replayed)
        self._replayed.discard(verdict.key)

    def clear(self) -> None:
        """The round is dropped."""
        self._scoring.cancel(set(self._due))
        for kept in (self._due, self._arrived, self._sent, self._sources, self._replayed, self._tally):
            kept.clear()
        self._busy = BusyTime()

    def end(self) -> dict[str, float]:
        """The round is over; its counts. A step that runs again counts the same. `reward/busy_s`: the seconds in which
        anything was being scored."""
        assert not self._due, "a round ends while something of it is being scored"
        measured = self._tally.take(self._scoring.take_metrics())
        measured["reward/busy_s"] = self._busy.take()
        return measured | ({} if self._timeouts is None or self._round else self._timeouts.take_metrics())

    def _take(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Notes verdicts as they arrive; returns those that are due and have arrived."""
        for verdict in verdicts:
            if self._journal is not None and (verdict.outside or verdict.status in _CLOCKS or self._is_close(verdict)):
                self._journal.append(self._step, "verdict", self._place(verdict.key), recorded(verdict))
            self._learn(verdict)
            self._arrived[verdict.key] = verdict
            self._busy.end(verdict.key, verdict.time_s)
        ready: list[Verdict] = []
        while self._due and self._due[0] in self._arrived:
            ready.append(self._arrived.pop(self._due.popleft()))
        return ready

    def _is_close(self, verdict: Verdict) -> bool:
        """Whether other time limits might have changed it."""
        sent = self._sent.get(verdict.key)
        return sent is not None and self._timeouts is not None and self._timeouts.is_close(sent[0], verdict.info)

    def _learn(self, verdict: Verdict) -> None:
        sent = self._sent.pop(verdict.key, None)
        if sent is not None and self._timeouts is not None:
            self._timeouts.learn(*sent, verdict.info)

    def _place(self, key: SampleKey) -> tuple[int, ...]:
        """The key of a verdict in the journal."""
        return (self._round, key.epoch, key.prompt_index, key.sample_index, key.attempt)


def recorded(verdict: Verdict) -> dict[str, Any]:
    """What the journal keeps of a verdict: `status`, `reward` and the short values of `info`."""
    info: dict[str, Any] = {}
    left = MAX_INFO_CHARS
    for name, value in verdict.info.items():
        size = len(to_json({name: value}))
        if size <= min(MAX_VALUE_CHARS, left):
            info[name] = value
            left -= size
    return {"status": verdict.status, "reward": verdict.reward, "info": info}


def replayed(entry: Mapping[str, Any], time_s: float, key: SampleKey) -> Verdict:
    """The verdict that an entry of the journal tells of; also one of an older version, with `status` and `error`."""
    info = entry["info"] if "info" in entry else {"error": entry["error"]}
    return Verdict(time_s, key, float(entry.get("reward", 0.0)), entry["status"], info, outside=True)
