"""What the lengths of earlier responses say about those that go on."""

from __future__ import annotations

import random
from statistics import fmean

import numpy as np

from jaxrl.scheduling.tokens.lengths import HISTORY, LengthHistory


def test_the_expected_rest_is_the_mean_over_the_last_responses_that_were_longer():
    rng, history, lengths = random.Random(1), LengthHistory(), []
    for _ in range(HISTORY + 200):  # the oldest are forgotten
        lengths.append(rng.choice((rng.randint(1, 40), rng.randint(1, 30_000))))
        history.add(lengths[-1])
        if rng.random() < 0.1:
            so_far = rng.choice((0, lengths[-1], rng.randint(1, 30_000)))
            longer = [length - so_far for length in lengths[-HISTORY:] if length > so_far]
            assert history.expected_remaining(so_far) == (fmean(longer) if longer else None)
            asked = np.array([[so_far, 0], [lengths[-1], 20]])
            counted = [[sum(length > n for length in lengths[-HISTORY:]) for n in row] for row in asked.tolist()]
            np.testing.assert_array_equal(history.num_longer(asked), counted)
    assert history.lengths() == lengths[-HISTORY:]


def test_nothing_is_longer_than_nothing():
    assert LengthHistory().num_longer(np.array([0, 7])).tolist() == [0, 0]
    assert LengthHistory().expected_remaining(0) is None
