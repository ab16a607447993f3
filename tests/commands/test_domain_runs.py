"""Whole runs whose data mixes domains: each scored in its own way, with parts of a reward, through deaths and kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat_server, closes, hangs, raw, says, status
from runs import STEPS, Runs, assert_same_end

REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    total = sum(solution_str.encode())
    if total % 9 == 0:
        os._exit(1)
    if total % 11 == 0:
        time.sleep(60)
    return total % 7 / 6

def other(data_source, solution_str, ground_truth, extra_info):
    flag = extra_info["flags"] + f"/{extra_info['epoch']}-{extra_info['index']}"
    if not os.path.exists(flag):  # the first sample of each prompt loses its process once
        open(flag, "w").close()
        os.kill(os.getpid(), 9)
    return {"score": sum(solution_str.encode()) % 5 / 4, "words": 2}
"""


def mixed(folder: Path, model: Path) -> Runs:
    runs = Runs(folder, model)
    file = folder / "reward.py"
    file.write_text(REWARD)
    (folder / "flags").mkdir()
    rows = [
        {"question": "x" * (1 + 3 * i), "answer": str(i), "of": "ab"[i % 2], "flags": str(folder / "flags")}
        for i in range(8)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs.config["data"]["source_key"] = "of"
    runs.config["reward"] = {
        "num_workers": 2,
        "domains": {
            "a": {"kind": "custom", "path": str(file), "weight": 0.5, "timeout_s": 0.5, "max_concurrent": 1},
            "b": {"kind": "custom", "path": str(file), "name": "other"},
        },
        "parts": {
            "short": {"kind": "length", "free_tokens": 8, "weight": 0.25},
            "tags": {"pattern": ".*e.*", "weight": 0.125},
        },
    }
    return runs


def lines_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_two_domains(tmp_path: Path, tiny_model: Path):
    runs, run_dir = mixed(tmp_path, tiny_model), tmp_path / "run"
    runs.finish(run_dir, "trainer.total_training_steps=2")
    lines = lines_of(run_dir, "metrics.jsonl")
    assert [line["reward/a/num_scored"] + line["reward/b/num_scored"] for line in lines] == [16.0] * 2
    assert [line["reward/num_scored"] for line in lines] == [16.0] * 2
    assert sum(line["reward/a/timeouts"] for line in lines) > 0, "some scorers were to hang"
    assert sum(line["reward/b/crashes"] + line["reward/b/timeouts"] for line in lines) == 0
    deaths = sum(line["reward/a/crashes"] for line in lines)
    firsts = len(list((tmp_path / "flags").iterdir()))
    # and some that were late when they were tried again, or that were first together
    assert sum(line["reward/retries"] for line in lines) >= deaths + firsts, "each death is tried once more"
    assert deaths > 0
    assert firsts > 0
    assert all(line["reward/hidden_s"] >= 0 for line in lines)
    samples = lines_of(run_dir, "samples.jsonl")
    weights = {"a": 0.5, "b": 1.0}
    for sample in samples:
        if "error" in sample:
            assert sample["reward"] == 0.0
            continue
        parts = sample["parts"]
        assert sample["reward"] == pytest.approx(
            weights[sample["source"]] * sample["own_reward"] + 0.25 * parts["short"] + 0.125 * parts["tags"]
        )
        assert parts["short"] == -max(sample["length"] - 8, 0) / (32 - 8)
    page = (run_dir / "report.html").read_text()
    titles = ("Scoring of a", "Scoring of b", "Rewards that failed", "Parts of the reward", "with the lowest rewards")
    for title in titles:
        assert title in page
    assert "custom" in (run_dir / "config.yaml").read_text()


def test_a_domain_that_no_prompt_has_is_refused(tmp_path: Path, tiny_model: Path):
    runs, run_dir = mixed(tmp_path, tiny_model), tmp_path / "run"
    output = runs.here(run_dir, "reward.domains.bb.weight=2", status=2)
    assert "reward.domains.bb: no prompt has the source 'bb': did you mean b?" in output
    assert not run_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize("one_step_off", [False, True])
def test_a_run_with_domains_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, tiny_model: Path, one_step_off: bool
):
    """What the clock has decided comes from the journal, and batches that wait keep what their rewards are made of."""
    runs, option = mixed(tmp_path, tiny_model), f"trainer.one_step_off={one_step_off}"
    # two runs, each with its own clock: only a scorer that sleeps may be late, however busy the machine is
    runs.config["reward"]["domains"]["a"]["timeout_s"] = 5.0
    whole, run_dir = tmp_path / "whole", tmp_path / "killed"
    runs.finish(whole, option)
    runs.kill_after(3, run_dir, option)
    assert f"{STEPS} of {STEPS}" in runs.finish(run_dir, option)
    assert_same_end(run_dir, whole)
    assert lines_of(run_dir, "samples.jsonl") == lines_of(whole, "samples.jsonl")
    assert len(lines_of(run_dir, "metrics.jsonl")) == STEPS


JUDGED = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    flag = extra_info["flags"] + f"/{extra_info['epoch']}-{extra_info['index']}"
    if not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getppid(), 9)  # the process that looks after it, too
        os.kill(os.getpid(), 9)
    return sum(solution_str.encode()) % 7 / 6
"""


@pytest.mark.slow
def test_a_run_whose_workers_are_killed_and_whose_endpoint_hangs(tmp_path: Path, tiny_model: Path):
    """Nothing is lost, each fault is counted, and the page shows them."""
    runs, run_dir = mixed(tmp_path, tiny_model), tmp_path / "run"
    (tmp_path / "reward.py").write_text(JUDGED)
    bad = [hangs, raw(b"<html>"), status(500), closes, says("I cannot tell."), hangs, status(400)]
    with chat_server([says("Score: 3"), *bad]) as server:
        runs.config["reward"] |= {
            "domains": {
                "a": {"kind": "custom", "path": str(tmp_path / "reward.py")},
                "b": {"kind": "judge", "weight": 0.5},
            },
            "judge": {
                **{"endpoint": server.url, "endpoint_model": "m", "max_retries": 0, "request_timeout_s": 1.0},
                "num_samples": 1,
            },
        }
        runs.finish(run_dir, "trainer.total_training_steps=2")
        asked = len(server.seen)
    lines = lines_of(run_dir, "metrics.jsonl")
    totals = {name: sum(line.get(name, 0.0) for line in lines) for line in lines for name in line}
    assert totals["reward/num_scored"] == totals["reward/a/num_scored"] + totals["reward/b/num_scored"] == 32
    assert totals["reward/b/timeouts"] == 2, "hung requests"
    assert totals["reward/b/crashes"] == 0, "what could not be reached was asked again"
    assert totals["reward/b/errors"] >= 2, "a refused request, and a verdict without a score"
    assert totals["reward/a/crashes"] == totals["reward/a/timeouts"] == 0
    killed = len(list((tmp_path / "flags").iterdir()))
    assert killed > 0
    assert totals["reward/retries"] >= killed
    assert totals["reward/part/short/mean"] < 0, "parts of judged samples, too"
    journalled = [entry for entry in lines_of(run_dir, "journal.jsonl") if entry.get("kind") == "verdict"]
    assert len(journalled) == totals["reward/b/num_scored"], "an endpoint's verdicts are from outside the run"
    assert asked > totals["reward/b/num_scored"]
    page = (run_dir / "report.html").read_text()
    for text in ("Scoring of b", "time-outs", "scored again", "errors"):
        assert text in page
