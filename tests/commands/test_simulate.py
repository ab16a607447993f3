"""`jaxrl simulate`: what it writes, that it repeats itself and resumes, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulate_options import TRAINING

from jaxrl.cli import main
from jaxrl.record.metrics import read_metrics


@pytest.fixture
def training(tmp_path: Path) -> Path:
    file = tmp_path / "training.yaml"
    file.write_text(TRAINING)
    return file


def run(training: Path, folder: Path, *overrides: str) -> int:
    places = (f"trainer.run_dir={folder}", "simulate.num_devices=16", "simulate.tasks.simulated.response.median=40")
    return main(["simulate", "--config", str(training), *places, *overrides])


def test_a_run_directory_like_a_real_one(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(training, tmp_path / "a") == 0
    folder = tmp_path / "a-simulated"
    files = {"config.yaml", "run.json", "metrics.jsonl", "samples.jsonl", "batches.jsonl", "timeline.json"}
    files |= {"report.html", "state.json"}
    assert files <= {file.name for file in folder.iterdir()}
    said = capsys.readouterr().out
    assert "all seconds below are simulated ones" in said

    metrics = read_metrics(folder)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    for row in metrics[1:]:
        phases = sum(v for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step")
        assert phases == pytest.approx(row["timing_s/step"], rel=0.02)
        assert row["simulated"] == 1
        assert row["response_length/max"] <= 96
        assert not any(name.startswith("actor/") for name in row), "nothing learns here"
    assert "val/accuracy" in metrics[0]
    assert "val/accuracy" in metrics[3]

    record = json.loads((folder / "run.json").read_text())
    assert record["devices"] == {"platform": "simulated", "kind": "H100 (simulated)", "count": 16}
    assert "16 × H100 (simulated)" in (folder / "report.html").read_text()
    steps = [each for each in json.loads((folder / "timeline.json").read_text()) if each["name"] == "step"]
    seconds = [row["timing_s/step"] for row in metrics[1:]]
    assert [step["dur"] / 1e6 for step in steps] == pytest.approx(seconds, abs=1e-6), "simulated seconds"


def test_a_run_on_several_hosts(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two hosts of eight devices: what one host with two workers decides, however slow calls are and one host is."""
    rule = ("rollout.tail_batching.enable=true", "trainer.val_before_train=false", "reward.num_workers=3")
    assert run(training, tmp_path / "a", *rule, "rollout.num_workers=2") == 0
    hosts = ("simulate.num_hosts=2", "simulate.host_spread=0.1", "hosts.max_restarts=1")
    capsys.readouterr()
    assert run(training, tmp_path / "b", *rule, *hosts) == 0
    assert "simulating 16 × H100 on 2 hosts" in capsys.readouterr().out
    one, two = tmp_path / "a-simulated", tmp_path / "b-simulated"
    seconds = ("time", "timing_s/", "perf/", "reward/")
    found, expected = (
        [{name: value for name, value in row.items() if not name.startswith(seconds)} for row in read_metrics(folder)]
        for folder in (two, one)
    )
    assert found == expected
    slower = [[row["timing_s/gen"] for row in read_metrics(folder)] for folder in (two, one)]
    assert all(with_calls > without for with_calls, without in zip(*slower, strict=True))
    assert yaml.safe_load((two / "config.yaml").read_text())["simulate"]["num_hosts"] == 2


def test_jax_is_not_imported(training: Path, tmp_path: Path):
    code = (
        "import sys; from jaxrl.cli import main\n"
        f"assert main(['simulate', '--config', {str(training)!r}, 'simulate.run_dir={tmp_path / 'a'}', "
        "'trainer.total_training_steps=1', 'simulate.num_devices=2']) == 0\n"
        "print(sorted({'jax', 'jaxlib', 'grain', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


AUTO = ("rollout.tensor_model_parallel_size=auto", "model.path=Qwen2.5-7B", "rollout.num_blocks=100")


def degree_of(folder: Path) -> Any:
    return yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["tensor_model_parallel_size"]


def test_auto_is_the_fastest_degree_of_the_modelled_devices(
    training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """And a resumed run keeps it, though its batch would now be faster in another."""
    small = (*AUTO, "rollout.max_num_seqs=64", "data.train_batch_size=1", "trainer.total_training_steps=2")
    assert run(training, tmp_path / "a", *small) == 0
    said = capsys.readouterr().out
    assert "rollout.tensor_model_parallel_size: auto is 8 (a batch of 4 longest samples decodes in " in said
    assert degree_of(tmp_path / "a-simulated") == 8
    capsys.readouterr()
    longer = (*AUTO, "rollout.max_num_seqs=64", "data.train_batch_size=1024", "trainer.total_training_steps=3")
    assert run(training, tmp_path / "a", *longer) == 0
    assert "auto stays 8, as this run began" in capsys.readouterr().out
    assert degree_of(tmp_path / "a-simulated") == 8
