"""One rollout round: events in, commands out, until every prompt has its scored samples.

`Round` keeps the ledger of a round and refuses events that do not fit it; its `Race` decides what to launch, what to do
with what finishes, and when the round ends. A `BatchRule` (`jaxrl.scheduling.rounds.batches`) makes the rounds of
training and keeps what outlives them (queues, buffers).

Source: the synchronous round of RollPacker §2 (P0 prompts × R0 responses, wait for all).

Departures: time decides nothing here. Verdicts must come in the order in which their samples completed; the backend
holds back a verdict that arrives early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from jaxrl.scheduling.rounds.events import (
    Abort,
    AwaitVerdict,
    CancelScore,
    Command,
    Event,
    Launch,
    Outcome,
    PromptKey,
    RoundStarted,
    SampleAborted,
    SampleFinished,
    Score,
    Verdict,
)
from jaxrl.scheduling.rounds.race import BatchSettings, PlannedGroup, Race, RaceLimits
from jaxrl.types import Group, Prompt, Sample, check_schema

if TYPE_CHECKING:
    import numpy as np

RoundKind = Literal["plain", "short", "long", "partial"]
"""`short`: launches more than it needs; `long`: waits for what such rounds have left; `partial`: stops early and keeps
the unfinished; `plain`: all others."""


class Round:
    """One round.

    Args:
      prompts: to launch, in this order; their keys must differ. Empty with a `race`, which brings prompts in.
      race: None: every prompt `group_size` times, and wait for all of them.
      kind: for resource planning and for pictures.
    """

    def __init__(
        self, prompts: Sequence[Prompt], group_size: int, race: Race | None = None, kind: RoundKind = "plain"
    ) -> None:
        if race is None:
            assert prompts, "a round needs prompts"
            supply = iter([PlannedGroup.first(prompt, group_size) for prompt in prompts])
            race = Race(RaceLimits(BatchSettings(len(prompts), group_size), group_size), lambda: next(supply))
        self.kind: RoundKind = kind
        self.group_size = group_size
        self.race = race
        self.ledger = race.ledger
        self._started = False
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    def handle(self, event: Event) -> list[Command]:
        """The answer to an event, which must fit the round."""
        assert not self._done, f"{event}: the round is done"
        assert self._started != isinstance(event, RoundStarted), f"{event}: RoundStarted must come first, and once"
        match event:
            case RoundStarted():
                self._started = True
                commands = self.race.advance()
            case SampleFinished(sample=sample):
                self._record_finish(sample)
                commands = self.race.after_finish(sample)
            case SampleAborted(sample=sample):
                self._record_abort(sample)
                commands = []
            case Verdict():
                self._record_verdict(event)
                commands = self.race.after_verdict(event)
        for command in commands:
            self._record_command(command)
        self._done = self.race.is_done()
        return commands

    def groups(self) -> list[Group]:
        """The batch: groups sorted by prompt key, samples sorted by key, with their rewards."""
        assert self._done, "groups() of a round that is not done"
        ledger = self.ledger
        samples: dict[PromptKey, list[Sample]] = {}
        for key in sorted(self.race.chosen()):
            samples.setdefault(ledger.launched[key].key, []).append(ledger.finished[key])
        return [Group(ledger.prompts[prompt_key], samples[prompt_key]) for prompt_key in sorted(samples)]

    def certain(self) -> list[Group]:
        """Groups that `groups` will hold after any further events, scored or not; sorted as there. (A dropped round
        still yields nothing.)"""
        ledger, wanted = self.ledger, set(self.race.certain())
        samples: dict[PromptKey, list[Sample]] = {prompt_key: [] for prompt_key in wanted}
        for key in (*ledger.verdicts, *ledger.scoring):  # asked after every event: a key's own prompt needs no look-up
            if (prompt_key := (key.epoch, key.prompt_index)) in wanted:
                samples[prompt_key].append(ledger.finished[key])
        return [
            Group(ledger.prompts[prompt_key], sorted(samples[prompt_key], key=lambda sample: sample.key))
            for prompt_key in sorted(wanted)
            if len(samples[prompt_key]) == self.group_size
        ]

    def _record_finish(self, sample: Sample) -> None:
        ledger, key = self.ledger, sample.key
        lost = key in ledger.aborted or not ledger.aborting.get(key, True)
        assert key in ledger.launched, f"{key} finished: it must be launched"
        assert key not in ledger.finished, f"{key} finished: it has finished before"
        assert not lost, f"{key} finished: it was aborted"
        assert sample.has_ended, f"{key} finished with reason {sample.finish_reason!r}"
        ledger.aborting.pop(key, None)
        ledger.finished[key] = sample

    def _record_abort(self, sample: Sample) -> None:
        ledger, key = self.ledger, sample.key
        assert key in ledger.aborting, f"{key} aborted: no command asked for it, or it has ended before"
        assert sample.finish_reason == "abort", f"{key} aborted: its reason ({sample.finish_reason}) must be 'abort'"
        del ledger.aborting[key]
        ledger.aborted[key] = sample

    def _record_verdict(self, verdict: Verdict) -> None:
        ledger, key = self.ledger, verdict.key
        due = next(iter(ledger.scoring), None)
        assert due == key, f"verdict on {key}: they come once each, in the order of completion; due: {due}"
        del ledger.scoring[key]
        ledger.verdicts[key] = verdict
        ledger.finished[key] = replace(
            ledger.finished[key], reward=verdict.reward, reward_info=dict(verdict.info), failure=verdict.failure
        )

    def _record_command(self, command: Command) -> None:
        """Asserts that the command and the ledger do not contradict each other."""
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


class Departures:
    """How prompts left the system: each (epoch, index) once. Part of a checkpoint. It keeps flags, in blocks of
    neighbouring prompts: a long run has a million of them, and every step boundary copies them."""

    SCHEMA = 1
    BLOCK = 1024

    def __init__(self) -> None:
        self.counts: dict[Outcome, int] = {"trained": 0, "filtered": 0, "failed": 0}
        self._left: dict[tuple[int, int], np.ndarray] = {}  # (epoch, index // BLOCK) -> bool [BLOCK]

    def leave(self, prompt_key: PromptKey, outcome: Outcome) -> None:
        assert not self.has_left(prompt_key), f"prompt {prompt_key} leaves as {outcome!r}: it has left before"
        self.counts[outcome] += 1
        self._mark(*prompt_key)

    def has_left(self, prompt_key: PromptKey) -> bool:
        epoch, index = prompt_key
        flags = self._left.get((epoch, index // self.BLOCK))
        return flags is not None and bool(flags[index % self.BLOCK])

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the prompts that left as flat integers [N, 2] (epoch, index), ascending."""
        import numpy as np

        rows = [np.zeros((0, 2), np.int64)]
        for epoch, block in sorted(self._left):
            indices = np.flatnonzero(self._left[epoch, block]) + block * self.BLOCK
            rows.append(np.stack([np.full_like(indices, epoch), indices], axis=1))
        return {"schema": self.SCHEMA, "counts": dict(self.counts), "left": np.concatenate(rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema("departures", state, self.SCHEMA)
        counts: dict[Outcome, int] = {outcome: int(state["counts"][outcome]) for outcome in self.counts}
        if sum(counts.values()) != len(state["left"]):
            raise ValueError(f"departures: counts {counts} must add up to the {len(state['left'])} prompts that left")
        self.counts, self._left = counts, {}
        for epoch, index in state["left"]:
            self._mark(int(epoch), int(index))

    def _mark(self, epoch: int, index: int) -> None:
        place = epoch, index // self.BLOCK
        if place not in self._left:
            import numpy as np

            self._left[place] = np.zeros(self.BLOCK, np.bool_)
        self._left[place][index % self.BLOCK] = True
