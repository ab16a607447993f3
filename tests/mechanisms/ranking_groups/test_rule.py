"""Ranking groups: the order of prompts, equal groups, the worker of each response, which responses leave theirs, and
what outlives a round."""

from dataclasses import dataclass

import numpy as np
import pytest
from rounds import key

from jaxrl.mechanisms.ranking_groups import RankingGroups
from jaxrl.mechanisms.ranking_groups.rule import Outliers, RankedGroup, Ranking, ranked, shares, worker_order
from jaxrl.scheduling.rounds.events import Launch
from jaxrl.types import Prompt, SampleKey


@dataclass(frozen=True)
class Past:
    median: float
    longest: int


class History:
    """Each response of prompt i had `lengths[i]` tokens."""

    def __init__(self, lengths, growths=()):
        self._lengths, self._growths = dict(lengths), growths

    def lengths(self, index):
        length = self._lengths.get(index)
        return None if length is None else Past(length, length)

    def growths(self):
        return np.asarray(self._growths, np.float64)


def launch(index, samples=2, epoch=1):
    keys = tuple(SampleKey(epoch, index, i) for i in range(samples))
    return Launch(Prompt(epoch, index, (1,), "", "test"), keys)


def indices(launches):
    return [each.prompt.index for each in launches]


def workers_by_prompt(commands):
    return {each.prompt.index: set(each.workers) for each in commands}


def test_prompts_are_ranked_by_the_median_and_ties_by_index():
    launches = [launch(i) for i in (3, 0, 2, 1, 9)]
    assert indices(ranked(launches, History({0: 50, 1: 10, 2: 50, 3: 5, 9: 90}))) == [3, 1, 0, 2, 9]
    # 9 is new: the middle of 5, 10, 50, 50 is 30
    assert indices(ranked(launches, History({0: 50, 1: 10, 2: 50, 3: 5}))) == [3, 1, 9, 0, 2]
    assert ranked(launches, History({})) is None


def test_prompts_go_to_the_workers_of_a_group_in_snake_order_and_few_prompts_by_samples():
    launches = [launch(i, 1) for i in range(7)]
    assert [[key.prompt_index for key in keys] for keys in shares(launches, 3)] == [[0, 5, 6], [1, 4], [2, 3]]
    few = shares([launch(0, 4), launch(1, 4)], 4)
    assert [[key.prompt_index for key in keys] for keys in few] == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_odd_steps_are_dealt_in_ascending_order_and_even_ones_in_descending():
    options = RankingGroups.Options(enable=True, num_groups=4)
    history = History({i: 10 * (i + 1) for i in range(8)})
    launches = [launch(i) for i in range(8)]
    rule = Ranking(options, 4, history)
    assert workers_by_prompt(rule.begin(launches, 1)) == {i: {i // 2} for i in range(8)}
    assert workers_by_prompt(rule.begin(launches, 2)) == {i: {3 - i // 2} for i in range(8)}
    assert rule.now is not None
    assert rule.now.ranks == {3: 0, 2: 1, 1: 2, 0: 3}
    assert rule.now.metrics() == {"rollout/ranking/groups": 4.0, "rollout/ranking/feasible": 0.0}
    assert worker_order(3, 1) == [0, 1, 2]


def test_a_round_that_began_ahead_keeps_its_workers():
    """What is learnt meanwhile would deal it in another way."""
    options = RankingGroups.Options(enable=True, num_groups=2)
    lengths = {i: 100 + i for i in range(4)}
    history = History(lengths)
    rule = Ranking(options, 2, history)
    rule.begin([launch(i) for i in range(4)], 1)
    ahead = rule.ahead([launch(i) for i in range(4)], 2)
    history._lengths[0] = 10_000
    assert rule.begin([launch(i) for i in range(4)], 2) == ahead
    assert rule.begin([launch(i) for i in range(4)], 4) != ahead
    assert Ranking(options, 2, History({})).ahead([launch(0)], 2) == []


SHORT = RankedGroup(0, tuple(key(0, i) for i in range(10)), 100.0)
LONG = RankedGroup(1, tuple(key(1, i) for i in range(11)), 500.0)
NEW = RankedGroup(2, (key(2, 0),), None)


def test_both_conditions_must_hold_and_none_is_named_twice():
    books, tokens = Outliers([SHORT, LONG, NEW], share=0.1, factor=1.5), {}

    def take():
        return books.take(lambda k: tokens.get(k, 0))

    tokens |= dict.fromkeys(SHORT.keys, 151)
    assert take() == [], "all of the group still run"
    for k in SHORT.keys[:8]:
        books.ended(k)
    assert take() == [], "two are left, and the last 10 % are one"
    books.ended(SHORT.keys[8])
    tokens[SHORT.keys[9]] = 150
    assert take() == [], "1.5 times the longest, and not beyond"
    tokens[SHORT.keys[9]] = 151
    assert take() == [SHORT.keys[9]]
    assert take() == []
    for k in LONG.keys[:9]:
        books.ended(k)
    tokens |= {LONG.keys[9]: 10_000, LONG.keys[10]: 10_000, NEW.keys[0]: 10_000}
    assert take() == list(LONG.keys[9:]), "of eleven the last two, rounded up; what has no history has no outliers"


def test_what_was_measured_is_part_of_a_checkpoint_and_counts_only_where_it_may():
    options = RankingGroups.Options(enable=True, num_groups=2)
    history = History({0: 10, 1: 12, 2: 1000, 3: 1000})
    launches = [launch(i, 4) for i in range(4)]

    def made(is_timed=True):
        return Ranking(options, 5, history, lambda rows, tokens: 1e-3 * rows, is_timed=is_timed)

    def dealt(rule):
        rule.begin(launches, 1)
        return [part.num_workers for part in rule.now.allocation.parts]

    rule = made()
    assert dealt(rule) == [1, 4]
    rule.learned(100.0, 2.0)
    other = made()
    other.load_state_dict(rule.state_dict())
    assert other.state_dict() == rule.state_dict()
    assert made().state_dict() != rule.state_dict()
    untimed = made(is_timed=False)
    untimed.learned(1e9, 2.0)
    assert dealt(untimed) == [1, 4]
    with pytest.raises(ValueError, match="schema 9"):
        rule.load_state_dict({"schema": 9})
