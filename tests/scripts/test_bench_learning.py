"""The benchmark of how fast settings learn: its table, what it refuses, and (slow) a trial."""

from __future__ import annotations

import json
from pathlib import Path

import bench_learning
import pytest
import yaml
from runs import Runs

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_has_means_over_seeds_and_medians_over_all_steps():
    def run(last: float, step_s: list[float], peak: int) -> dict[str, object]:
        seconds = {"step_s": step_s, "update_s": [s / 2 for s in step_s]}
        return {"held_out": {"0": 0.25, "5": last}, "peak_bytes": peak, **seconds}

    runs = [run(0.5, [2.0, 4.0], 3 * 10**9), run(0.7, [6.0, 20.0, 22.0], 10**9)]
    shorter = [{**run(0.0, [1.0], 10**9), "held_out": {"0": 0.125}}]
    assert bench_learning.table({"full": runs, "rank 8": shorter})[2:] == [
        "| full | 0.250 ± 0.000 | 0.600 ± 0.141 | 6.0 | 3.0 | 3.00 GB |",
        "| rank 8 | 0.125 |  | 1.0 | 0.5 | 1.00 GB |",
    ]


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        (["--case", "a", "--case", "a", "actor.optim.lr=1.0"], "--case a: two cases have that name"),
        (["--case", "a", "model.lora_rank=-1"], "model.lora_rank"),
    ],
)
def test_nonsense_is_refused_before_a_run(
    cases: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = str(ROOT / "configs" / "quickstart.yaml")
    assert bench_learning.main(["--config", config, "--out", str(tmp_path / "runs"), *cases]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_trial(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    """Two steps of a tiny model; called again, nothing runs again."""
    made = Runs(tmp_path, tiny_model)
    (tmp_path / "held_out.jsonl").write_text('{"question": "y", "answer": "1"}\n')
    made.config["data"] |= {"val_files": [str(tmp_path / "held_out.jsonl")]}
    made.config["trainer"] |= {"total_training_steps": 2, "test_freq": 2, "val_before_train": True}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(made.config))
    words = [f"--config={config}", "--out", str(tmp_path / "runs"), "--seeds=1", f"--json={tmp_path}"]
    words += ["--with", "data.system_prompt=x", "--case", "full", "--case", "rank 2", "model.lora_rank=2"]
    assert bench_learning.main(words) == 0
    assert "| rank 2 |" in capsys.readouterr().out
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("metrics.jsonl")}
    assert bench_learning.main(words) == 0
    assert {file: file.stat().st_mtime_ns for file in written} == written
    (file,) = tmp_path.glob("learning-*.jsonl")
    first, again = (json.loads(line)["results"] for line in file.read_text().splitlines())
    assert first == again
    assert [list(run[0]["held_out"]) for run in first.values()] == [["0", "2"]] * 2
    assert all(run[0]["peak_bytes"] > 1 << 26 and len(run[0]["step_s"]) == 1 for run in first.values())
