"""The bench of simulated steps, at a size that takes seconds; and the promise that memory stays flat."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_simulate  # noqa: E402

from jaxrl.config import files as config_files  # noqa: E402

SMALL = (
    "data.train_batch_size=8",
    "data.max_response_length=512",
    "rollout.max_num_seqs=16",
    "rollout.block_size=64",
    "simulate.num_devices=16",
    "simulate.task.response.median=100",
)


def test_it_prints_seconds_by_kind_of_round_and_memory(capsys: pytest.CaptureFixture[str]):
    assert bench_simulate.main(["--steps", "8", "--every", "4", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("command: ")
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["4", "8"]
    assert sum("rounds: " in line and "s of a core" in line for line in lines) == 2, "short and long rounds"
    assert lines[-1].startswith("memory: ")
    assert lines[-1].endswith("after 8")


def test_layouts_that_adapt_have_the_same_bar(capsys: pytest.CaptureFixture[str]):
    assert bench_simulate.main(["--steps", "2", "--adaptive", "--bar", "1e-6", *SMALL]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "layout: all 2 steps: " in line]
    assert [line.split()[0] for line in lines] == ["configured", "adaptive"]
    assert all(line.endswith("s of a core on average (bar 1e-06: missed)") for line in lines)


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_steps(tmp_path: Path):
    config = config_files.load(str(bench_simulate.CONFIG), ("trainer.total_training_steps=1000", *SMALL))
    steps = bench_simulate.run(config, tmp_path, every=100)
    assert len(steps) == 1000
    assert steps[-1].rss_mib < 1.05 * steps[99].rss_mib
