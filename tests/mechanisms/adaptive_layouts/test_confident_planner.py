"""The planner that raises tp beyond noise only: its test against tables and draws, its way down, its state."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest
from jaxrl.mechanisms.adaptive_layouts.confident_planner import ConfidentPlanner, _normal_of_t, risen
from jaxrl.mechanisms.adaptive_layouts.tp_planner import TpPlanner

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts

DEGREES = (1, 2, 4, 8)


def make_planner(degrees: tuple[int, ...] = DEGREES, initial: int = 2, trial_rounds: int = 16) -> ConfidentPlanner:
    return ConfidentPlanner(AdaptiveLayouts.Options(), degrees, initial, trial_rounds)


# ---------------------------------------------------------------- the test


# one-sided quantiles of Student's t and of the normal distribution, from printed tables
@pytest.mark.parametrize(("freedom", "t"), [(8, 5.041), (10, 4.587), (20, 3.850), (30, 3.646), (120, 3.373)])
def test_the_tail_of_students_t(freedom: float, t: float):
    assert _normal_of_t(t * t, freedom) == pytest.approx(3.2905, abs=0.01)  # both at 0.0005


@pytest.mark.parametrize(
    ("before", "last", "found"),
    [
        # 16 rounds of 100: the mean is the same in 105, and t(18) at 0.001 is 3.61, the deviate of about 147
        ([100] * 16, [105], False),
        ([100] * 16, [143], False),
        ([100] * 16, [152], True),
        ([100] * 16, [130, 130, 130, 130], True),  # less is enough in four rounds
        ([100] * 16, [112, 112, 112, 112], False),
        ([80, 120] * 8, [160, 160, 160, 160], True),  # they scatter 8 times as much as Poisson counts
        ([80, 120] * 8, [130, 130, 130, 130], False),
        ([100], [300], True),
        ([0] * 16, [2], False),
        ([0] * 16, [4], True),
        ([30] * 17, [31, 32], False),  # 63 is 1.05 times 60: a deviance of nothing, and of less by rounding
        ([], [1000], False),
        ([5], [0], False),
    ],
)
def test_what_is_a_rise(before: list[int], last: list[int], found: bool):
    assert risen([*before, *last], len(last), rise=1.05, level=0.001) is found


def exact_chance(total: int, part: float, last: int) -> float:
    """P(Binomial(total, part) >= last)."""
    return 1 - sum(math.comb(total, k) * part**k * (1 - part) ** (total - k) for k in range(last))


def test_the_test_is_near_the_exact_one_where_counts_are_poisson():
    """Given the sum, the last count is binomial. With a thousand rounds before, nothing is lost to their scatter."""
    before = [3, 5] * 500
    smallest = next(last for last in range(4, 40) if risen([*before, last], 1, 1.0, 0.001))
    part = 1 / 1001
    chances = [exact_chance(4000 + last, part, last) for last in (smallest - 1, smallest)]
    assert chances[1] < 0.0015
    assert chances[0] > 0.001


@pytest.mark.parametrize(("mean", "num", "window"), [(100, 16, 1), (100, 64, 4), (10, 32, 2)])
def test_noise_passes_as_rarely_as_the_level_says(mean: float, num: int, window: int):
    rng = np.random.default_rng(3)
    draws = rng.poisson(mean, (4000, num + window))
    share = np.mean([risen(row.tolist(), window, 1.0, 0.02) for row in draws])
    assert share < 0.02 + 3 * math.sqrt(0.02 * 0.98 / 4000)


# ---------------------------------------------------------------- rounds


def rounds_of(planner: ConfidentPlanner | TpPlanner, seed: int, *parts: tuple[int, float]) -> list[int]:
    """The degrees after rounds with Poisson counts, in parts of (rounds, mean)."""
    rng = np.random.default_rng(seed)
    return [planner.observe(int(count)) for rounds, mean in parts for count in rng.poisson(mean, rounds)]


def test_noise_does_not_ratchet():
    """300 rounds of Poisson(100) counts. The paper's rule is at the largest degree after eight of them."""
    seeds = range(40)
    stayed = [set(rounds_of(make_planner(), seed, (300, 100))) == {2} for seed in seeds]
    assert np.mean(stayed) >= 0.95
    paper = [rounds_of(TpPlanner(AdaptiveLayouts.Options(), DEGREES, 2), seed, (300, 100)) for seed in seeds]
    assert all(degrees[-1] == 8 for degrees in paper)
    assert median(degrees.index(8) + 1 for degrees in paper) <= 10


def test_a_rise_by_half_is_found_within_eight_rounds():
    found = []
    for seed in range(60):
        degrees = rounds_of(make_planner(), seed, (16, 100), (8, 150))
        assert degrees[15] == 2
        assert max(degrees) > 2
        found.append(degrees.index(4) - 15)
    assert median(found) <= 2


def test_growth_that_no_single_round_shows_is_found():
    planner, degrees = make_planner(), []
    for i in range(60):
        degrees.append(planner.observe(100 + 2 * i))
    assert degrees[0] == 2
    assert 4 in degrees


def test_a_rise_that_passes_is_undone():
    planner = make_planner(trial_rounds=3)
    assert [planner.observe(100) for _ in range(6)] == [2] * 6
    assert planner.observe(400) == 4
    assert [planner.observe(90) for _ in range(3)] == [4, 4, 2], "three rounds later it comes down"
    assert [planner.observe(100) for _ in range(20)] == [2] * 20, "and not below the degree that it was raised from"


def test_a_rise_that_stays_is_tried_ever_more_rarely():
    planner = make_planner((2, 4), trial_rounds=3)
    for _ in range(6):
        planner.observe(100)
    degrees = [planner.observe(400 if planner.degree() == 2 else 250) for _ in range(60)]
    tried = [i for i in range(1, 60) if (degrees[i - 1], degrees[i]) == (4, 2)]
    assert degrees[0] == 4
    assert tried == [3, 10, 23, 48], "after 3, 6, 12 and 24 rounds, and each time one round shows that it was in vain"


def test_a_trial_that_turns_out_well_is_the_last_of_its_kind():
    planner = make_planner((2, 4), trial_rounds=3)

    def play(*counts: int) -> list[int]:
        return [planner.observe(count) for count in counts]

    play(*[100] * 6)
    assert play(400, 250, 250, 250) == [4, 4, 4, 2]
    assert play(400, *[250] * 6) == [4] * 6 + [2], "in vain: the next wait is doubled"
    assert play(100, 100, 100) == [2, 2, 2]
    assert play(400, 250, 250, 250) == [4, 4, 4, 2], "three rounds without a rise: it waits three again"


@pytest.mark.parametrize(
    ("degrees", "counts"),
    [
        # trials in vain, the waits that they double, and one that turns out well
        ((2, 4), [*[100] * 6, 400, *[250] * 3, 400, *[250] * 6, *[100] * 3, 400, *[250] * 6]),
        ((1, 2), [*[0] * 4, 50, *[0] * 12]),  # quiet rounds, in vain at first
    ],
)
def test_a_planner_restored_after_any_of_these_rounds_goes_on_the_same(degrees: tuple[int, ...], counts: list[int]):
    whole = make_planner(degrees, trial_rounds=3)
    expected = [whole.observe(count) for count in counts]
    for cut in range(len(counts)):
        first, second = (make_planner(degrees, trial_rounds=3) for _ in range(2))
        for count in counts[:cut]:
            first.observe(count)
        second.load_state_dict(first.state_dict())
        assert [second.observe(count) for count in counts[cut:]] == expected[cut:], cut


def test_quiet_rounds_lower_tp_and_preemptions_there_raise_it_again():
    planner = make_planner(initial=2)
    assert [planner.observe(count) for count in (0, 0, 0, 0)] == [2, 2, 2, 1]
    assert planner.observe(50) == 2, "compared with the quiet rounds of the degree above"
    assert [planner.observe(0) for _ in range(8)] == [2] * 7 + [1], "in vain: twice as many quiet rounds"
    assert [planner.observe(0) for _ in range(9)] == [1] * 9


def test_nothing_is_compared_with_the_first_round_and_at_the_largest_degree():
    planner = make_planner((1, 2), 2)
    assert [planner.observe(count) for count in (10, 1000, 100_000)] == [2, 2, 2]
    assert make_planner().observe(10**6) == 2


def test_kinds_of_rounds_are_compared_with_their_like():
    planner = make_planner()
    for _ in range(10):
        planner.observe(179, "short")
        planner.observe(100, "long")
    assert planner.observe(179, "short") == 2
    assert planner.observe(179, "long") == 4
    assert (planner.degree("short"), planner.degree("other")) == (2, 2)


def test_the_rule_may_be_changed_at_a_resume():
    """The degree is kept; what the other rule knows of earlier rounds means nothing to this one."""
    paper, confident = TpPlanner(AdaptiveLayouts.Options(), DEGREES, 2), make_planner()
    assert [paper.observe(count) for count in (10, 20)] == [2, 4]
    confident.load_state_dict(paper.state_dict())
    assert (confident.degree(), confident.observe(1000)) == (4, 4)
    assert confident.observe(9000) == 8
    back = TpPlanner(AdaptiveLayouts.Options(), DEGREES, 2)
    back.load_state_dict(confident.state_dict())
    assert (back.degree(), back.observe(10)) == (8, 8)
