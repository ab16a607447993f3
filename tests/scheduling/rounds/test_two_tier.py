"""Workers for ranking groups: targets on a line, fewest workers, and what happens where no line can be met."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.scheduling.rounds.two_tier import PRECISION_S, Load, Part, allot, equal_shares, rollout_s


def tau(loads):
    """A step takes 10 ms and 1 ms for each row."""
    return rollout_s(loads, lambda rows, tokens: 0.010 + 0.001 * rows)


def group_s(load, workers):
    return tau([Load(load.length, load.responses / workers)])


def counts(allotment):
    return [part.num_workers for part in allotment.parts]


@pytest.mark.parametrize(
    ("groups", "workers", "expected"),
    [
        (4, 4, [(0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 1)]),
        (3, 5, [(0, 0, 1), (1, 1, 2), (2, 2, 2)]),
        (5, 2, [(0, 2, 1), (3, 4, 1)]),
        (1, 3, [(0, 0, 3)]),
    ],
)
def test_equal_shares(groups, workers, expected):
    assert equal_shares(groups, workers) == tuple(Part(*part) for part in expected)


def test_rollout_time_by_hand():
    # 2 rows for 100 steps (12 ms), then 1 row for 50 more (11 ms); two tokens a step halve it
    loads = [Load(150, 1), Load(100, 1)]
    assert tau(loads) == pytest.approx(100 * 0.012 + 50 * 0.011)
    steps = []
    assert rollout_s(loads, lambda rows, tokens: steps.append((rows, tokens)) or 1.0, 2.0) == 75
    assert steps == [(2, 100.0), (1, 125.0)], "rows, and their tokens halfway"


def test_long_groups_get_the_workers_that_short_ones_can_spare():
    loads = [Load(length, 32) for length in (100, 120, 150, 800)]
    allotment = allot(loads, 8, tau)
    assert allotment.is_feasible
    assert counts(allotment)[-1] > counts(allotment)[0]
    assert sum(counts(allotment)) == 8


def test_the_update_sets_the_first_target():
    """Where the update takes longer than any group on one worker, each needs one worker only; what is left over goes to
    the group that takes longest."""
    loads = [Load(100, 8), Load(200, 8), Load(300, 8)]
    assert counts(allot(loads, 6, tau, train_s=100.0)) == [1, 1, 4]
    # 200 and 300 tokens: 3.6 s and 5.4 s on one worker; the latter is 4.2 s on two, and 3.8 s on three


def test_nothing_feasible_gives_equal_shares():
    """The middle group needs more than its target leaves: it is as long as the last, and the line is bent."""
    loads = [Load(10, 4), Load(1000, 40), Load(1000, 40)]
    allotment = allot(loads, 3, tau)
    assert not allotment.is_feasible
    assert counts(allotment) == [1, 1, 1]
    assert allot(loads, 3, None) == allotment, "as where nothing predicts times"


def test_few_workers_serve_runs_of_neighbours():
    """Runs under a line whose ends are together shorter than those of equal runs."""
    loads = [Load(length, 8) for length in (100, 110, 120, 130, 140, 1000)]
    allotment = allot(loads, 3, tau)
    assert allotment.is_feasible

    def ends_s(parts):
        times = [tau(loads[part.first : part.last + 1]) for part in parts]
        assert times[1] <= (times[0] + times[2]) / 2 + PRECISION_S, "under the line"
        return times[0] + times[2]

    assert ends_s(allotment.parts) < ends_s(equal_shares(6, 3))
    assert allotment.parts == allot(loads, 3, tau).parts


LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=6).map(sorted)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 64), st.sampled_from([0.0, 1.0, 30.0]))
def test_every_group_is_served_and_no_worker_is_left_out(lengths, workers, responses, train_s):
    loads = [Load(length, responses) for length in lengths]
    parts = allot(loads, workers, tau, train_s).parts
    assert [i for part in parts for i in range(part.first, part.last + 1)] == list(range(len(loads)))
    assert sum(part.num_workers for part in parts) == workers
    assert all(part.num_workers >= 1 for part in parts)


@given(LENGTHS.filter(lambda lengths: len(lengths) > 1), st.integers(0, 4), st.integers(1, 32))
def test_no_other_way_to_share_workers_out_has_a_better_line(lengths, more, responses):
    """Against all of them: lines from any t0 that passes above the times, within the paper's interval of d."""
    workers, loads = len(lengths) + more, [Load(length, responses) for length in lengths]
    last = len(loads) - 1

    def ends(shared):
        """The smallest sum of the two ends of a line above the groups' times."""
        times = [group_s(load, k) for load, k in zip(loads, shared, strict=True)]
        for t0 in (group_s(loads[0], k) for k in range(1, more + 2)):
            high = max(group_s(loads[-1], 1) - t0, 0.0) / last
            d = max(0.0, *((time - t0) / i for i, time in enumerate(times) if i))
            if times[0] <= t0 and d <= high * (1 + 1e-9) + 1e-9 * t0:
                yield 2 * t0 + last * d

    every = itertools.product(range(1, more + 2), repeat=len(loads))
    possible = [end for shared in every if sum(shared) == workers for end in ends(shared)]
    allotment = allot(loads, workers, tau)
    assert allotment.is_feasible == bool(possible)
    if possible:
        assert min(ends(counts(allotment))) <= min(possible) + 2 * last * PRECISION_S
