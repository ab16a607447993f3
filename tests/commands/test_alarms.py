"""Whole runs whose rewards all fail: they end with the cause and status 1, and go on when the scorer is mended."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import Runs

from jaxrl.cli import main
from jaxrl.record.metrics import read_metrics

BROKEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    raise ConnectionError("the judge does not answer")
"""
MENDED = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(solution_str.encode()) % 7 / 6, "kind": "mended"}
"""


def error_of(folder: Path) -> str:
    return f"ConnectionError: the judge does not answer ({folder}/reward.py, line 3, in compute_score)"


def test_a_run_whose_rewards_all_fail_ends_and_goes_on_when_they_are_mended(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    runs, run_dir, error = Runs(tmp_path, tiny_model), tmp_path / "run", error_of(tmp_path)
    (tmp_path / "reward.py").write_text(BROKEN)
    options = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_bad_steps=2")
    output = runs.here(run_dir, *options, status=1)
    assert f"the last 16 rewards have all failed, the worth of one batch; the last one: {error}" in caplog.text
    assert output.splitlines()[-1] == (
        f"jaxrl: step 2: the last 32 rewards have all failed, the worth of 2 batches; the last one: {error} "
        "(trainer.max_bad_steps=2); saved after step 1"
    )
    assert "Traceback" not in output
    assert "<b>16 of 16 rewards failed</b>" in (run_dir / "report.html").read_text(), "a run that failed has its page"
    assert (run_dir / "rewards.log").read_text().count("Traceback") <= 4, "once, but for workers at the same moment"
    (tmp_path / "reward.py").write_text(MENDED)
    output = runs.here(run_dir, *options)
    assert re.search(rf"^rewards +16 of 48 failed, last: {re.escape(error)}$", output, re.MULTILINE)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample.get("error") for sample in samples if sample["step"] == 1] == [error] * 4
    assert all(sample["info"] == {"kind": "mended"} for sample in samples if sample["step"] > 1)
    assert [(line["step"], line["reward/errors"]) for line in read_metrics(run_dir)] == [(1, 16), (2, 0), (3, 0)]


def test_an_evaluation_whose_rewards_all_fail_is_no_result(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    runs = Runs(tmp_path, tiny_model)
    (tmp_path / "reward.py").write_text(BROKEN)
    (tmp_path / "val.jsonl").write_text(json.dumps({"question": "1 + 1", "answer": "2"}) + "\n")
    options = [f"data.val_files=[{tmp_path}/val.jsonl]", "data.train_files=[]", "trainer.num_devices=1"]
    assert main(["eval", f"--config={runs._write()}", *options, "--out", str(tmp_path / "out.jsonl")]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == f"jaxrl: 1 of 1 rewards failed; the last one: {error_of(tmp_path)}"
    assert "pass@" not in captured.out
