"""What is carried from round to round, packed for a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from fake_rollout import make_sample, through_disk
from rounds import key

from jaxrl.scheduling.rounds.carried import pack_samples, unpack_samples


def test_packed_samples_come_back_as_they_were():
    samples = [make_sample(key(p, 1, 2), [p] * p, reason) for p, reason in enumerate(("stop", "abort", None, "length"))]
    samples[3].text = "naïve \n text"
    back = unpack_samples(through_disk(pack_samples(samples)))
    for one, other in zip(samples, back, strict=True):
        assert (one.key, one.finish_reason, one.text) == (other.key, other.finish_reason, other.text)
        for name in ("token_ids", "rollout_logprobs", "sampled_logprobs", "versions"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    assert unpack_samples(through_disk(pack_samples([]))) == []
    with pytest.raises(ValueError, match="must fit together"):
        unpack_samples({**pack_samples(samples), "texts": []})
