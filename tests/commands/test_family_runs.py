"""A run of a tiny model of each family: trained, resumed to the same bits, exported, read again and served."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import jax
import numpy as np
import pytest
from drawn_models import runnable
from runs import PLAIN_REWARD, Runs, assert_same_end, copied_after
from served import serving
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.loading import load_model

STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_command(family: str, tmp_path: Path):
    runs, whole, killed = Runs(tmp_path, write_tiny_model(tmp_path / "model")), tmp_path / "whole", tmp_path / "killed"
    (tmp_path / "model" / "config.json").write_text(json.dumps(content := runnable(family)))
    (tmp_path / "reward.py").write_text(PLAIN_REWARD)
    runs.config["rollout"] |= {"num_blocks": 200}  # of several stacks, where layers have windows
    runs.config["trainer"] |= {"total_training_steps": STEPS, "save_freq": 1}
    with copied_after({1: killed}):
        runs.here(whole, devices=2)
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    for line in lines:
        assert abs(line["rollout_corr/kl"]) < 1e-5, "what was drawn from is what is trained"
        assert line["actor/grad_norm"] > 0
        assert ("moe/load_max" in line) == (FAMILIES[family].experts is not None)
        assert abs(line.get("moe/dropped", 0.0)) < 1e-6
        assert line.get("moe/load_max", 1.0) >= 1
    runs.here(killed, devices=2)
    assert_same_end(killed, whole)

    assert main(["export", str(whole), str(tmp_path / "exported"), "--dtype=float32"]) == 0
    config, params = load_model(tmp_path / "exported")
    assert config.base == ModelConfig.from_hf(content)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    (tmp_path / "val.jsonl").write_text('{"question": "other", "answer": "1"}\n')
    own = ["eval", f"--config={whole / 'config.yaml'}", f"data.val_files={tmp_path / 'val.jsonl'}"]
    begun = {"run": [f"--checkpoint={whole}"], "exported": [f"model.path={tmp_path / 'exported'}"]}
    for name, more in begun.items():
        more += ["model.random_init=false"] if name == "exported" else []
        assert main([*own, *more, f"--out={tmp_path / name}.jsonl"]) == 0
    assert (tmp_path / "run.jsonl").read_bytes() == (tmp_path / "exported.jsonl").read_bytes()

    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "exported" / file).exists()
    asked = {"model": "exported", "prompt": "1 + 1 =", "max_tokens": 5, "temperature": 0}
    with serving(str(tmp_path / "exported"), ("serve.max_model_len=64", "rollout.warmup=false")) as url:
        answer = httpx2.post(f"{url}/completions", json=asked, timeout=120).json()
    assert answer["usage"]["completion_tokens"] > 0, answer
