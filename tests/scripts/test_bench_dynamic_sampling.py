"""The bench of dynamic sampling, at a size that takes seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_dynamic_sampling  # noqa: E402

SMALL = ("data.max_response_length=128", "simulate.task.response.median=40", "rollout.n=4")


def test_a_rollout_with_filtered_groups_is_compared_with_a_plain_one(capsys: pytest.CaptureFixture[str]):
    cases = ["plain, no filter", "plain", "tail batching"]
    shape = ["--seeds", "2", "--steps", "4", "--prompts", "8"]
    assert bench_dynamic_sampling.main([*shape, *SMALL, "--cases", *cases]) == 0
    command, plain, filtered, *tail = capsys.readouterr().out.splitlines()
    assert command.startswith("command: ")
    assert "(1.00 of plain), filtered 0%, launched 8.0: 1.00 of the necessary" in plain
    assert float(filtered.split("launched ")[1].split(":")[0]) > 8
    assert [line.split("  ")[0] for line in tail][-1] == "tail batching, all rounds"
