"""One rollout round: events in, commands out, until every prompt has its scored samples.

Purpose: `Round` keeps the ledger of a round (what was launched, finished, scored, aborted) and refuses events that do
not fit it; a *rule* decides what to launch, what to do with what finishes, and when the round ends. `SynchronousRule`
is here, for evaluations; training uses `jaxrl.scheduling.rounds.race.Race`, plain rounds too. A `BatchRule`
(`jaxrl.scheduling.rounds.batches`) makes the rounds and keeps what outlives them (queues, buffers).

Source: the synchronous round of RollPacker §2 (P0 prompts × R0 responses, wait for all).

Departures: time decides nothing here. Verdicts must come in the order in which their samples completed; the backend
holds back a verdict that arrives early.

Example::

    round = Round(prompts, group_size=8)
    while not round.done:
        for command in round.handle(backend.wait()):
            backend.apply(command)
    groups = round.groups()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from jaxrl.scheduling.rounds.events import (
    Abort,
    AwaitVerdict,
    CancelScore,
    Command,
    Event,
    Launch,
    RoundStarted,
    SampleAborted,
    SampleFinished,
    Score,
    Verdict,
)
from jaxrl.types import Group, Prompt, Sample, SampleKey

PromptKey = tuple[int, int]

RoundKind = Literal["plain", "short", "long", "partial"]
"""`short`: launches more than it needs; `long`: waits for what such rounds have left; `partial`: stops early and keeps
the unfinished; `plain`: all others."""


@dataclass(slots=True)
class RoundLedger:
    """What has happened in a round so far: written by `Round`, read by rules. Dicts keep the order of events."""

    prompts: dict[PromptKey, Prompt]
    group_size: int
    launched: dict[SampleKey, Prompt] = field(default_factory=dict)
    finished: dict[SampleKey, Sample] = field(default_factory=dict)  # with their rewards, once scored
    scoring: dict[SampleKey, None] = field(default_factory=dict)  # sent to the reward pool, no verdict yet
    verdicts: dict[SampleKey, Verdict] = field(default_factory=dict)
    aborting: dict[SampleKey, bool] = field(default_factory=dict)  # asked to end, not told yet; whether tokens matter
    aborted: dict[SampleKey, Sample] = field(default_factory=dict)  # with what they had


class RoundRule(Protocol):
    """Decides, without side effects. A rule may keep state of its own."""

    def start(self, ledger: RoundLedger) -> Iterable[Command]:
        """The first commands of the round."""
        ...

    def after_finish(self, ledger: RoundLedger, sample: Sample) -> Iterable[Command]:
        """A response has ended; it is in the ledger."""
        ...

    def after_abort(self, ledger: RoundLedger, sample: Sample) -> Iterable[Command]:
        """A response that the rule aborted has ended; it is in the ledger."""
        ...

    def after_verdict(self, ledger: RoundLedger, verdict: Verdict) -> Iterable[Command]:
        """A response has been scored; it is in the ledger."""
        ...

    def is_done(self, ledger: RoundLedger) -> bool:
        """Whether the round has ended. Asked after every event."""
        ...

    def chosen(self, ledger: RoundLedger) -> Iterable[SampleKey]:
        """The scored samples that the round yields in groups. Asked when the round is done."""
        ...

    def certain(self, ledger: RoundLedger) -> Iterable[PromptKey]:
        """Prompts whose samples have ended and will be in `chosen`, whatever happens from now on; they need no verdict
        yet. What was certain stays so."""
        ...


@dataclass(frozen=True, slots=True)
class SynchronousRule:
    """Every prompt `group_size` times, and wait for all of them."""

    def start(self, ledger: RoundLedger) -> list[Command]:
        return [
            Launch(prompt, tuple(SampleKey(prompt.epoch, prompt.index, i) for i in range(ledger.group_size)))
            for prompt in ledger.prompts.values()
        ]

    def after_finish(self, ledger: RoundLedger, sample: Sample) -> list[Command]:
        return [Score(ledger.launched[sample.key], sample)]

    def after_abort(self, ledger: RoundLedger, sample: Sample) -> list[Command]:
        return []

    def after_verdict(self, ledger: RoundLedger, verdict: Verdict) -> list[Command]:
        return []

    def is_done(self, ledger: RoundLedger) -> bool:
        return len(ledger.verdicts) == len(ledger.launched)

    def chosen(self, ledger: RoundLedger) -> list[SampleKey]:
        return list(ledger.verdicts)

    def certain(self, ledger: RoundLedger) -> list[PromptKey]:
        ended = Counter(ledger.launched[key].key for key in ledger.finished)
        return [prompt_key for prompt_key in ledger.prompts if ended[prompt_key] == ledger.group_size]


class Round:
    """One round.

    Args:
      prompts: to launch, in this order; their keys must differ. With a `rule` given, the list may be empty: the rule
        brings prompts in with its launches.
      group_size: responses per prompt (`rollout.n`).
      rule: the synchronous one by default.
      kind: the kind of round, for resource planning and for pictures.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        rule: RoundRule | None = None,
        kind: RoundKind = "plain",
    ) -> None:
        by_key = {prompt.key: prompt for prompt in prompts}
        if (not prompts and rule is None) or len(by_key) < len(prompts):
            raise ValueError(
                f"a round needs prompts, each (epoch, index) once: {len(prompts)} given, {len(by_key)} different "
                "(data.train_batch_size)"
            )
        if group_size < 1:
            raise ValueError(f"rollout.n ({group_size}) must be >= 1")
        self.kind: RoundKind = kind
        self.ledger = RoundLedger(by_key, group_size)
        self._rule: RoundRule = SynchronousRule() if rule is None else rule
        self._started = False
        self._done = False

    @property
    def done(self) -> bool:
        """The round has ended; no event may follow."""
        return self._done

    def handle(self, event: Event) -> list[Command]:
        """Takes in one event and returns what to do. Raises ValueError for an event that does not fit the round."""
        if self._done:
            raise ValueError(f"{event}: the round is done")
        if self._started == isinstance(event, RoundStarted):
            raise ValueError(f"{event}: RoundStarted must come first, and once")
        match event:
            case RoundStarted():
                self._started = True
                commands = self._rule.start(self.ledger)
            case SampleFinished(sample=sample):
                self._record_finish(sample)
                commands = self._rule.after_finish(self.ledger, sample)
            case SampleAborted(sample=sample):
                self._record_abort(sample)
                commands = self._rule.after_abort(self.ledger, sample)
            case Verdict():
                self._record_verdict(event)
                commands = self._rule.after_verdict(self.ledger, event)
        commands = list(commands)
        for command in commands:
            self._record_command(command)
        self._done = self._rule.is_done(self.ledger)
        assert not (self._done and self.ledger.aborting), "a round ends before its aborted responses have been told"
        return commands

    def groups(self) -> list[Group]:
        """What the round yields: groups sorted by prompt key, samples sorted by key, with their rewards."""
        assert self._done, "groups() of a round that is not done"
        ledger = self.ledger
        samples: dict[PromptKey, list[Sample]] = {}
        for key in sorted(self._rule.chosen(ledger)):
            samples.setdefault(ledger.launched[key].key, []).append(ledger.finished[key])
        return [Group(ledger.prompts[prompt_key], samples[prompt_key]) for prompt_key in sorted(samples)]

    def certain(self) -> list[Group]:
        """Groups that `groups` will have, whatever happens from now on, scored or not; sorted as there.

        What a training step needs of them can be computed before the round has ended. A round that is given up yields
        nothing all the same.
        """
        ledger, wanted = self.ledger, set(self._rule.certain(self.ledger))
        samples: dict[PromptKey, list[Sample]] = {prompt_key: [] for prompt_key in wanted}
        for key in (*ledger.verdicts, *ledger.scoring):  # asked after every event: a key's own prompt needs no look-up
            if (prompt_key := (key.epoch, key.prompt_index)) in wanted:
                samples[prompt_key].append(ledger.finished[key])
        return [
            Group(ledger.prompts[prompt_key], sorted(samples[prompt_key], key=lambda sample: sample.key))
            for prompt_key in sorted(wanted)
            if len(samples[prompt_key]) == ledger.group_size
        ]

    def _record_finish(self, sample: Sample) -> None:
        ledger, key = self.ledger, sample.key
        lost = key in ledger.aborted or not ledger.aborting.get(key, True)
        if key not in ledger.launched or key in ledger.finished or lost:
            raise ValueError(f"{key} finished: it must be launched, and neither finished before nor aborted")
        if sample.finish_reason not in ("stop", "length"):
            raise ValueError(f"{key} finished with reason {sample.finish_reason!r}: it must be 'stop' or 'length'")
        ledger.aborting.pop(key, None)
        ledger.finished[key] = sample

    def _record_abort(self, sample: Sample) -> None:
        ledger, key = self.ledger, sample.key
        if key not in ledger.aborting:
            raise ValueError(f"{key} aborted: no command asked for it, or it has ended before")
        if sample.finish_reason != "abort":
            raise ValueError(f"{key} aborted with reason {sample.finish_reason!r}: it must be 'abort'")
        del ledger.aborting[key]
        ledger.aborted[key] = sample

    def _record_verdict(self, verdict: Verdict) -> None:
        ledger, key = self.ledger, verdict.key
        due = next(iter(ledger.scoring), None)
        if due != key:
            raise ValueError(f"verdict on {key}: they come once each, in the order of completion; due: {due}")
        del ledger.scoring[key]
        ledger.verdicts[key] = verdict
        ledger.finished[key] = replace(
            ledger.finished[key], reward=verdict.reward, reward_info=dict(verdict.info), failure=verdict.failure
        )

    def _record_command(self, command: Command) -> None:
        """Writes a rule's command into the ledger; asserts that the two do not contradict each other."""
        ledger = self.ledger
        match command:
            case Launch(prompt=prompt, keys=keys, resumed=resumed, finished=finished):
                known = ledger.prompts.setdefault(prompt.key, prompt)
                assert known is prompt, f"{prompt.key} launched: another prompt of this round has that key"
                assert {s.key for s in resumed} <= set(keys), f"{prompt.key}: resumed samples must be among the keys"
                for key in (*keys, *(sample.key for sample in finished)):
                    assert (key.epoch, key.prompt_index) == prompt.key, f"{key} launched for prompt {prompt.key}"
                    assert key not in ledger.launched, f"{key} launched twice"
                    ledger.launched[key] = prompt
                ledger.finished |= {sample.key: sample for sample in finished}
            case Score(sample=sample):
                assert ledger.finished.get(sample.key) is sample, f"{sample.key} scored: unfinished, or has a verdict"
                assert sample.key not in ledger.scoring, f"{sample.key} scored twice"
                ledger.scoring[sample.key] = None
            case Abort(keys=keys, keep=keep):
                for key in keys:
                    assert key in ledger.launched, f"{key} aborted: it was not launched"
                    assert key not in ledger.finished, f"{key} aborted: it has finished"
                    assert key not in ledger.aborting, f"{key} aborted twice"
                    assert key not in ledger.aborted, f"{key} aborted twice"
                    ledger.aborting[key] = keep
            case CancelScore(keys=keys):
                for key in keys:
                    assert key in ledger.scoring, f"scoring of {key} cancelled: nothing is due"
                    del ledger.scoring[key]
            case AwaitVerdict(key=key):
                assert key in ledger.scoring, f"verdict on {key} awaited: nothing is due"


Outcome = Literal["trained", "filtered", "failed"]


class Departures:
    """How prompts left the system: each (epoch, index) once, as trained, filtered or failed. Part of a checkpoint.

    It keeps flags, in blocks of neighbouring prompts: a long run has a million of them, every step boundary copies
    them, and with quotas of sources many epochs have few prompts each.
    """

    SCHEMA = 1
    BLOCK = 1024

    def __init__(self) -> None:
        self.counts: dict[Outcome, int] = {"trained": 0, "filtered": 0, "failed": 0}
        self._left: dict[tuple[int, int], np.ndarray] = {}  # (epoch, index // BLOCK) -> bool [BLOCK]

    def leave(self, prompt_key: PromptKey, outcome: Outcome) -> None:
        if self.has_left(prompt_key):
            raise ValueError(f"prompt {prompt_key} leaves as {outcome!r}: it has left before")
        self.counts[outcome] += 1
        self._mark(*prompt_key)

    def has_left(self, prompt_key: PromptKey) -> bool:
        epoch, index = prompt_key
        flags = self._left.get((epoch, index // self.BLOCK))
        return flags is not None and bool(flags[index % self.BLOCK])

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the prompts that left as flat integers [N, 2] (epoch, index), ascending."""
        rows = [np.zeros((0, 2), np.int64)]
        for epoch, block in sorted(self._left):
            indices = np.flatnonzero(self._left[epoch, block]) + block * self.BLOCK
            rows.append(np.stack([np.full_like(indices, epoch), indices], axis=1))
        return {"schema": self.SCHEMA, "counts": dict(self.counts), "left": np.concatenate(rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["schema"] != self.SCHEMA:
            raise ValueError(f"departures of schema {state['schema']}: this version reads schema {self.SCHEMA}")
        counts: dict[Outcome, int] = {outcome: int(state["counts"][outcome]) for outcome in self.counts}
        if sum(counts.values()) != len(state["left"]):
            raise ValueError(f"departures: counts {counts} must add up to the {len(state['left'])} prompts that left")
        self.counts, self._left = counts, {}
        for epoch, index in state["left"]:
            self._mark(int(epoch), int(index))

    def _mark(self, epoch: int, index: int) -> None:
        place = epoch, index // self.BLOCK
        if place not in self._left:
            self._left[place] = np.zeros(self.BLOCK, np.bool_)
        self._left[place][index % self.BLOCK] = True
