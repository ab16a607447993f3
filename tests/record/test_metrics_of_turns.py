"""What an environment has answered is in no figure about the model."""

from __future__ import annotations

import numpy as np
import pytest
from fake_rollout import make_sample

from jaxrl.record import metrics
from jaxrl.rewards.request import ScoreRequest
from jaxrl.scheduling.rounds.batches import off_policy_share
from jaxrl.types import Group, Prompt, Sample, SampleKey, TrainBatch


def group(*versions: list[int]) -> Group:
    samples = [make_sample(SampleKey(0, 0, i), own, "stop") for i, own in enumerate(versions)]
    for sample in samples:
        sample.reward = float(sample.key.sample_index)
    return Group(Prompt(0, 0, (1, 2), "", ""), samples)


PLAIN, TURNS = group([3, 3, 4, 5], [5, 5]), group([3, -1, -1, 3, 4, -1, 5], [5, -1, 5])


def test_staleness_lengths_and_rates():
    plain, turns = (
        metrics.off_policy_metrics([each], 6)
        | metrics.batch_metrics([each], 10)
        | metrics.evaluation_metrics([each], 10)
        | {"share": off_policy_share(each.samples, 5)}
        for each in (PLAIN, TURNS)
    )
    assert turns == plain
    assert (turns["training/off_policy/max_staleness"], turns["share"]) == (2, pytest.approx(0.5))
    line = {"timing_s/step": 2.0, "timing_s/gen": 1.0}
    rates = metrics.throughput(TrainBatch.of([TURNS]), line, 1)
    assert rates == {"perf/total_num_tokens": 14, "perf/throughput": 7, "perf/gen_throughput": 6}


def test_a_reward_is_told_how_many_tokens_the_model_has_drawn():
    requests = [ScoreRequest.of(each.prompt, each.samples[0]) for each in (PLAIN, TURNS)]
    assert [request.num_tokens for request in requests] == [4, 4]
    assert [request.extra["response_length"] for request in requests] == [4, 4]


def test_whose_a_token_is():
    sample: Sample = TURNS.samples[0]
    assert sample.drawn.tolist() == [True, False, False, True, True, False, True]
    assert (len(sample), sample.num_drawn) == (7, 4)
    assert np.array_equal(sample.versions[sample.drawn], PLAIN.samples[0].versions)
