"""Rounds: tables of events and the commands they bring."""

from __future__ import annotations

import pytest
from fake_rollout import make_sample as sample_of_versions
from rounds import START, aborted, finish, names, verdict

from jaxrl.scheduling.rounds.events import Event, SampleAborted, Verdict
from jaxrl.scheduling.rounds.round import BatchSettings, Departures, PlannedGroup, RaceLimits, Round
from jaxrl.types import Prompt, SampleKey


def make_prompt(index: int, epoch: int = 0) -> Prompt:
    return Prompt(epoch, index, (1, 2, index), f"prompt {index}", "test")


def key(index: int, i: int = 0, epoch: int = 0) -> SampleKey:
    return SampleKey(epoch, index, i)


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
    round = Round.of([make_prompt(7), make_prompt(3)], group_size=2)
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
        ([START, finish(key(0)), finish(key(0))], "has finished before"),
        ([START, aborted(key(0))], "no command asked for it"),
        ([START, verdict(key(0))], "due: None"),
        ([START, finish(key(0)), finish(key(1)), verdict(key(1))], "order of completion"),
        ([START, *[finish(key(i)) for i in (0, 1)], *[verdict(key(i)) for i in (0, 1, 1)]], "round is done"),
    ],
)
def test_events_that_cannot_be_are_refused(events: list[Event], message: str):
    round = Round.of([make_prompt(0), make_prompt(1)], group_size=1)
    for event in events[:-1]:
        round.handle(event)
    with pytest.raises(AssertionError, match=message):
        round.handle(events[-1])


def test_what_was_aborted_has_no_other_end():
    """One of two responses is needed, so the other one is aborted."""
    prompts = iter([make_prompt(0), make_prompt(1)])
    limits = RaceLimits(BatchSettings(1, 1), num_responses=1, num_spare=1)
    round = Round(limits, lambda: PlannedGroup.first(next(prompts), 1))
    round.handle(START)
    assert ("abort", key(1)) in names(round.handle(finish(key(0))))
    ended = SampleAborted(1.0, sample_of_versions(key(1), [0], "stop"), 1)
    for event, message in ((finish(key(1)), "was aborted"), (ended, "must be 'abort'")):
        with pytest.raises(AssertionError, match=message):
            round.handle(event)
    round.handle(aborted(key(1)))
    for event, message in ((finish(key(1)), "was aborted"), (aborted(key(1)), "has ended before")):
        with pytest.raises(AssertionError, match=message):
            round.handle(event)


def test_every_prompt_leaves_once_and_the_counts_survive_a_restart():
    departures = Departures()
    departures.leave((0, 0), "trained")
    departures.leave((0, 1), "filtered")
    departures.leave((3, 700), "trained")
    with pytest.raises(AssertionError, match="left before"):
        departures.leave((0, 0), "failed")
    assert departures.state_dict()["left"].tolist() == [[0, 0], [0, 1], [3, 700]]
    restored = Departures()
    restored.load_state_dict(departures.state_dict())
    assert restored.counts == {"trained": 2, "filtered": 1, "failed": 0}
    assert restored.has_left((0, 1))
    assert restored.has_left((3, 700))
    assert not any(restored.has_left(key) for key in [(0, 2), (1, 0), (3, 699), (3, 701)])
    with pytest.raises(AssertionError, match="left before"):
        restored.leave((0, 1), "trained")
    with pytest.raises(ValueError, match="schema 2"):
        restored.load_state_dict({**departures.state_dict(), "schema": 2})
