"""The scoring of a round, as the round receives it: verdicts in logical order, those of a clock from the journal.

The round receives verdicts in the order in which their samples completed, however late one arrives. What a clock or
something outside the run has decided (`Verdict.outside`, a time-out, a crash) is written to the journal, whole, before
that; a step that runs again after a crash takes it from there and does not ask again. A simulated clock needs no
journal.

Departures: of what a scorer says besides its reward, the journal keeps what is short (`MAX_VALUE_CHARS` of a value's
JSON, `MAX_INFO_CHARS` of all). A replayed verdict has that, and no seconds: they are not counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrl.record.files import to_json
from jaxrl.record.journal import Journal
from jaxrl.rewards.reward_metrics import FailureWarnings
from jaxrl.scheduling.mechanism import ScoreLimits
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

if TYPE_CHECKING:
    from jaxrl.rewards.reward_pool import RewardPool
    from jaxrl.sim.scoring import ScoringWorkers

    Scoring = RewardPool | ScoringWorkers

MAX_VALUE_CHARS, MAX_INFO_CHARS = 8192, 65536
_CLOCKS = ("timeout", "crash")


@dataclass(slots=True)
class _Scored:
    prompt: Prompt
    limits_s: tuple[float, ...] = ()
    verdict: Verdict | None = None


class Verdicts:
    """The samples of a round that are being scored. `clock`: stamps verdicts that the journal gives; `limits`: gives
    the samples of training prompts time limits, and learns from their verdicts."""

    def __init__(
        self,
        scoring: Scoring,
        clock: Callable[[], float],
        journal: Journal | None = None,
        limits: ScoreLimits | None = None,
    ) -> None:
        self._scoring, self._clock, self._journal, self._limits = scoring, clock, journal, limits
        self._step, self._round = -1, 0
        self._sent: dict[SampleKey, _Scored] = {}  # not delivered, in the order in which the samples completed
        self._known: list[Verdict] = []  # from the journal, or without a scorer
        self._failed = FailureWarnings()  # of what no pool has scored
        self._busy = BusyTime()

    @property
    def due(self) -> SampleKey | None:
        """The sample whose verdict the round receives next; None: nothing is being scored."""
        return next(iter(self._sent), None)

    def begin(self, step: int, round_index: int) -> None:
        """A round starts; `round_index`: as `RoundInfo.index`."""
        self._step, self._round = step, round_index

    def send(self, prompt: Prompt, sample: Sample) -> None:
        """Has a finished sample scored, unless its environment has failed, or the journal has its verdict."""
        key, episode = sample.key, sample.episode
        scored = self._sent[key] = _Scored(prompt)
        if episode is not None and episode.failed:
            verdict = Verdict(self._clock(), key, 0.0, episode.failed, {"error": episode.error})
            self._known.append(self._failed.add(verdict))
            return
        if self._limits is not None and not self._round:
            scored.limits_s = self._limits.limits(prompt)
        entry = None if self._journal is None else self._journal.find(self._step, "verdict", self._place(key))
        if entry is None:
            self._busy.begin(key, self._clock())
            self._scoring.submit(prompt, sample, scored.limits_s)
        else:
            self._known.append(replayed(entry, self._clock(), key))

    def completed(self) -> list[Verdict]:
        """The verdicts that are due and have come; never waits."""
        return self._take(self._scoring.completed())

    def wait(self, timeout_s: float) -> list[Verdict]:
        """The same; waits for what is due. Raises RuntimeError where nothing is being scored."""
        if not (self._known or self._scoring.num_pending):
            raise RuntimeError(f"step {self._step}: the reward pool has lost {self.due}")
        return self._take([] if self._known else self._scoring.wait(timeout_s))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """The round receives no verdict on these samples."""
        self._scoring.cancel(keys)
        now_s = self._clock()
        for key in keys:
            self._busy.end(key, now_s)
            self._sent.pop(key, None)
        self._known = [verdict for verdict in self._known if verdict.key not in keys]

    def clear(self) -> None:
        """The round is dropped."""
        self._scoring.cancel(set(self._sent))
        self._sent.clear()
        self._known.clear()
        self._busy = BusyTime()

    def end(self) -> dict[str, float]:
        """Ends the round and returns the scoring's own counts. `reward/busy_s`: the seconds in which anything was being
        scored."""
        measured = {**self._scoring.take_metrics(), "reward/busy_s": self._busy.take()}
        return {name: float(value) for name, value in measured.items()}

    def _take(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Notes verdicts as they arrive; returns those that are due and have arrived."""
        known, self._known = self._known, []
        for verdict in known:
            self._note(verdict)
        for verdict in verdicts:
            self._busy.end(verdict.key, verdict.time_s)
            scored = self._sent.get(verdict.key)
            if scored is None:
                continue
            # written down: what a clock, or something outside the run, has decided, or other time limits might change
            limits = None if self._round else self._limits
            is_close = limits is not None and limits.is_close(scored.prompt, verdict)
            if self._journal is not None and (verdict.outside or verdict.status in _CLOCKS or is_close):
                self._journal.append(self._step, "verdict", self._place(verdict.key), recorded(verdict))
            self._note(verdict)
        ready: list[Verdict] = []
        while self._sent and (verdict := next(iter(self._sent.values())).verdict) is not None:
            ready.append(verdict)
            del self._sent[verdict.key]
        return ready

    def _note(self, verdict: Verdict) -> None:
        """A verdict has arrived; mechanisms learn from the scorer's info on a training sample."""
        scored = self._sent[verdict.key]
        scored.verdict = verdict
        if self._limits is not None and not self._round:
            self._limits.scored(scored.prompt, scored.limits_s, verdict)

    def _place(self, key: SampleKey) -> tuple[int, ...]:
        return (self._round, key.epoch, key.prompt_index, key.sample_index, key.attempt)


def recorded(verdict: Verdict) -> dict[str, Any]:
    """The part of a verdict that the journal keeps: `status`, `reward` and the short values of `info`."""
    info: dict[str, Any] = {}
    left = MAX_INFO_CHARS
    for name, value in verdict.info.items():
        size = len(to_json({name: value}))
        if size <= min(MAX_VALUE_CHARS, left):
            info[name] = value
            left -= size
    return {"status": verdict.status, "reward": verdict.reward, "info": info}


def replayed(entry: Mapping[str, Any], time_s: float, key: SampleKey) -> Verdict:
    return Verdict(time_s, key, float(entry["reward"]), entry["status"], entry["info"], outside=True, is_replayed=True)


class BusyTime:
    """How long a round's scorers were busy: the time in which at least one sample waited for its verdict. The verdicts'
    own times count, however late the backend looks at them. Times are whole nanoseconds, so that a simulated run that
    resumes, with a clock that begins at 0 again, reports the same."""

    def __init__(self) -> None:
        self._since_ns: dict[SampleKey, int] = {}
        self._spans_ns: list[tuple[int, int]] = []

    def begin(self, key: SampleKey, time_s: float) -> None:
        self._since_ns[key] = round(time_s * 1e9)

    def end(self, key: SampleKey, time_s: float) -> None:
        since_ns = self._since_ns.pop(key, None)
        if since_ns is not None:
            self._spans_ns.append((since_ns, round(time_s * 1e9)))

    def take(self) -> float:
        """Seconds that lie in at least one span that has ended, each once; forgets them."""
        spans = sorted(self._spans_ns)
        total_ns, until_ns = 0, spans[0][0] if spans else 0
        for since_ns, end_ns in spans:
            total_ns += max(end_ns - max(since_ns, until_ns), 0)
            until_ns = max(until_ns, end_ns)
        self._spans_ns.clear()
        return total_ns / 1e9
