"""`jaxrl simulate`: what it writes, that it repeats itself and resumes, and its errors."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulate_options import TRAINING, config

from jaxrl.cli import main
from jaxrl.record.metrics import read_metrics
from jaxrl.sim.configured import workload_of
from jaxrl.types import SampleKey


@pytest.fixture
def training(tmp_path: Path) -> Path:
    file = tmp_path / "training.yaml"
    file.write_text(TRAINING)
    return file


def run(training: Path, folder: Path, *overrides: str) -> int:
    places = (f"trainer.run_dir={folder}", "simulate.num_devices=16", "simulate.tasks.simulated.response.median=40")
    return main(["simulate", "--config", str(training), *places, *overrides])


def without_clock(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(folder)]


def test_a_run_directory_like_a_real_one(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(training, tmp_path / "a") == 0
    folder = tmp_path / "a-simulated"
    files = {"config.yaml", "run.json", "metrics.jsonl", "samples.jsonl", "batches.jsonl", "timeline.json"}
    files |= {"report.html", "state.json"}
    assert files <= {file.name for file in folder.iterdir()}
    said = capsys.readouterr().out
    assert "all seconds below are simulated ones" in said
    assert "wall clock per step" in said
    assert "roofline of H100 data sheet peaks, default efficiency factors" in said

    metrics = read_metrics(folder)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    for row in metrics[1:]:
        phases = sum(v for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step")
        assert phases == pytest.approx(row["timing_s/step"], rel=0.02)
        assert row["simulated"] == 1
        assert row["timing_s/ref"] > 0
        assert 0 < row["rollout/bubble_ratio"] < 1
        assert row["response_length/max"] <= 96
        assert not any(name.startswith("actor/") for name in row), "nothing learns here"
    assert "val/accuracy" in metrics[0]
    assert "val/accuracy" in metrics[3]

    record = json.loads((folder / "run.json").read_text())
    assert record["devices"] == {"platform": "simulated", "kind": "H100 (simulated)", "count": 16}
    assert record["simulation"]["cost_model"].startswith("roofline")
    assert "median 40" in record["simulation"]["workload"]
    assert record["simulation"]["machine"]["tp"] == 2
    page = (folder / "report.html").read_text()
    assert "<title>a-simulated" in page
    assert "16 × H100 (simulated)" in page
    assert "simulated prompt" in page


def test_the_timeline_shows_simulated_seconds(training: Path, tmp_path: Path):
    assert run(training, tmp_path / "a", "trainer.total_training_steps=2") == 0
    folder = tmp_path / "a-simulated"
    events = json.loads((folder / "timeline.json").read_text())
    spans = [event for event in events if event["ph"] == "X"]
    steps = [span for span in spans if span["name"] == "step"]
    assert [span["dur"] / 1e6 for span in steps] == pytest.approx(
        [row["timing_s/step"] for row in read_metrics(folder)[1:]], abs=1e-6
    )
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {"loop", "engine", "reward worker 0", "reward worker 1", "row 0.0"} <= set(names)
    plans = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == names["engine"])
    assert all(end <= start + 0.2 for (_, end), (start, _) in itertools.pairwise(plans)), "one at a time"
    assert any(event["ph"] == "C" and event["name"] == "rows" for event in events)


STREAMED = (
    "trainer.stream.enable=true",
    "rollout.num_workers=2",
    "rollout.tensor_model_parallel_size=1",
    "trainer.test_freq=2",  # at the last step of the shorter run too, which ends with an evaluation
)


def test_a_run_with_the_stream_trainer(training: Path, tmp_path: Path):
    """The same samples as without it, a lane of gradients, and a resumed run goes on the same."""
    assert run(training, tmp_path / "a", *STREAMED[1:]) == 0
    assert run(training, tmp_path / "b", *STREAMED) == 0
    assert run(training, tmp_path / "c", *STREAMED, "trainer.total_training_steps=2") == 0
    assert run(training, tmp_path / "c", *STREAMED) == 0
    a, b, c = (tmp_path / f"{name}-simulated" for name in ("a", "b", "c"))
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    rows = read_metrics(b)[1:]
    freed = [row["rollout/scale_down/freed"] for row in rows]
    assert sum(freed) >= 2
    assert all(0 <= row["actor/streamed_share"] <= 1 for row in rows)
    assert any(row["actor/streamed_share"] > 0 for row in rows)
    assert "gradients" in (b / "timeline.json").read_text()
    assert "gradients" not in (a / "timeline.json").read_text()
    assert without_clock(c) == without_clock(b)
    assert (c / "state.json").read_bytes() == (b / "state.json").read_bytes()


def test_a_run_on_several_hosts(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two hosts of eight devices: what one host with two workers decides, however slow calls are and one host is."""
    rule = ("rollout.tail_batching.enable=true", "trainer.val_before_train=false", "reward.num_workers=3")
    assert run(training, tmp_path / "a", *rule, "rollout.num_workers=2") == 0
    hosts = ("simulate.num_hosts=2", "simulate.host_spread=0.1", "simulate.host_latency_s=0.05", "hosts.max_restarts=1")
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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("simulate.num_hosts=3",), r"simulate.num_devices \(16\) must be a multiple of simulate.num_hosts \(3\)"),
        (("simulate.num_hosts=16",), r"on each of 16 hosts rollout.tensor_model_parallel_size \(2\) must divide"),
        (("simulate.num_hosts=2", "rollout.num_workers=3"), r"must be a multiple of simulate.num_hosts \(2\)"),
        (("simulate.num_hosts=2", "trainer.stream.enable=true"), r"trainer.stream.enable and simulate.num_hosts \(2\)"),
        (("simulate.num_hosts=2", "trainer.num_devices=8"), r"exclude each other: .*; set simulate.num_devices"),
        (("simulate.num_hosts=5000",), r"simulate.num_hosts .* at most 4096"),
    ],
)
def test_hosts_that_cannot_be(
    options: tuple[str, ...], match: str, training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(training, tmp_path / "a", "actor.use_kl_loss=false", *options) == 2
    assert re.search(match, capsys.readouterr().err)
    assert not (tmp_path / "a-simulated").exists()


def test_a_run_goes_on_in_its_directory(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    evaluated = "trainer.test_freq=2"  # a run's last step ends with an evaluation: the whole run has it there as well
    assert run(training, tmp_path / "whole", evaluated) == 0
    assert run(training, tmp_path / "parts", evaluated, "trainer.total_training_steps=2") == 0
    capsys.readouterr()
    assert run(training, tmp_path / "parts", evaluated) == 0
    assert "after step 2" in capsys.readouterr().out
    whole, parts = (tmp_path / f"{name}-simulated" for name in ("whole", "parts"))
    assert without_clock(whole) == without_clock(parts)
    assert (whole / "samples.jsonl").read_bytes() == (parts / "samples.jsonl").read_bytes()
    assert run(training, tmp_path / "parts", evaluated) == 0, "nothing is left to do"
    assert without_clock(whole) == without_clock(parts)


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
    large = (*AUTO, "rollout.max_num_seqs=64", "data.train_batch_size=1024", "data.max_response_length=8")
    assert run(training, tmp_path / "b", *large, "trainer.total_training_steps=1") == 0
    assert degree_of(tmp_path / "b-simulated") < 8
    capsys.readouterr()
    longer = (*large, "trainer.total_training_steps=3")
    assert run(training, tmp_path / "a", *longer) == 0
    assert "auto stays 8, as this run began" in capsys.readouterr().out
    assert degree_of(tmp_path / "a-simulated") == 8


def test_a_recorded_workload_plays_a_run(training: Path, tmp_path: Path):
    """A simulated run is recorded like a real one."""
    assert run(training, tmp_path / "a") == 0
    recorded, source = workload_of(config(recorded_run=str(tmp_path / "a-simulated")))
    assert source.startswith("recorded: 16 responses to 8 prompts of ")
    lines = [json.loads(line) for line in (tmp_path / "a-simulated" / "samples.jsonl").read_text().splitlines()]
    assert {recorded.length(SampleKey(0, i, 0), 1) for i in range(200)} <= {row["length"] for row in lines}
    assert run(training, tmp_path / "b", f"simulate.recorded_run={tmp_path / 'a-simulated'}") == 0
    assert json.loads((tmp_path / "b-simulated" / "run.json").read_text())["simulation"]["workload"] == source
