"""Runs whose rewards come from a judge on the rollout's devices: they end with the same bits however they got there."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import STOPS, Runs, assert_same_end, judged
from tiny import write_tiny_model

from jaxrl.record.metrics import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("judged")
    made = Runs(folder, write_tiny_model(folder / "model"))
    judge = write_tiny_model(folder / "judge", num_hidden_layers=3)
    made.config["trainer"] |= {"compilation_cache_dir": str(folder / "cache"), "total_training_steps": 4}
    made.config["rollout"]["warmup"] = True
    made.config["reward"] = judged(judge)
    made.config["reward"]["judge"] |= {"dtype": "float32", "num_samples": 2}
    del made.config["reward"]["judge"]["busy_share"]
    return made


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    runs.finish(runs.folder / "whole", STOPS)
    return runs.folder / "whole"


def test_a_judge_scores_in_gaps_and_compiles_nothing_late(whole):
    lines = read_metrics(whole)
    assert sum(line["reward/judge/gap_turns"] for line in lines) > 0
    assert all(line["reward/judge/turns"] > line["reward/judge/gap_turns"] for line in lines)
    assert not any(line["reward/judge/recompiles"] or line["rollout/recompiles"] for line in lines)
    assert all(line["reward/num_scored"] == 16 for line in lines)
    assert any(line["critic/rewards/mean"] > 0 for line in lines), "some verdicts hold a score"


def test_rewards_do_not_depend_on_when_the_judge_runs(runs, whole):
    after = runs.folder / "after"
    runs.finish(after, STOPS, "reward.judge.when=after", "reward.judge.resident_layers=3")
    assert sum(line["reward/judge/gap_turns"] for line in read_metrics(after)) == 0
    assert_same_end(after, whole)


def test_a_run_killed_while_it_is_judged_ends_with_the_same_bits(runs, whole):
    run_dir = runs.folder / "killed"
    runs.kill_after(3, run_dir, STOPS, later_s=0.05)
    runs.finish(run_dir, STOPS)
    assert_same_end(run_dir, whole)
    assert [line["critic/rewards/mean"] for line in read_metrics(run_dir)] == [
        line["critic/rewards/mean"] for line in read_metrics(whole)
    ]
