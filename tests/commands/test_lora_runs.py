"""Runs that train adapters: resumed to the same bits, evaluated, replayed, exported, and begun from another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Runs, assert_same_end, copied_after
from safetensors.numpy import load_file
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.commands import export
from jaxrl.models.loading import config_of
from jaxrl.models.peft import CONFIG, TENSORS

STEPS, KL = 4, "actor.use_kl_loss=true"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Path, Path]:
    """A run of four steps with the base as the reference; and what a kill after three of them leaves."""
    folder = tmp_path_factory.mktemp("lora")
    runs, whole, killed = Runs(folder, write_tiny_model(folder / "model")), folder / "whole", folder / "killed"
    runs.config["model"] |= {"lora_rank": 4, "lora_dropout": 0.2, "exclude_modules": ["o_proj"]}
    runs.config["actor"] |= {"use_kl_loss": True}
    runs.config["trainer"] |= {"total_training_steps": STEPS, "save_freq": 1}
    with copied_after({3: killed}):
        runs.here(whole)
    return runs, whole, killed


def lines_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_a_run_that_is_killed_goes_on(ran):
    runs, whole, killed = ran
    other = shutil.copytree(runs.folder / "model", runs.folder / "model2")
    said = runs.here(killed, f"model.path={other}", status=2)
    assert f"began with model.path={runs.folder}/model (model.random_init, " in said
    assert f"which is the base of its adapters, and now that would be model.path={other} (" in said
    runs.here(killed)
    assert_same_end(killed, whole)


def test_the_rollout_draws_from_what_the_trainer_has(ran):
    """After each sync: the log-probabilities of rollout and trainer are the same, and move away from the base's."""
    _, whole, _ = ran
    lines = lines_of(whole, "metrics.jsonl")
    assert len(lines) == STEPS
    assert all(abs(line["rollout_corr/kl"]) < 1e-6 for line in lines)
    assert lines[-1]["actor/kl_loss"] > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "devices"),
    [
        (("rollout.tail_batching.enable=true",), 1),
        (("trainer.one_step_off=true",), 1),
        (("rollout.num_workers=2",), 2),
        (("trainer.stream.enable=true", "actor.ppo_mini_batch_size=0", "rollout.num_workers=2", KL), 2),
        (("algorithm.adv_estimator=gae",), 1),
        (("model.base_quantization=int8", KL), 2),
    ],
)
def test_rules(tmp_path: Path, rule: tuple[str, ...], devices: int):
    """With each: what a run draws from is what its trainer has, and it is resumed to the same bits."""
    runs, whole, killed = Runs(tmp_path, write_tiny_model(tmp_path / "model")), tmp_path / "whole", tmp_path / "killed"
    runs.config["model"] |= {"lora_rank": 4}
    runs.config["trainer"] |= {"total_training_steps": STEPS, "save_freq": 1}
    with copied_after({2: killed}):
        runs.here(whole, *rule, devices=devices)
    is_off = rule == ("trainer.one_step_off=true",)
    for line in lines_of(whole, "metrics.jsonl"):
        assert is_off or abs(line["rollout_corr/kl"]) < 1e-6
        assert line["actor/grad_norm"] > 0
    runs.here(killed, *rule, devices=devices)
    assert_same_end(killed, whole)


def test_replay_and_evaluation(ran, capsys: pytest.CaptureFixture[str]):
    runs, whole, _ = ran
    last = lines_of(whole, "samples.jsonl")[-1]
    assert main(["replay", str(whole), "--sample", last["key"]]) == 0
    (runs.folder / "val.jsonl").write_text('{"question": "other", "answer": "1"}\n')
    own = [f"--config={whole / 'config.yaml'}", f"data.val_files={runs.folder / 'val.jsonl'}"]
    assert main(["eval", *own, f"--checkpoint={whole}"]) == 0
    assert "mean_reward" in capsys.readouterr().out


def test_exports(ran, tmp_path: Path):
    """A folder of peft's, and a whole model: that is the base with what the folder adds."""
    _, whole, _ = ran
    for folder, more in (("adapter", []), ("merged", ["--merge"])):
        assert main(["export", str(whole), str(tmp_path / folder), "--dtype=float32", *more]) == 0
    content = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert "o_proj" not in content["target_modules"]
    adapters, merged = load_file(tmp_path / "adapter" / TENSORS), load_file(tmp_path / "merged" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    scale = content["lora_alpha"] / content["r"]
    assert np.abs(b).max() > 0
    base = merged[f"{name}.weight"] - scale * b @ a
    assert base.std() == pytest.approx(0.02, rel=0.1), "what random weights are drawn with"
    assert merged[f"{name}.weight"].std() > 0.03
    assert not any("lora" in each for each in merged)


def test_an_export_says_that_peft_cannot_load_a_gguf_base(ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once for adapters, and not for a merged model."""
    _, whole, _ = ran
    model = tmp_path / "model.gguf"
    model.symlink_to(json.loads((whole / "run.json").read_text())["config"]["model"]["path"], target_is_directory=True)
    monkeypatch.setattr(export, "resolve_path", lambda path, **_: str(model))
    monkeypatch.setattr(export, "_tokenizer", lambda path, say: None)
    monkeypatch.setattr(export, "config_of", lambda path: config_of(model.resolve()))
    said: list[str] = []
    export.export(str(whole), str(tmp_path / "adapter"), "float32", said.append)
    (note,) = [line for line in said if "peft" in line]
    assert note.startswith(f"peft cannot load the adapters' base, the GGUF file {model}, by itself: load it with")


def test_a_run_begins_from_a_folder_of_pefts(ran, tmp_path: Path):
    """It draws as the run does that wrote the folder; what goes on reads its checkpoint, and none of the tensors."""
    runs, whole, _ = ran
    adapter = tmp_path / "adapter"
    assert main(["export", str(whole), str(adapter), "--dtype=float32"]) == 0
    (runs.folder / "val.jsonl").write_text('{"question": "other", "answer": "1"}\n' * 3)
    own = ["eval", f"--config={whole / 'config.yaml'}", f"data.val_files={runs.folder / 'val.jsonl'}"]
    assert main([*own, f"--checkpoint={whole}", f"--out={tmp_path / 'run.jsonl'}"]) == 0
    given = [f"model.lora_adapter_path={adapter}", "model.lora_rank=0", "model.exclude_modules=[]"]
    assert main([*own, *given, f"--out={tmp_path / 'folder.jsonl'}"]) == 0
    assert (tmp_path / "run.jsonl").read_bytes() == (tmp_path / "folder.jsonl").read_bytes()

    first, killed = tmp_path / "first", tmp_path / "killed"
    more = [*given, "trainer.total_training_steps=3"]
    with copied_after({2: killed}):
        runs.here(first, *more)
    assert lines_of(first, "metrics.jsonl")[0]["actor/kl_loss"] > 1e-6, "the base is the reference"
    (adapter / TENSORS).write_bytes(b"")
    runs.here(killed, *more)
    assert_same_end(killed, first)
    said = runs.here(tmp_path / "other", *more, status=2)
    assert f"{adapter / TENSORS}: truncated or not a safetensors file" in said
    for option, found, theirs in (
        ("model.lora_rank=2", "2", "4"),
        ("model.lora_alpha=3", "3.0", "32.0"),
        ("model.exclude_modules=[q_proj]", "k, v, o, gate, up, down", "q, k, v, gate, up, down"),
    ):
        said = runs.here(tmp_path / "other", *more, option, status=2)
        name = option.partition("=")[0].replace("exclude", "target")
        assert f"{name} ({found}) contradicts the adapters of model.lora_adapter_path ({adapter}: {theirs})" in said
    said = runs.here(tmp_path / "other", *more, f"trainer.init_from={whole}", status=2)
    assert f"model.lora_adapter_path ({adapter}) and trainer.init_from ({whole}) exclude each other" in said


def test_refusals(ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs, whole, _ = ran
    said = runs.here(tmp_path / "full", f"trainer.init_from={whole}", "model.lora_rank=0", status=2)
    assert "trainer.init_from" in said
    said = runs.here(tmp_path / "rank", f"trainer.init_from={whole}", "model.lora_rank=2", status=2)
    assert "lora_a" in said
    for more, words in (
        (("model.lora_rank=0",), "model.base_quantization=nf4 needs adapters (model.lora_rank)"),
        (("actor.remat=none",), "model.base_quantization=nf4 excludes actor.remat=none"),
        ((), "nf4 has blocks of 64 inputs, and self_attn.q_proj has 32: use int8"),
    ):
        assert words in runs.here(tmp_path / "bits", "model.base_quantization=nf4", *more, status=2)
    said = runs.here(tmp_path / "none", "model.target_modules=[qkv]", status=2)
    assert "model.target_modules names 'qkv', and the layers of this model have q_proj" in said
    assert main(["export", str(runs.folder / "model"), str(tmp_path / "out"), "--merge"]) == 2
    assert "has no adapters to merge" in capsys.readouterr().err


def test_a_run_begins_from_anothers_adapters(ran, tmp_path: Path):
    runs, whole, _ = ran
    runs.here(tmp_path / "next", f"trainer.init_from={whole}", "trainer.total_training_steps=1")
    (line,) = lines_of(tmp_path / "next", "metrics.jsonl")
    assert line["actor/kl_loss"] > 1e-6, "the base is the reference, whatever it began from"
