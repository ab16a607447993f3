"""The planners of tp between rounds: tables by hand, the test of the confident one, its way down, and their state."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.mechanisms.adaptive_layouts.planners import ConfidentPlanner, Planner, TpPlanner, _normal_of_t, risen

DEGREES = (1, 2, 4, 8)


def make_paper(degrees: tuple[int, ...] = DEGREES, initial: int = 2, **options: float) -> TpPlanner:
    return TpPlanner(AdaptiveLayouts.Options().replace(**options), degrees, initial)  # pyright: ignore[reportArgumentType]


def make_planner(degrees: tuple[int, ...] = DEGREES, initial: int = 2, trial_rounds: int = 16) -> ConfidentPlanner:
    return ConfidentPlanner(AdaptiveLayouts.Options(), degrees, initial, trial_rounds)


# ---------------------------------------------------------------- the paper's


@pytest.mark.parametrize(
    ("preemptions", "degrees"),
    [
        ([10], [2]),  # nothing to compare with
        ([100, 105], [2, 2]),  # 105 is 1.05 x 100, not more
        ([100, 106], [2, 4]),
        ([100, 106, 110], [2, 4, 4]),  # 1.05 x 106 = 111.3
        ([100, 106, 112], [2, 4, 8]),
        ([100, 106, 112, 118], [2, 4, 8, 8]),  # 118 > 117.6, and 8 is the largest
        ([100, 50, 53], [2, 2, 4]),  # against the round before, which had 50: 53 > 52.5
        ([0, 1], [2, 4]),  # from none to some
        ([0, 0, 0, 0], [2, 2, 2, 1]),
        ([0, 0, 0, 0, 0, 0, 0, 0], [2, 2, 2, 1, 1, 1, 1, 1]),  # 1 is the smallest
        ([0, 0, 0, 1, 0, 0, 0], [2, 2, 2, 4, 4, 4, 4]),  # three quiet ones twice are not four in a row
        ([0, 0, 0, 1, 0, 0, 0, 0], [2, 2, 2, 4, 4, 4, 4, 2]),
        ([5, 6, 0, 0, 0, 0, 0, 0, 0, 0], [2, 4, 4, 4, 4, 2, 2, 2, 2, 1]),  # each halving takes four of its own
        ([0, 0, 0, 0, 3], [2, 2, 2, 1, 2]),  # halved, and back
        ([7, 7, 7, 7, 7], [2, 2, 2, 2, 2]),
    ],
)
def test_the_papers_rule(preemptions: list[int], degrees: list[int]):
    planner = make_paper()
    assert planner.degree() == 2
    assert [planner.observe(count) for count in preemptions] == degrees
    assert planner.degree() == degrees[-1]


def test_kinds_of_rounds_are_compared_with_their_like_by_the_papers_rule():
    """Short rounds have 1.79 times the preemptions of long ones: that is no rise (RollPacker §4.2)."""
    rounds = [("short", 179), ("short", 179), ("long", 100), ("short", 179), ("long", 120), ("short", 170)]
    planner, mixed = make_paper(), make_paper()
    assert [planner.observe(count, kind) for kind, count in rounds] == [2, 2, 2, 2, 4, 2]
    assert (planner.degree("short"), planner.degree("long"), planner.degree("other")) == (2, 4, 2)
    assert [mixed.observe(count) for _, count in rounds] == [2, 2, 2, 4, 4, 8]


def test_tp_stays_on_allowed_degrees():
    odd = make_paper((1, 3, 6), 1)
    assert [odd.observe(count) for count in (1, 2, 4, 0, 0, 0, 0)] == [1, 3, 6, 6, 6, 6, 3]


def test_other_constants():
    planner = make_paper(planner_rise=2.0, planner_quiet_rounds=1)
    assert [planner.observe(count) for count in (10, 20, 41, 0)] == [2, 2, 4, 2]


# ---------------------------------------------------------------- the test of the confident one


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


# ---------------------------------------------------------------- its rounds


def rounds_of(planner: Planner, seed: int, *parts: tuple[int, float]) -> list[int]:
    """The degrees after rounds with Poisson counts, in parts of (rounds, mean)."""
    rng = np.random.default_rng(seed)
    return [planner.observe(int(count)) for rounds, mean in parts for count in rng.poisson(mean, rounds)]


def test_noise_does_not_ratchet():
    """300 rounds of Poisson(100) counts. The paper's rule is at the largest degree after eight of them."""
    seeds = range(40)
    stayed = [set(rounds_of(make_planner(), seed, (300, 100))) == {2} for seed in seeds]
    assert np.mean(stayed) >= 0.95
    paper = [rounds_of(make_paper(), seed, (300, 100)) for seed in seeds]
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


# ---------------------------------------------------------------- their state


def short_trials(degrees: tuple[int, ...] = DEGREES, initial: int = 2) -> ConfidentPlanner:
    return make_planner(degrees, initial, trial_rounds=2)


@pytest.mark.parametrize("make", [make_paper, short_trials])
@settings(deadline=None)
@given(
    rounds=st.lists(st.tuples(st.sampled_from(["short", "long"]), st.sampled_from([0, 1, 40, 50, 200])), max_size=40),
    cut=st.integers(0, 40),
)
def test_state_is_saved_and_a_step_is_one_degree(make: Callable[..., Planner], rounds: list[tuple[str, int]], cut: int):
    whole, first, second = (make() for _ in range(3))
    degrees: list[int] = []
    for kind, count in rounds:
        before = whole.degree(kind)
        after = whole.observe(count, kind)
        degrees.append(after)
        assert abs(DEGREES.index(after) - DEGREES.index(before)) <= 1
        if make is make_paper:
            assert after >= before or count == 0, "only quiet rounds lower tp"
            assert after <= before or count > 0
    for kind, count in rounds[:cut]:
        first.observe(count, kind)
    second.load_state_dict(first.state_dict())
    assert [second.observe(count, kind) for kind, count in rounds[cut:]] == degrees[cut:]
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(("make", "counts"), [(make_paper, (1, 2, 4)), (short_trials, (100, 100, 1000, 1000, 10_000))])
def test_restored_on_another_machine(make: Callable[..., Planner], counts: tuple[int, ...]):
    planner = make()
    for count in counts:
        planner.observe(count)
    assert planner.degree() == 8
    smaller = make((1, 2, 4), 1)
    smaller.load_state_dict(planner.state_dict())
    assert (smaller.degree(), smaller.observe(5)) == (4, 4)
    coarser, low = make((3, 6), 3), make(initial=1)
    low.observe(0)
    coarser.load_state_dict(low.state_dict())
    assert coarser.degree() == 3, "nothing allowed is as small: the smallest"
    with pytest.raises(ValueError, match=r"tp planner of schema 4: this version reads"):
        smaller.load_state_dict({**planner.state_dict(), "schema": 4})


def test_the_rule_may_be_changed_at_a_resume():
    """The degree is kept; what the other rule knows of earlier rounds means nothing to this one."""
    paper, confident = make_paper(), make_planner()
    assert [paper.observe(count) for count in (10, 20)] == [2, 4]
    confident.load_state_dict(paper.state_dict())
    assert (confident.degree(), confident.observe(1000)) == (4, 4)
    assert confident.observe(9000) == 8
    back = make_paper()
    back.load_state_dict(confident.state_dict())
    assert (back.degree(), back.observe(10)) == (8, 8)
