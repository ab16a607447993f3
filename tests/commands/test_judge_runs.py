"""Runs whose rewards come from a judge on the rollout's devices: they end with the same bits however they got there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from runs import Runs, assert_same_end, kill, wait_for_steps
from tiny import write_tiny_model

pytestmark = pytest.mark.slow
STOPS = "rollout.stop=[" + ", ".join("abcdefghijklm") + "]"  # lengths differ, so that there are gaps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("judged")
    made = Runs(folder, write_tiny_model(folder / "model"))
    judge = write_tiny_model(folder / "judge", num_hidden_layers=3)
    made.config["trainer"] |= {"compilation_cache_dir": str(folder / "cache"), "total_training_steps": 4}
    made.config["rollout"]["warmup"] = True
    made.config["reward"] = {
        "kind": "judge",
        "judge": {
            "model": f"random:{judge}",
            "dtype": "float32",
            "prompt": "{question} {response} Score:",
            "score_pattern": "([0-9])",
            "max_score": 9,
            "max_prompt_tokens": 200,
            "max_tokens": 40,
            "num_samples": 2,
            "temperature": 1.0,
            "max_num_seqs": 4,
            "resident_layers": 1,
        },
    }
    return made


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    runs.finish(runs.folder / "whole", STOPS)
    return runs.folder / "whole"


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_judge_scores_in_gaps_and_compiles_nothing_late(whole):
    lines = metrics(whole)
    assert sum(line["reward/judge/gap_turns"] for line in lines) > 0
    assert all(line["reward/judge/turns"] > line["reward/judge/gap_turns"] for line in lines)
    assert not any(line["reward/judge/recompiles"] or line["rollout/recompiles"] for line in lines)
    assert all(line["reward/num_scored"] == 16 for line in lines)
    assert any(line["critic/rewards/mean"] > 0 for line in lines), "some verdicts hold a score"


def test_rewards_do_not_depend_on_when_the_judge_runs(runs, whole):
    after = runs.folder / "after"
    runs.finish(after, STOPS, "reward.judge.when=after", "reward.judge.resident_layers=3")
    assert sum(line["reward/judge/gap_turns"] for line in metrics(after)) == 0
    assert_same_end(after, whole)


def test_a_run_killed_while_it_is_judged_ends_with_the_same_bits(runs, whole):
    run_dir = runs.folder / "killed"
    with runs.start(run_dir, STOPS) as process:
        wait_for_steps(process, run_dir, 3)
        time.sleep(0.05)
        kill(process)
    runs.finish(run_dir, STOPS)
    assert_same_end(run_dir, whole)
    assert [line["critic/rewards/mean"] for line in metrics(run_dir)] == [
        line["critic/rewards/mean"] for line in metrics(whole)
    ]
