"""Each estimator against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trainer_fixtures import group_of

from jaxrl.config import AlgorithmSection
from jaxrl.config.checks import NEEDS_WHOLE_BATCH
from jaxrl.training import advantages
from jaxrl.training.advantages import kl_estimate
from jaxrl.types import Episode, Turn


def group(rewards, lengths=None, index=0):
    return group_of(lengths or [2] * len(rewards), rewards, index)


TABLE = [
    # (estimator, options, rewards, advantages): each sample has two tokens; test_verl.py has what verl computes
    ("grpo", {"norm_adv_by_std_in_grpo": False}, [0, 0, 0, 1], [-0.25, -0.25, -0.25, 0.75]),
    ("grpo_turns", {}, [0, 0, 0, 1], [-0.5, -0.5, -0.5, 1.5]),  # one turn each
    ("none", {}, [0, 0, 0, 1], [0, 0, 0, 0]),
    # no spread, no signal
    ("grpo", {}, [1, 1, 1], [0, 0, 0]),
    ("rloo", {}, [2, 2], [0, 0]),
    # nothing to compare with
    ("grpo", {}, [1], [0]),
    ("rloo", {}, [1], [0]),
    # eight tokens, two of them +1: mean 1/4, unbiased variance 12/56
    ("reinforce_plus_plus", {}, [0, 0, 0, 1], np.array([-0.25, -0.25, -0.25, 0.75]) / np.sqrt(12 / 56)),
]


@pytest.mark.parametrize(("estimator", "options", "rewards", "expected"), TABLE)
def test_table(estimator, options, rewards, expected):
    found, _ = advantages.compute([group(rewards)], AlgorithmSection(adv_estimator=estimator, **options))
    assert [a.dtype for a in found] == [np.float32] * len(rewards)
    np.testing.assert_allclose(found, np.repeat(np.array(expected)[:, None], 2, axis=1), rtol=1e-5, atol=1e-6)


def test_groups_are_separate_and_lengths_ragged():
    groups = [group([0, 1], [1, 3]), group([5, 5, 8], [2, 0, 1], index=1)]
    found, _ = advantages.compute(groups, AlgorithmSection(adv_estimator="dr_grpo"))
    assert [a.tolist() for a in found] == [[-0.5], [0.5] * 3, [-1, -1], [], [2]]


def test_each_turn_has_its_own_reward_and_those_behind_it():
    """Turn rewards 0, 1 and 0, 0, 2; the second sample's score is 0.5 more than its turns: 2.5 in the last. Of the five
    the mean is 0.7 and the unbiased variance 4.8 / 4."""
    whole = group([1, 2.5], [6, 9])
    ends = [(2, 6), (1, 4, 9)]
    for sample, turns, stops in zip(whole.samples, [(0, 1), (0, 0, 2)], ends, strict=True):
        made = tuple(Turn(end, "", reward=reward) for end, reward in zip(stops, turns, strict=True))
        sample.episode = Episode(made, stop="done")
    found, _ = advantages.compute([whole], AlgorithmSection(adv_estimator="grpo_turns"))
    one, other = (np.array(each) / np.sqrt(4.8 / 4) for each in ([-0.7, 0.3], [-0.7, -0.7, 1.8]))
    np.testing.assert_allclose(found[0], [one.sum()] * 2 + [one[1]] * 4, rtol=1e-5)
    np.testing.assert_allclose(found[1], [other.sum()] + [other[1:].sum()] * 3 + [other[2]] * 5, rtol=1e-5)
    assert [each.dtype for each in found] == [np.float32] * 2


def test_no_turn_of_a_failed_environment_counts():
    """A good turn and a failed one beside a sample with 0.5: 0, 0 and 0.5, as if nothing had been given."""
    whole = group([0.0, 0.5], [4, 2])
    whole.samples[0].failure = "the simulator is down"
    for sample, turns in zip(whole.samples, [(1.0, 0.0), (0.5,)], strict=True):
        made = tuple(Turn(2 * (i + 1), "", reward=reward) for i, reward in enumerate(turns))
        sample.episode = Episode(made, stop="done")
    found, _ = advantages.compute([whole], AlgorithmSection(adv_estimator="grpo_turns"))
    low, high = np.array([-1 / 6, 1 / 3]) / np.std([0, 0, 0.5], ddof=1)
    np.testing.assert_allclose(found[0], [2 * low] * 2 + [low] * 2, rtol=1e-5)
    np.testing.assert_allclose(found[1], [high] * 2, rtol=1e-5)


def test_reinforce_plus_plus_whitens_over_the_tokens_that_are_learnt_from():
    """verl's `masked_whiten`: masked tokens enter neither mean nor variance, and get no advantage."""
    algorithm = AlgorithmSection(adv_estimator="reinforce_plus_plus")
    masks = [np.array([0, 1, 1]), np.array([0, 0]), np.array([1])]
    found, _ = advantages.compute([group([4, 100, 1], [3, 2, 1])], algorithm, loss_masks=masks)
    learnt = np.array([4.0, 4.0, 1.0])  # mean 3, unbiased variance 3
    expected = (learnt - 3) / np.sqrt(3 + 1e-8)
    assert "reinforce_plus_plus" in NEEDS_WHOLE_BATCH
    np.testing.assert_allclose(found[0], [0, *expected[:2]], rtol=1e-6)
    np.testing.assert_array_equal(found[1], [0, 0])
    np.testing.assert_allclose(found[2], expected[2:], rtol=1e-6)


def scored(infos, lengths, index=0):
    whole = group([0.0] * len(infos), lengths, index)
    for sample, info in zip(whole.samples, infos, strict=True):
        sample.reward_info, sample.failure = info, info.get("failed", "")
    return whole


GDPO = AlgorithmSection(adv_estimator="gdpo", gdpo_reward_keys=["own_reward", "short"], gdpo_reward_weights=[1.0, 0.5])


def test_gdpo():
    """Two rewards, normalised in each group, weighted and added, then whitened over the tokens that are learnt from;
    a part is found behind its name, what could not be scored has 0 of each, and a user's own `error` is no failure."""
    right, short = ([1, 0, 1], [0, 1]), ([0, -2, -1], [0, -3])
    groups = [
        scored([{"own_reward": a, "parts": {"short": b}} for a, b in zip(right[0], short[0], strict=True)], [1, 2, 3]),
        scored([{"failed": "time-out"}, {"own_reward": True, "error": "", "parts": {"short": -3.0}}], [2, 1], 1),
    ]
    masks = [np.ones(1), np.array([1, 0]), np.ones(3), np.ones(2), np.ones(1)]

    def normalised(values):
        values = np.array(values, np.float64)
        return (values - values.mean()) / (values.std(ddof=1) + 1e-6)

    sums = [*(normalised(right[0]) + 0.5 * normalised(short[0])), *(normalised(right[1]) + 0.5 * normalised(short[1]))]
    learnt = np.repeat(sums, [1, 1, 3, 2, 1])
    whitened = (np.array(sums) - learnt.mean()) / np.sqrt(learnt.var(ddof=1) + 1e-8)
    found, returns = advantages.compute(groups, GDPO, loss_masks=masks)
    assert returns is None
    for mine, mask, value in zip(found, masks, whitened, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, mask * value, rtol=1e-6)
    # of two responses the better one is: equal sums, and yet a signal
    pair = scored([{"own_reward": 1.0, "short": -1.0}, {"own_reward": 0.0, "short": 0.0}], [1, 1])
    found, _ = advantages.compute([pair], GDPO)
    np.testing.assert_allclose(found, [[np.sqrt(0.5)], [-np.sqrt(0.5)]], rtol=1e-5)


# ---------------------------------------------------------------- with a critic


def test_gae_without_values_or_tokens():
    algorithm = AlgorithmSection(adv_estimator="gae")
    with pytest.raises(ValueError, match="adv_estimator=gae needs the values of a critic"):
        advantages.compute([group([1])], algorithm)
    found, returns = advantages.compute([group([1, 0], [0, 0])], algorithm, values=[np.zeros(0)] * 2)
    assert returns is not None
    assert [len(x) for x in (*found, *returns)] == [0] * 4
    alone, _ = advantages.compute([group([1], [1])], algorithm, values=[np.zeros(1)])
    assert alone[0].tolist() == [0.0], "one token has nothing to stand out from"


# ---------------------------------------------------------------- KL estimates: `test_verl.py` has their values


def test_an_estimate_far_off_is_bounded_in_numpy_and_in_jax():
    for library in (np, jnp):
        found = kl_estimate(library.asarray([0.0, 0.5]), library.asarray([-30.0, 0.0]), "low_var_kl")
        assert isinstance(found, np.ndarray if library is np else jax.Array)
        np.testing.assert_allclose(found, [10, np.exp(-0.5) - 0.5], rtol=1e-6)
