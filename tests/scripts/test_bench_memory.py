"""The benchmark of a run's memory: what it reads of a process, how it sums them up, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_memory
import pytest
import yaml
from runs import Runs


def test_what_a_process_holds_is_read_until_it_has_ended():
    found = bench_memory.look(os.getpid())
    assert found["rss_bytes"] >= found["anonymous_bytes"] > 1 << 20
    assert found["threads"] >= 1
    assert found["files"] >= 3
    process = subprocess.Popen([sys.executable, "-c", "0"])
    while bench_memory.look(process.pid):  # until it is a zombie
        pass
    process.wait()
    assert bench_memory.look(process.pid) == {}


def test_quarters_are_medians_of_all_looks():
    looks = [{"anonymous_bytes": n} for n in [1, 5, 9, 11, 12, 14, 20, 21, 30]]
    assert bench_memory.quarters(looks) == [3, 10, 13, 21]
    with pytest.raises(ValueError, match=r"3 looks are too few.*--every"):
        bench_memory.quarters(looks[:3])


def test_a_folder_with_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert bench_memory.main(["--run-dir", str(tmp_path), "--", "x"]) == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trial(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(Runs(tmp_path, tiny_model).config))
    words = [f"--json={tmp_path}", "--run-dir", str(tmp_path / "run"), "--every", "2", "--", f"--config={config}"]
    assert bench_memory.main([*words, "trainer.total_training_steps=8"]) == 0
    (file,) = tmp_path.glob("memory-*.jsonl")
    looks = json.loads(file.read_text())["results"]["looks"]
    assert [each["step"] for each in looks] == [2, 4, 6, 8]
    assert "by quarters" in capsys.readouterr().out
