"""The benchmark of checkpoints, tried with `--quick`."""

from __future__ import annotations

import json
from pathlib import Path

import bench_checkpoint
import pytest


@pytest.mark.slow  # two processes start jax
def test_a_record_of_one_process_and_of_two(tmp_path: Path):
    words = ["--quick", "--processes", "1", "2", f"--json={tmp_path}", f"--text={__file__}"]
    assert bench_checkpoint.main(words) == 0
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert all(value > 0 for case in found["weights"].values() for value in case.values())
    responses = found["responses"]
    assert 0 < responses["file_bytes"] < responses["array_bytes"]
    assert all(value > 0 for value in responses.values())


def test_samples_that_do_not_fill_a_group_are_refused(capsys: pytest.CaptureFixture[str]):
    assert bench_checkpoint.main(["--responses", "17"]) == 2
    assert "--responses (17) must be a multiple of 16" in capsys.readouterr().err
