"""metrics.jsonl: what is written is read back, and a resumed run has no step twice; `test_files.py` has crashes."""

import json
import math

import numpy as np
import pytest

from jaxrl.commands.evaluate import figures
from jaxrl.record.metrics import (
    MetricsWriter,
    evaluation_metrics,
    hidden_scoring,
    length_metrics,
    read_metrics,
    spread,
)
from jaxrl.types import Group, Prompt, Sample, SampleKey


def steps(folder):
    return [row["step"] for row in read_metrics(folder)]


def write(folder, numbers, **options):
    with MetricsWriter(folder, **options) as writer:
        for step in numbers:
            writer.write(step, {"x": step * 0.5})


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


def test_nothing_yet(tmp_path):
    assert read_metrics(tmp_path) == []
    write(tmp_path, [])
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(None, [1, 2, 3, 4]), (9, [1, 2, 3, 4]), (2, [1, 2]), (0, []), (-1, [])]
)
def test_resume_removes_later_steps(tmp_path, resume_step, kept):
    write(tmp_path, [1, 2, 3, 4])
    write(tmp_path, [], resume_step=resume_step)
    assert steps(tmp_path) == kept


def test_what_is_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {})
        with pytest.raises(AssertionError, match="step 3 after step 3"):
            writer.write(3, {})
        with pytest.raises(AssertionError, match="belongs to the line itself"):
            writer.write(4, {"time": 1.0})
    assert steps(tmp_path) == [3]
    with pytest.raises(ValueError, match="'comet' must be one of console, mlflow, tensorboard, trackio, wandb"):
        MetricsWriter(tmp_path, ["comet"]).open_sinks()


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"step": 1, "x": "high"}', '{"step": 1, "x": null}'])
def test_a_damaged_line_is_left_out_with_a_note(tmp_path, line):
    write(tmp_path, [0])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    notes = []
    assert [row["step"] for row in read_metrics(tmp_path, notes.append)] == [0]
    assert len(notes) == 1
    assert "metrics.jsonl, line 2: damaged" in notes[0]


def test_length_metrics():
    lengths = [*range(1, 20), 128]
    assert length_metrics(lengths, limit=128) == {
        "response_length/mean": pytest.approx(sum(lengths) / 20),
        "response_length/max": 128,
        "response_length/min": 1,
        "response_length/clip_ratio": 1 / 20,
        "response_length/p50": 10,
        "response_length/p95": 19,
    }


def test_helpers_of_nothing():
    assert length_metrics([], limit=1) == spread("x", []) == {}


def test_spread():
    assert spread("critic/rewards", [1.0, 0.0, 0.5]) == {
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
    }


def test_scoring_beside_the_rollout():
    """What of the time with anything to score the run did not wait for."""
    measured = {"reward/busy_s": 7.0, "reward/num_scored": 2.0}
    assert hidden_scoring(measured, {"timing_s/reward": 2.0}) == {"reward/hidden_s": 5.0}
    assert measured == {"reward/num_scored": 2.0}, "one of both is enough"
    assert hidden_scoring({"reward/busy_s": 1.0}, {"timing_s/reward": 1.5}) == {"reward/hidden_s": 0.0}
    assert hidden_scoring({}, {"timing_s/reward": 1.5}) == {}


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
