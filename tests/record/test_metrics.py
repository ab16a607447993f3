"""metrics.jsonl: what is written is read back, and a resumed run has no step twice; `test_files.py` has crashes."""

import json
import math

import numpy as np
import pytest
from fake_rollout import make_sample

from jaxrl.commands.evaluate import figures
from jaxrl.record import metrics
from jaxrl.record.metrics import MetricsWriter, evaluation_metrics, read_metrics
from jaxrl.scheduling.rounds.batches import off_policy_share
from jaxrl.types import Group, Prompt, Sample, SampleKey, TrainBatch


def test_round_trip(tmp_path):
    with MetricsWriter(tmp_path / "new" / "run", ["console"]) as writer:
        assert writer.last_step == -1
        writer.write(0, {"val/acc": np.float32(0.5), "count": 3, "flag": True})
        writer.write(2, {"actor/grad_norm": math.nan, "high": math.inf, "low": -math.inf, "array": np.array(1.5)})
        assert writer.last_step == 2
    first, second = read_metrics(tmp_path / "new" / "run")
    assert first == {"step": 0, "time": first["time"], "val/acc": 0.5, "count": 3, "flag": 1.0}
    assert math.isnan(second["actor/grad_norm"])
    assert (second["high"], second["low"], second["array"]) == (math.inf, -math.inf, 1.5)
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text  # strict JSON, for readers in other languages
    assert json.loads(text.splitlines()[0])["step"] == 0


def test_a_partly_right_response_has_a_reward_and_is_not_right():
    groups = []
    for index, rewards in enumerate([(1.0, 0.5), (0.25, None), (1.5, 0.0)]):
        ids, zeros = np.zeros(2, np.int32), np.zeros(2, np.float32)
        samples = [
            Sample(SampleKey(0, index, i), ids, zeros, zeros, ids, "stop", reward=reward)
            for i, reward in enumerate(rewards)
        ]
        groups.append(Group(Prompt(0, index, (1,), "?", "src"), samples))
    found, by_eval = evaluation_metrics(groups, 8), figures(groups, [[-1, -1]] * 3)
    assert found["val/reward"] == by_eval["mean_reward"] == pytest.approx(3.25 / 6)
    assert found["val/accuracy"] == by_eval["pass@1"] == by_eval["avg@2"] == pytest.approx(2 / 6)
    assert found["val/best@2"] == pytest.approx((1.0 + 0.25 + 1.5) / 3)


def group(*versions: list[int]) -> Group:
    samples = [make_sample(SampleKey(0, 0, i), own, "stop") for i, own in enumerate(versions)]
    for sample in samples:
        sample.reward = float(sample.key.sample_index)
    return Group(Prompt(0, 0, (1, 2), "", ""), samples)


PLAIN, TURNS = group([3, 3, 4, 5], [5, 5]), group([3, -1, -1, 3, 4, -1, 5], [5, -1, 5])


def test_what_an_environment_has_answered_is_in_no_figure_about_the_model():
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
