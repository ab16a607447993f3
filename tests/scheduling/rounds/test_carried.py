"""What is carried from round to round, packed for a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from fake_rollout import FakePrompts, make_sample, through_disk
from rounds import key

from jaxrl.scheduling.rounds.carried import pack_groups, pack_samples, unpack_groups, unpack_samples
from jaxrl.types import Group


def test_packed_samples_come_back_as_they_were():
    samples = [make_sample(key(p, 1, 2), [p] * p, reason) for p, reason in enumerate(("stop", "abort", None, "length"))]
    samples[1].text, samples[3].text = "half of a pair: \ud83d", "naïve \n text"
    back = unpack_samples(through_disk(pack_samples(samples)))
    for one, other in zip(samples, back, strict=True):
        assert (one.key, one.finish_reason, one.text) == (other.key, other.finish_reason, other.text)
        for name in ("token_ids", "rollout_logprobs", "sampled_logprobs", "versions"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    assert unpack_samples(through_disk(pack_samples([]))) == []


def test_packed_groups_come_back_with_all_that_their_scorers_said():
    prompts = FakePrompts(8)
    said = [
        [{"error": "timeout"}, {"acc": 1.0, "parts": {"format": 0.5}, "overlong_reward": -0.25, "overlong": True}],
        [{}, {"judge": {"text": "naïve", "votes": [1, None]}, "ratio": float("inf")}],
    ]
    groups = [
        Group(
            prompts.get(1, i + 3),
            [
                replace(
                    make_sample(key(i + 3, j), [0, 1], "stop"),
                    reward=0.1 * i + j,
                    reward_info=each,
                    failure=each.get("error", ""),
                )
                for j, each in enumerate(infos)
            ],
        )
        for i, infos in enumerate(said)
    ]
    back = unpack_groups(through_disk(pack_groups(groups)), prompts.get)
    assert [group.prompt for group in back] == [group.prompt for group in groups]
    assert [[sample.reward_info for sample in group.samples] for group in back] == said
    assert [s.failure for group in back for s in group.samples] == ["timeout", "", "", ""]
    assert [[s.reward for s in group.samples] for group in back] == [[s.reward for s in g.samples] for g in groups]
