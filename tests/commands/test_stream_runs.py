"""Whole runs of a tiny model with the stream trainer: the updates are those without it, also after SIGKILL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Runs, kill, state_of, wait_for_steps

WIDE = ("rollout.dtype=float64", "actor.dtype=float64", "actor.param_dtype=float64")
SIZES = (
    *("rollout.num_blocks=260", "rollout.max_num_seqs=16", "rollout.decode_steps=2", "data.max_response_length=96"),
    *("actor.ppo_mini_batch_size=0", "actor.use_kl_loss=true", "trainer.total_training_steps=4"),
)
STREAM = ("trainer.stream.enable=true",)


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_same(run_dir: Path, expected: Path) -> None:
    """All that was drawn is the same; gradients and weights up to the order of sums in float64."""
    for ours, theirs in zip(metrics_of(run_dir), metrics_of(expected), strict=True):
        for name in ("critic/rewards/mean", "response_length/mean", "perf/total_num_tokens"):
            assert ours[name] == theirs[name], name
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), name
    (arrays, _), (others, _) = state_of(run_dir), state_of(expected)
    names = [name for name in others if "'params'" in name]
    assert names
    for name in names:
        gap = np.linalg.norm(arrays[name] - others[name])
        assert gap <= 1e-9 * np.linalg.norm(others[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "workers"), [(2, 2), (4, 2), (4, 4)])
def test_a_run_with_streaming_trains_the_same(tmp_path: Path, tiny_model: Path, devices: int, workers: int):
    runs = Runs(tmp_path, tiny_model)
    options = (*WIDE, *SIZES, f"rollout.num_workers={workers}")
    plain, streamed, cut = (tmp_path / name for name in ("plain", "streamed", "cut"))
    runs.finish(plain, *options, devices=devices)
    runs.finish(streamed, *options, *STREAM, devices=devices)
    check_same(streamed, plain)
    lines = metrics_of(streamed)
    assert any(line["rollout/scale_down/freed"] for line in lines)
    assert any(line["actor/streamed_share"] > 0 for line in lines)
    assert all(0.2 <= line.get("rollout/scale_down/done_share", 0.2) <= 0.5 for line in lines)
    with runs.start(cut, *options, *STREAM, devices=devices) as process:
        wait_for_steps(process, cut, 3)
        kill(process)
    runs.finish(cut, *options, *STREAM, devices=devices)
    check_same(cut, plain)
