"""Whole runs whose rewards all fail: they end with the cause and status 1, and go on when the scorer is mended."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import Runs
from talking_runs import talking

from jaxrl.cli import main
from jaxrl.record.metrics import read_metrics

BROKEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    raise ConnectionError("the judge does not answer")
"""
DOWN = """
class Talk:
    def __init__(self, index):
        self.index = index

    def step(self, action):
        raise ConnectionError("the simulator is down")
"""
MENDED = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(solution_str.encode()) % 7 / 6, "kind": "mended"}
"""


def test_a_run_whose_rewards_all_fail_ends_and_goes_on_when_they_are_mended(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    runs, run_dir = Runs(tmp_path, tiny_model), tmp_path / "run"
    (tmp_path / "reward.py").write_text(BROKEN)
    options = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_bad_steps=2")
    output = runs.here(run_dir, *options, status=1)
    error = f"ConnectionError: the judge does not answer ({tmp_path}/reward.py, line 3, in compute_score)"
    why = f"the last one: {error}"
    assert "reward 0 for epoch 0, prompt " in caplog.text
    assert f"the last 16 rewards have all failed, the worth of one batch; {why}" in caplog.text, "said at once"
    assert output.splitlines()[-1] == (
        f"jaxrl: step 2: the last 32 rewards have all failed, the worth of 2 batches; {why} "
        "(trainer.max_bad_steps=2); saved after step 1"
    )
    assert "Traceback" not in output
    assert "<b>16 of 16 rewards failed</b>" in (run_dir / "report.html").read_text(), "a run that failed has its page"
    log = (run_dir / "rewards.log").read_text()
    assert log.count("Traceback (most recent call last)") in (1, 2, 3, 4), "once, but for workers at the same moment"
    assert f'File "{tmp_path}/reward.py", line 3, in compute_score' in log
    (tmp_path / "reward.py").write_text(MENDED)
    output = runs.here(run_dir, *options)
    assert "after step 1" in output
    assert re.search(rf"^rewards +16 of 48 failed, last: {re.escape(error)}$", output, re.MULTILINE)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample.get("error") for sample in samples if sample["step"] == 1] == [error] * 4
    assert all(sample["info"] == {"kind": "mended"} for sample in samples if sample["step"] > 1)
    assert [(line["step"], line["reward/errors"]) for line in read_metrics(run_dir)] == [(1, 16), (2, 0), (3, 0)]


def test_a_run_whose_environment_fails_ends_as_if_its_rewards_did(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    runs, run_dir = talking(tmp_path), tmp_path / "run"
    (tmp_path / "talk.py").write_text(DOWN)
    output = runs.here(run_dir, "trainer.total_training_steps=9", "trainer.max_bad_steps=2", status=1)
    error = f"ConnectionError: the simulator is down ({tmp_path}/talk.py, line 7, in step)"
    assert "reward 0 for epoch 0, prompt " in caplog.text, "said at once"
    assert f": {error}\n" in caplog.text
    ended = re.escape(f"; the last one: {error} (trainer.max_bad_steps=2); saved after step 2")
    assert re.fullmatch(rf"jaxrl: step 3: the last 32 rewards have all failed, .*{ended}", output.splitlines()[-1])
    lines = read_metrics(run_dir)
    cut = [16 * line["stop/max_trajectory_tokens"] for line in lines]
    assert [line["reward/errors"] for line in lines] == [16 - number for number in cut]
    assert any(cut), "what was cut before it asked the environment shows nothing of it, and does not begin the count"
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {(sample["reward"], sample.get("error")) for sample in samples} <= {(0.0, error), (0.0, None)}
    assert " rewards failed</b>" in (run_dir / "report.html").read_text()


def test_an_evaluation_whose_rewards_all_fail_is_no_result(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "reward.py").write_text(BROKEN)
    (tmp_path / "val.jsonl").write_text(json.dumps({"question": "1 + 1", "answer": "2"}) + "\n")
    options = [f"model.path=random:{tiny_model}", f"data.val_files=[{tmp_path}/val.jsonl]", "reward.kind=custom"]
    options += [f"reward.path={tmp_path}/reward.py", "data.max_prompt_length=64", "data.max_response_length=8"]
    options += ["trainer.compilation_cache_dir=", "trainer.num_devices=1"]
    assert main(["eval", *options, "--out", str(tmp_path / "out.jsonl")]) == 1
    captured = capsys.readouterr()
    error = f"ConnectionError: the judge does not answer ({tmp_path}/reward.py, line 3, in compute_score)"
    why = f"the last one: {error}"
    assert captured.err.splitlines()[-1] == f"jaxrl: 1 of 1 rewards failed; {why}"
    assert "pass@" not in captured.out
    assert json.loads((tmp_path / "out.jsonl").read_text())["info"] == {"error": error}
