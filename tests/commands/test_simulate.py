"""`jaxrl simulate`: what it writes, that it repeats itself and resumes, where its numbers come from, and its errors."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxrl.cli import main
from jaxrl.config import Config, ConfigError, from_mapping, to_mapping
from jaxrl.config.hosts import HostsSection
from jaxrl.models.shapes import SHAPES
from jaxrl.record.metrics import read_metrics
from jaxrl.record.state import dump_state, load_state
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost
from jaxrl.scheduling.tokens.batcher import Batcher
from jaxrl.sim.configured import (
    cost_model,
    machine_sizes,
    model_sizes,
    num_devices_of,
    with_degree,
    with_simulated_hosts,
    workload_of,
)
from jaxrl.sim.cost_model import Efficiency, RooflineCost
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import SampleKey

TRAINING = """
model: {path: tiny}
data: {train_batch_size: 4, max_prompt_length: 64, max_response_length: 96, task: chain_sum, val_size: 2}
rollout: {n: 4, max_num_seqs: 8, decode_steps: 8, tensor_model_parallel_size: 2, dtype: bfloat16, stop: ["\\n"]}
reward: {num_workers: 2}
actor: {use_kl_loss: true}
trainer: {total_training_steps: 4, save_freq: 2, test_freq: 3, val_before_train: true}
"""


@pytest.fixture
def training(tmp_path: Path) -> Path:
    file = tmp_path / "training.yaml"
    file.write_text(TRAINING)
    return file


def run(training: Path, folder: Path, *overrides: str) -> int:
    places = (f"trainer.run_dir={folder}", "simulate.num_devices=16", "simulate.task.response.median=40")
    return main(["simulate", "--config", str(training), *places, *overrides])


def config(**simulate: Any) -> Config:
    values = yaml.safe_load(TRAINING)
    return from_mapping(values | {"simulate": simulate})


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


@pytest.mark.parametrize("rule", ["tail_batching", "partial_rollout", "over_provisioning"])
def test_rows_in_lockstep_change_nothing(rule: str, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = (f"rollout.{rule}.enable=true", "reward.num_workers=3", "simulate.task.scoring.median_s=0.01")
    assert run(training, tmp_path / "a", *options) == 0
    monkeypatch.setattr("jaxrl.runtime.simulated_machine.LockstepBatcher", Batcher)
    assert run(training, tmp_path / "b", *options) == 0
    a, b = tmp_path / "a-simulated", tmp_path / "b-simulated"
    assert without_clock(a) == without_clock(b)
    for name in ("samples.jsonl", "state.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    spans = [re.sub('start 1, [^"]*', "", (folder / "timeline.json").read_text()) for folder in (a, b)]
    assert spans[0] == spans[1]


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


STREAMED = ("trainer.stream.enable=true", "rollout.num_workers=2", "rollout.tensor_model_parallel_size=1")


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
    """Two hosts of eight devices: what one process with two workers decides, and tracks, metrics and words of hosts."""
    rule = ("rollout.tail_batching.enable=true", "trainer.val_before_train=false", "reward.num_workers=3")
    assert run(training, tmp_path / "a", *rule, "rollout.num_workers=2") == 0
    hosts = ("simulate.num_hosts=2", "simulate.host_spread=0.1", "hosts.launcher=ray", "hosts.max_restarts=1")
    capsys.readouterr()
    assert run(training, tmp_path / "b", *rule, *hosts) == 0
    assert "simulating 16 × H100 on 2 hosts" in capsys.readouterr().out
    one, two = tmp_path / "a-simulated", tmp_path / "b-simulated"
    seconds = ("time", "timing_s/", "perf/", "hosts/", "reward/")
    found, expected = (
        [{name: value for name, value in row.items() if not name.startswith(seconds)} for row in read_metrics(folder)]
        for folder in (two, one)
    )
    assert found == expected
    assert all(row["hosts/order_wait_s"] >= 0 for row in read_metrics(two))
    assert '"host 1 engine"' in (two / "timeline.json").read_text()
    assert "devices idle for the order" in (two / "report.html").read_text()
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


def test_how_many_hosts_and_devices():
    assert num_devices_of(with_simulated_hosts(config(num_hosts=4))) == 32, "eight of each"
    assert num_devices_of(with_simulated_hosts(config(num_hosts=4, num_devices=8))) == 8
    real = replace(config(), hosts=HostsSection(num=2, launcher="local", devices_per_host=4))
    made = with_simulated_hosts(real)
    assert (made.hosts.num, made.hosts.launcher, num_devices_of(made)) == (2, "none", 8)
    assert with_simulated_hosts(replace(real, simulate=config(num_hosts=1).simulate)).hosts.num == 1


def test_two_runs_write_the_same(training: Path, tmp_path: Path):
    for name in ("a", "b"):
        assert run(training, tmp_path / name) == 0
    a, b = (tmp_path / f"{name}-simulated" for name in ("a", "b"))
    lines = [(folder / "metrics.jsonl").read_bytes().splitlines() for folder in (a, b)]
    assert len(lines[0]) == 5
    assert [re.sub(rb'"time": [0-9.]+', b"", line) for line in lines[0]] == [
        re.sub(rb'"time": [0-9.]+', b"", line) for line in lines[1]
    ]
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert (a / "state.json").read_bytes() == (b / "state.json").read_bytes()


def test_a_run_goes_on_in_its_directory(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(training, tmp_path / "whole") == 0
    assert run(training, tmp_path / "parts", "trainer.total_training_steps=2") == 0
    capsys.readouterr()
    assert run(training, tmp_path / "parts") == 0
    assert "after step 2" in capsys.readouterr().out
    whole, parts = (tmp_path / f"{name}-simulated" for name in ("whole", "parts"))
    assert without_clock(whole) == without_clock(parts)
    assert (whole / "samples.jsonl").read_bytes() == (parts / "samples.jsonl").read_bytes()
    assert run(training, tmp_path / "parts") == 0, "nothing is left to do"
    assert without_clock(whole) == without_clock(parts)


def test_a_real_run_is_not_written_over(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "run.json").write_text(json.dumps({"devices": {"platform": "cpu"}}))
    assert run(training, tmp_path, f"simulate.run_dir={tmp_path / 'real'}") == 2
    assert "holds a run that was not simulated: choose another simulate.run_dir" in capsys.readouterr().err
    assert main(["simulate", "--config", str(training)]) == 2
    assert "simulate.run_dir is missing" in capsys.readouterr().err


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


# ---------------------------------------------------------------- the machine


def test_devices_and_blocks():
    plain = config()
    assert num_devices_of(plain) == 8
    assert num_devices_of(from_mapping(yaml.safe_load(TRAINING) | {"trainer": {"num_devices": 4}})) == 4
    cost, _ = cost_model(plain)
    sizes = machine_sizes(plain, cost, model_sizes(plain))
    assert (sizes.num_groups, sizes.num_slots, sizes.block_size) == (4, 8, 16)
    assert sizes.num_blocks == 8 * 10 + 1, "a tiny model: all rows at their longest, and the reserved block"


@pytest.mark.parametrize(("model", "tokens", "is_full"), [("tiny", 96, False), ("Qwen2.5-7B", 800_000, True)])
def test_a_worker_has_its_share_of_the_devices_and_the_same_pools(model: str, tokens: int, is_full: bool):
    """Training state is split over all devices, however many workers they are cut into."""
    values = yaml.safe_load(TRAINING)
    values["model"]["path"], values["data"]["max_response_length"] = model, tokens
    values["actor"]["ppo_max_token_len_per_gpu"] = 2 * tokens
    one, two = (from_mapping(values | {"rollout": values["rollout"] | {"num_workers": n}}) for n in (1, 2))
    cost, _ = cost_model(one)
    whole, half = (machine_sizes(each, cost, model_sizes(each)) for each in (one, two))
    assert half == replace(whole, num_devices=whole.num_devices // 2)
    assert (whole.num_blocks < 8 * (64 + tokens) // 16) == is_full, "the memory sets the pool"
    three = from_mapping(values | {"rollout": values["rollout"] | {"num_workers": 3}})
    with pytest.raises(ConfigError, match=r"rollout\.num_workers \(3\) must cut simulate\.num_devices \(8\)"):
        machine_sizes(three, cost, model_sizes(three))


def test_a_pool_that_training_state_leaves_too_little_for():
    values = yaml.safe_load(TRAINING)
    values["model"]["path"] = "Qwen2.5-32B"
    tight = from_mapping(values | {"simulate": {"hardware": "A40", "num_devices": 8}})
    cost, _ = cost_model(tight)
    with pytest.raises(ValueError, match=r"rollout\.memory_fraction \(0\.85\) of a A40"):
        machine_sizes(tight, cost, model_sizes(tight))
    values["data"]["max_response_length"] = 2_000_000
    values["actor"]["ppo_max_token_len_per_gpu"] = 4_000_000
    values["model"]["path"] = "Qwen2.5-7B"
    long = from_mapping(values | {"simulate": {"hardware": "A40", "num_devices": 8}})
    cost, _ = cost_model(long)
    with pytest.raises(ConfigError, match=r"one request of 2000064 tokens needs 125004 .* actor\.offload_optimizer"):
        machine_sizes(long, cost, model_sizes(long))


def test_model_sizes_from_a_name_or_a_folder(tiny_model: Path):
    named = model_sizes(config(model="Qwen2.5-7B"))
    assert named == SHAPES["Qwen2.5-7B"]
    assert model_sizes(config(model="Qwen2.5-14B")).num_layers == 48
    for path in (tiny_model, f"random:{tiny_model}", tiny_model / "config.json"):
        found = model_sizes(config(model=str(path)))
        assert (found.vocab_size, found.hidden_size) == (260, 32)
    with pytest.raises(ConfigError, match=r"simulate\.model \(Qwen9-1T\) must be a folder .* Qwen2\.5-32B"):
        model_sizes(config(model="Qwen9-1T"))
    gguf = from_mapping(yaml.safe_load(TRAINING) | {"model": {"path": "package:some.gguf"}})
    with pytest.raises(ConfigError, match=r"model\.path .*set simulate\.model where"):
        model_sizes(gguf)


def test_cost_models_and_their_sources(tmp_path: Path):
    cost, source = cost_model(config(hardware="h800", efficiency={"compute": 0.25}))
    assert cost == RooflineCost(model_sizes(config()), HARDWARE["H800"], Efficiency(compute=0.25))
    assert source == "roofline of H800 data sheet peaks, default efficiency factors, with compute as configured"
    assert isinstance(cost, RooflineCost)
    assert cost.number_bytes == 2
    values = yaml.safe_load(TRAINING)
    values["rollout"]["dtype"] = "float32"
    wide, _ = cost_model(from_mapping(values))
    assert isinstance(wide, RooflineCost)
    assert wide.number_bytes == 4

    identity = ProfileIdentity("tiny", "f", "cpu", 2, "0", "bfloat16")
    points = tuple(Measurement(2, batch, context, batch * 1e-3) for batch in (1, 8) for context in (1, 800))
    profile = Profile(identity, points, points, source="synthetic")
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile.to_json()))
    cost, source = cost_model(config(cost="table", profile=str(file)))
    assert source.startswith(f"synthetic table {file} (tiny on cpu) for decode and prefill; the rest: roofline of H100")
    assert cost.decode_step_s(2, 8, 100) == pytest.approx(8e-3)


def test_a_calibration_gives_the_factors(tmp_path: Path):
    file = tmp_path / "c.json"
    somewhere = {"constants": {"efficiency.mfu": {"value": 0.11}}, "held": {"efficiency.link": {"value": 0.4}}}
    file.write_text(json.dumps({"version": 1, "problems": {"somewhere": somewhere}}))
    cost, source = cost_model(config(calibration=str(file), calibration_of="somewhere"))
    assert isinstance(cost, RooflineCost)
    assert cost.efficiency == Efficiency(mfu=0.11, link=0.4)
    assert f"efficiency factors of somewhere in {file}" in source
    with pytest.raises(ConfigError, match=r"simulate\.calibration: calibration: no problem 'elsewhere'"):
        cost_model(config(calibration=str(file), calibration_of="elsewhere"))
    for text, match in (("{", "not valid JSON"), ('{"version": 2}', "calibration version 2 must be 1")):
        file.write_text(text)
        with pytest.raises(ValueError, match=match):
            cost_model(config(calibration=str(file), calibration_of="somewhere"))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hardware": "TPUv9"}, r"simulate\.hardware: hardware 'TPUv9' must be one of A40"),
        ({"efficiency": {"speed": 1}}, r"^simulate\.efficiency\.speed must be one of memory"),
        ({"efficiency": {"mfu": "high"}}, r"^simulate\.efficiency\.mfu must be float, found 'high' \(str\)$"),
        ({"efficiency": {"mfu": 2}}, r"simulate\.efficiency: Efficiency\.mfu \(2\.0\) must be a share"),
        ({"cost": "table"}, r"^simulate\.profile is missing: simulate\.cost is table, which needs a file of"),
        (
            {"cost": "table", "profile": "{file}"},
            r"training\.yaml: not valid JSON \(Expecting value, line 2",
        ),
        ({"calibration": "c.json"}, r"simulate\.calibration_of need each other"),
        ({"calibration": "missing.json", "calibration_of": "x"}, r"no such calibration file"),
    ],
)
def test_cost_models_that_cannot_be(options: dict[str, Any], match: str, training: Path):
    options = {name: str(training) if value == "{file}" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=match):
        cost_model(config(**options))


def test_a_table_without_the_degree_is_refused(tmp_path: Path):
    identity = ProfileIdentity("tiny", "f", "cpu", 2, "0", "bfloat16")
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(Profile(identity, (Measurement(1, 1, 1, 1e-3),)).to_json()))
    with pytest.raises(ConfigError, match=r"rollout\.tensor_model_parallel_size \(2\) must be a degree"):
        cost_model(config(cost="table", profile=str(file)))


# ---------------------------------------------------------------- the degree

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


def test_auto_takes_the_table_that_step_times_come_from(tmp_path: Path):
    loads = [(rows, context) for rows in (1, 8) for context in (8, 64)]
    points = tuple(Measurement(tp, *load, seconds) for tp, seconds in ((2, 0.01), (4, 0.02)) for load in loads)
    identity = ProfileIdentity("tiny", "f", "cpu", 4, "0", "bfloat16")
    prefill = tuple(Measurement(tp, 1, 64, 0.1) for tp in (2, 4))
    switches = tuple(SwitchCost(a, b, 0.1, 0.0, 0.0) for a, b in ((2, 4), (4, 2)))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(Profile(identity, points, prefill, switches).to_json()))
    values = yaml.safe_load(TRAINING)
    values["model"]["path"] = "Qwen2.5-7B"
    values["rollout"] |= {"tensor_model_parallel_size": "auto", "num_blocks": 100}
    values["simulate"] = {"cost": "table", "profile": str(file), "num_devices": 8}
    chosen, said = with_degree(from_mapping(values))
    assert chosen.rollout.tp == 2
    assert "at tp 2, " in said
    assert "tp 1" not in said


# ---------------------------------------------------------------- the workload


def test_a_modelled_workload_reads_its_options():
    task = {"name": "math", "response": {"median": 30, "sigma": 0.0}, "prompt_median": 9, "prompt_sigma": 0.0}
    workload, source = workload_of(config(task=task | {"scoring": {"median_s": 3.0}}))
    key = SampleKey(0, 5, 1)
    assert (workload.length(key), workload.prompt_length(5), workload.reward_s(key)) == (30, 9, 3.0)
    assert source == "modelled: math (median 30, sigma 0, cap 96 tokens), seed 0"
    mixed, _ = workload_of(config(tasks=[task, {"name": "code", "weight": 3.0}]))
    assert isinstance(mixed, ModelledWorkload)
    assert [task.name for task in mixed.tasks] == ["math", "code"]
    assert {mixed.kind_name(i) for i in range(50)} == {"math", "code"}


def test_a_recorded_workload_plays_a_run(training: Path, tmp_path: Path):
    """A simulated run is recorded like a real one."""
    assert run(training, tmp_path / "a") == 0
    recorded, source = workload_of(config(workload="recorded", recorded_run=str(tmp_path / "a-simulated")))
    assert source.startswith("recorded: 16 responses to 8 prompts of ")
    lines = [json.loads(line) for line in (tmp_path / "a-simulated" / "samples.jsonl").read_text().splitlines()]
    assert {recorded.length(SampleKey(0, i, 0), 1) for i in range(200)} <= {row["length"] for row in lines}
    overrides = ("simulate.workload=recorded", f"simulate.recorded_run={tmp_path / 'a-simulated'}")
    assert run(training, tmp_path / "b", *overrides) == 0
    assert json.loads((tmp_path / "b-simulated" / "run.json").read_text())["simulation"]["workload"] == source


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"workload": "recorded"}, r"simulate\.recorded_run is missing"),
        ({"workload": "recorded", "recorded_run": "nowhere"}, r"nowhere.*no such file"),
        ({"task": {"response": {"median": 0}}}, r"simulate\.task\.response\.median must be above 0, found 0\.0"),
        ({"task": {"prompt_sigma": -1}}, r"simulate\.task\.prompt_sigma must be at least 0, found -1"),
        ({"task": {"scoring": {"hang_share": 2}}}, r"simulate\.task\.scoring\.hang_share must be in \[0, 1\], found 2"),
        ({"tasks": [{}, {"correlation": 2}]}, r"simulate\.tasks\[1\]\.correlation must be in \[0, 1\], found 2"),
        ({"task": {"response": {"shortest": 97}}}, r"response\.shortest \(97\) .* data\.max_response_length \(96\)"),
        ({"workload": "recorded", "task": {"scoring": {"sigma": -1}}, "recorded_run": "nowhere"}, r"scoring\.sigma"),
        (
            {"tasks": [{}, {}]},
            r"simulate\.tasks: names \(\['simulated', 'simulated'\]\) must .* differ",
        ),
    ],
)
def test_workloads_that_cannot_be(options: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        workload_of(config(**options))


def test_scoring_that_hangs_needs_a_limit():
    values = yaml.safe_load(TRAINING) | {"simulate": {"task": {"scoring": {"hang_share": 1.0}}}}
    values["reward"]["timeout_s"] = 3.0
    workload, _ = workload_of(from_mapping(values))
    assert workload.reward_s(SampleKey(0, 0, 0)) == 3.0
    values["reward"]["timeout_s"] = 0.0
    with pytest.raises(ConfigError, match=r"simulate\.task: scoring\.hang_share \(1\.0\) needs reward\.timeout_s"):
        workload_of(from_mapping(values))


def test_the_section_is_part_of_the_configuration():
    made = config(task={"response": {"median": 30}}, tasks=[{"name": "x"}], efficiency={"mfu": 0.2})
    assert from_mapping(to_mapping(made)) == made
    assert asdict(made.simulate.tasks[0])["name"] == "x"
    for values, match in (
        ({"hardwear": "H100"}, r"unknown option simulate\.hardwear: did you mean simulate\.hardware"),
        ({"tasks": [{"median": 3}]}, r"unknown option simulate\.tasks\[0\]\.median"),
        ({"num_devices": -1}, r"simulate\.num_devices must be at least 0"),
        ({"cost": "guess"}, r"simulate\.cost must be one of roofline, table"),
    ):
        with pytest.raises(ConfigError, match=match):
            config(**values)


def test_rules_that_exclude_each_other_leave_nothing_behind(
    training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rules = ("rollout.tail_batching.enable=true", "rollout.partial_rollout.enable=true")
    assert run(training, tmp_path / "a", *rules) == 2
    said = capsys.readouterr()
    assert "tail batching and partial rollout exclude each other" in said.err
    assert said.out == ""
    assert [file.name for file in tmp_path.iterdir()] == ["training.yaml"]


def test_state_of_another_kind_is_refused():
    for text, match in (("{}", "schema 1"), ("[1]", "schema 1"), ("{", "not a simulation's state")):
        with pytest.raises(ValueError, match=match):
            load_state(text, "state.json")
    with pytest.raises(TypeError, match="neither a JSON value nor an array"):
        dump_state({"a": {1, 2}})
    state = {"left": np.arange(6).reshape(3, 2), "empty": np.zeros((0, 2), np.int64), "n": 1}
    found = load_state(dump_state(state), "state.json")
    assert found["left"].tolist() == state["left"].tolist()
    assert found["empty"].shape == (0, 2)


def test_state_is_json_whatever_its_numbers_are():
    state = {"a": [1.5, math.inf], "b": {"c": -math.inf}, "d": np.array([math.nan, 2.0]), "e": None, "f": True}
    text = dump_state(state)
    for line in text.splitlines():
        json.loads(line, parse_constant=pytest.fail)
    found = load_state(text, "state.json")
    assert (found["a"], found["b"], found["e"], found["f"]) == ([1.5, math.inf], {"c": -math.inf}, None, True)
    np.testing.assert_array_equal(found["d"], state["d"])
