"""Runs that train adapters: resumed to the same bits, evaluated, replayed, exported, and begun from a folder."""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Runs, assert_same_end, copied_after
from safetensors.numpy import load_file
from tiny import write_tiny_model

import jaxrl
from jaxrl.cli import main
from jaxrl.models.peft import CONFIG, TENSORS

STEPS = 4


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


def test_replay_and_evaluation(ran, capsys: pytest.CaptureFixture[str]):
    runs, whole, _ = ran
    last = lines_of(whole, "samples.jsonl")[-1]
    assert main(["replay", str(whole), "--sample", last["key"]]) == 0
    rows = [json.dumps({"question": f"other {i}", "answer": "1"}) for i in range(8)]  # for some the scorer crashes
    (runs.folder / "val.jsonl").write_text("\n".join(rows))
    own = [f"--config={whole / 'config.yaml'}", f"data.val_files={runs.folder / 'val.jsonl'}"]
    assert main(["eval", *own, f"--checkpoint={whole}"]) == 0
    assert "mean_reward" in capsys.readouterr().out


def test_a_run_from_python(ran):
    _, whole, _ = ran
    page = (run := jaxrl.Run(whole)).report()
    assert (repr(run), repr(page)) == (f"Run('{whole}', {STEPS} steps)", f"Page('{whole}/report.html')")
    assert html.escape("<h2>") in page._repr_html_()
    assert run.checkpoint == whole / "checkpoints" / str(STEPS)
    assert [each["key"] for each in run.samples] == [each["key"] for each in lines_of(whole, "samples.jsonl")]
    ((first, second),) = run.generate(["one?"], n=2, max_tokens=4)
    assert 0 < max(len(first), len(second)) <= 4
    assert first.token_ids.tolist() != second.token_ids.tolist()


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


@pytest.mark.slow
def test_a_run_begins_from_a_folder_of_pefts(ran, tmp_path: Path):
    runs, whole, _ = ran
    adapter = tmp_path / "adapter"
    assert main(["export", str(whole), str(adapter), "--dtype=float32"]) == 0
    (runs.folder / "val.jsonl").write_text('{"question": "other", "answer": "1"}\n' * 3)
    own = ["eval", f"--config={whole / 'config.yaml'}", f"data.val_files={runs.folder / 'val.jsonl'}"]
    assert main([*own, f"--checkpoint={whole}", f"--out={tmp_path / 'run.jsonl'}"]) == 0
    given = [f"model.lora_adapter_path={adapter}", "model.lora_rank=0", "model.exclude_modules=[]"]
    assert main([*own, *given, f"--out={tmp_path / 'folder.jsonl'}"]) == 0
    assert (tmp_path / "run.jsonl").read_bytes() == (tmp_path / "folder.jsonl").read_bytes()

    (adapter / TENSORS).write_bytes(b"")
    said = runs.here(tmp_path / "other", *given, status=2)
    assert f"{adapter / TENSORS}: truncated or not a safetensors file" in said
