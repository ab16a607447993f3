"""Rounds: tables of events and the commands they bring."""

from __future__ import annotations

import numpy as np
import pytest
from fake_rollout import make_sample as sample_of_versions
from hypothesis import given
from hypothesis import strategies as st
from rounds import START, aborted, finish, names, verdict

from jaxrl.scheduling.rounds.events import (
    Abort,
    AwaitVerdict,
    CancelScore,
    Command,
    Event,
    Launch,
    RoundLedger,
    SampleAborted,
    SampleFinished,
    Score,
    Verdict,
)
from jaxrl.scheduling.rounds.race import Race
from jaxrl.scheduling.rounds.round import Departures, Round
from jaxrl.types import FinishReason, Prompt, Sample, SampleKey


def make_prompt(index: int, epoch: int = 0) -> Prompt:
    return Prompt(epoch, index, (1, 2, index), f"prompt {index}", "test")


def key(index: int, i: int = 0, epoch: int = 0) -> SampleKey:
    return SampleKey(epoch, index, i)


def make_sample(k: SampleKey, reason: FinishReason | None = "stop") -> Sample:
    return sample_of_versions(k, [0, 0], reason)


def test_the_synchronous_round_from_start_to_end():
    table: list[tuple[Event, list[tuple], bool]] = [
        (START, [("launch", 7, key(7, 0), key(7, 1)), ("launch", 3, key(3, 0), key(3, 1))], False),
        (finish(key(3, 1)), [("score", key(3, 1))], False),
        (finish(key(7, 0)), [("score", key(7, 0))], False),
        (verdict(key(3, 1), 0.5), [], False),
        (finish(key(7, 1)), [("score", key(7, 1))], False),
        (verdict(key(7, 0), 1.0), [], False),
        (finish(key(3, 0)), [("score", key(3, 0))], False),
        (verdict(key(7, 1), 0.0), [], False),
        (Verdict(9.0, key(3, 0), 0.0, "timeout", {"limit_s": 2.0}), [], True),
    ]
    round = Round([make_prompt(7), make_prompt(3)], group_size=2)
    for event, commands, done in table:
        assert names(round.handle(event)) == commands
        assert round.done == done
    groups = round.groups()
    assert [group.prompt.index for group in groups] == [3, 7]
    assert [[s.key for s in g.samples] for g in groups] == [[key(3, 0), key(3, 1)], [key(7, 0), key(7, 1)]]
    assert [[s.reward for s in g.samples] for g in groups] == [[0.0, 0.5], [1.0, 0.0]]
    assert (groups[0].samples[0].reward_info, groups[0].samples[0].failure) == ({"limit_s": 2.0}, "timeout")
    assert (groups[0].samples[1].reward_info, groups[0].samples[1].failure) == ({}, "")


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([finish(key(0))], "must come first"),
        ([START, finish(key(0, 2))], "must be launched"),
        ([START, finish(key(0)), finish(key(0))], "neither finished before"),
        ([START, aborted(key(0))], "no command asked for it"),
        ([START, verdict(key(0))], "due: None"),
        ([START, finish(key(0)), finish(key(1)), verdict(key(1))], "order of completion"),
        ([START, *[finish(key(i)) for i in (0, 1)], *[verdict(key(i)) for i in (0, 1, 1)]], "round is done"),
    ],
)
def test_events_that_cannot_be_are_refused(events: list[Event], message: str):
    round = Round([make_prompt(0), make_prompt(1)], group_size=1)
    for event in events[:-1]:
        round.handle(event)
    with pytest.raises(ValueError, match=message):
        round.handle(events[-1])


@given(st.data())
def test_groups_do_not_depend_on_the_order_of_events(data: st.DataObject):
    prompts = [make_prompt(i) for i in data.draw(st.permutations(range(3)))]
    round = Round(prompts, group_size=2)
    pending = [k for command in round.handle(START) if isinstance(command, Launch) for k in command.keys]
    scoring: list[SampleKey] = []
    while not round.done:
        if pending and (not scoring or data.draw(st.booleans())):
            event: Event = finish(pending.pop(data.draw(st.integers(0, len(pending) - 1))))
        else:
            event = verdict(scoring[0], scoring.pop(0).prompt_index)
        scoring += [command.sample.key for command in round.handle(event) if isinstance(command, Score)]
    groups = round.groups()
    assert [[s.key for s in group.samples] for group in groups] == [[key(p, 0), key(p, 1)] for p in range(3)]
    assert all(sample.reward == group.prompt.index for group in groups for sample in group.samples)


class Told(Race):
    """A race that answers each event but aborts with what it was told to."""

    def __init__(self, *answers: list[Command]) -> None:
        self.answers, self.ledger = list(answers), RoundLedger()

    def advance(self, *_: object) -> list[Command]:
        return self.answers.pop(0)

    after_finish = after_verdict = advance

    def is_done(self) -> bool:
        return not self.answers and not self.ledger.aborting

    def chosen(self) -> list[SampleKey]:
        return list(self.ledger.verdicts)


def test_a_rule_decides_what_is_launched_aborted_and_chosen():
    """One that keeps the first response of every prompt and aborts the others."""
    prompts, first, second = [make_prompt(0), make_prompt(1)], make_sample(key(0, 1)), make_sample(key(1, 0))
    rule = Told(
        [Launch(p, (key(p.index, 0), key(p.index, 1))) for p in prompts],
        [Score(prompts[0], first), Abort((key(0, 0),))],
        [Score(prompts[1], second), Abort((key(1, 1),))],
        *[[]] * 2,
    )
    round = Round(prompts, group_size=1, race=rule, kind="short")
    assert round.kind == "short"
    round.handle(START)
    assert names(round.handle(SampleFinished(1.0, first, 1))) == [("score", key(0, 1)), ("abort", key(0, 0))]
    with pytest.raises(ValueError, match="nor aborted"):
        round.handle(finish(key(0, 0)))
    round.handle(aborted(key(0, 0)))
    for event in (aborted(key(0, 0)), finish(key(0, 0))):
        with pytest.raises(ValueError, match=r"ended before|nor aborted"):
            round.handle(event)
    round.handle(SampleFinished(1.0, second, 1))
    round.handle(verdict(key(0, 1)))
    round.handle(verdict(key(1, 0)))
    assert not round.done  # it has not been told of the second abort
    with pytest.raises(ValueError, match="must be 'abort'"):
        round.handle(SampleAborted(1.0, make_sample(key(1, 1)), 3))
    round.handle(aborted(key(1, 1)))
    assert round.done
    assert list(round.ledger.aborted) == [key(0, 0), key(1, 1)]
    assert [[s.key for s in group.samples] for group in round.groups()] == [[key(0, 1)], [key(1, 0)]]


def test_prompts_and_finished_responses_come_in_with_launches():
    """A round that starts without prompts; a response that is aborted with `keep` ends by itself after all."""
    prompt, other = make_prompt(0), make_prompt(1)
    old, begun = make_sample(key(0, 0)), make_sample(key(0, 1), "abort")
    rule = Told(
        [Launch(prompt, (key(0, 1),), resumed=(begun,), finished=(old,)), Score(prompt, old)],
        [Launch(other, (key(1, 0), key(1, 1)))],
        [Abort((key(1, 0), key(1, 1)), keep=True)],
        [Score(other, make_sample(key(1, 0)))],
    )
    round = Round((), 2, rule)
    round.handle(START)
    round.handle(verdict(key(0, 0), 0.5))
    round.handle(finish(key(0, 1)))
    round.handle(aborted(key(1, 1)))
    with pytest.raises(AssertionError, match="unfinished, or has a verdict"):  # not the sample that has finished
        round.handle(finish(key(1, 0)))
    assert list(round.ledger.prompts) == [(0, 0), (0, 1)]
    assert not round.ledger.aborting
    assert round.ledger.finished[key(0, 0)].reward == 0.5


def test_scores_can_be_cancelled_and_verdicts_awaited():
    prompt = make_prompt(0)
    samples = [make_sample(key(0, i)) for i in range(3)]
    rule = Told(
        [Launch(prompt, tuple(sample.key for sample in samples))],
        [Score(prompt, samples[0])],
        [Score(prompt, samples[1])],
        [Score(prompt, samples[2]), CancelScore((key(0, 0), key(0, 1))), AwaitVerdict(key(0, 2))],
        [],
    )
    round = Round((), 3, rule)
    round.handle(START)
    for sample in samples:
        round.handle(SampleFinished(1.0, sample, 1))
    with pytest.raises(ValueError, match="due: SampleKey"):
        round.handle(verdict(key(0, 0)))
    round.handle(verdict(key(0, 2)))
    assert [s.key for s in round.groups()[0].samples] == [key(0, 2)]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([CancelScore((key(0, 0),))], "nothing is due"),
        ([Abort((key(0, 0),))], "has finished"),
        ([Launch(make_prompt(0), (key(0, 5),))], "another prompt"),
        ([Launch(make_prompt(1), (key(1, 0),), finished=(make_sample(key(1, 0)),))], "launched twice"),
    ],
)
def test_rules_that_contradict_the_ledger_are_bugs(answers: list[Command], message: str):
    round = Round((), 2, Told([Launch(make_prompt(0), (key(0, 0), key(0, 1)))], answers, []))
    round.handle(START)
    with pytest.raises(AssertionError, match=message):
        round.handle(finish(key(0, 0)))


def test_every_prompt_leaves_once_and_the_counts_survive_a_restart():
    departures = Departures()
    departures.leave((0, 0), "trained")
    departures.leave((0, 1), "filtered")
    departures.leave((3, 700), "trained")
    with pytest.raises(ValueError, match="left before"):
        departures.leave((0, 0), "failed")
    assert departures.state_dict()["left"].tolist() == [[0, 0], [0, 1], [3, 700]]
    restored = Departures()
    restored.load_state_dict(departures.state_dict())
    assert restored.counts == {"trained": 2, "filtered": 1, "failed": 0}
    assert restored.has_left((0, 1))
    assert restored.has_left((3, 700))
    assert not any(restored.has_left(key) for key in [(0, 2), (1, 0), (3, 699), (3, 701)])
    with pytest.raises(ValueError, match="left before"):
        restored.leave((0, 1), "trained")
    with pytest.raises(ValueError, match="schema 2"):
        restored.load_state_dict({**departures.state_dict(), "schema": 2})
    with pytest.raises(ValueError, match="add up"):
        restored.load_state_dict({**departures.state_dict(), "left": np.zeros((0, 2), np.int64)})
    assert restored.counts["trained"] == 2
