"""Whole runs of a tiny model whose rollout has weights and a KV cache of codes."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from runs import WIDE, Runs, assert_same_end

from jaxrl.record.metrics import read_metrics

CODES = ("rollout.quantization=int8", "rollout.kv_cache_dtype=int8")
SMALL = ("rollout.n=8", "rollout.max_num_seqs=4", "rollout.num_blocks=9", "rollout.decode_steps=2")  # preempted rows


@pytest.mark.slow
def test_a_run_says_that_nothing_corrects_it_and_measures_what_it_changes(tmp_path: Path, tiny_model: Path):
    runs, run_dir = Runs(tmp_path, tiny_model), tmp_path / "run"
    said = runs.here(run_dir, *CODES, "trainer.total_training_steps=2", "trainer.save_freq=1")
    both = "rollout.quantization=int8 and rollout.kv_cache_dtype=int8"
    assert f"{both}: the loss does not correct for what that changes; algorithm.rollout_correction" in said
    weight = "algorithm.rollout_correction.rollout_is=token"
    said = runs.here(run_dir, *CODES, weight, "trainer.total_training_steps=3")
    assert "the loss does not correct" not in said
    said = runs.here(run_dir, "trainer.total_training_steps=4")
    mismatch = [line["rollout_corr/k3_kl"] for line in read_metrics(run_dir)]
    assert min(mismatch[:3]) > 1e3 * abs(mismatch[3]), "what a run goes on with may be another type"
    assert read_metrics(run_dir)[2]["rollout_corr/rollout_is_mean"] != 1


@pytest.mark.slow
def test_workers_and_degrees_end_as_one(tmp_path: Path, tiny_model: Path):
    """In float64: codes are the same in every layout, and so are tokens, preempted or not."""
    runs = Runs(tmp_path, tiny_model)
    steps = "trainer.total_training_steps=3"
    cases = {"one": (), "cut": ("rollout.num_workers=2", "rollout.tensor_model_parallel_size=2")}
    for name, options in cases.items():
        runs.finish(tmp_path / name, *WIDE, *SMALL, *CODES, steps, *options, devices=8)
    with jax.enable_x64(True):
        assert_same_end(tmp_path / "cut", tmp_path / "one")
    assert sum(line["rollout/preemptions"] for line in read_metrics(tmp_path / "one")) > 0
