"""The bench of draft indexes, at a size that takes seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_draft_index  # noqa: E402


def test_made_up_responses_resemble_each_other_as_much_as_asked():
    rng = np.random.default_rng(0)
    for same in (0.0, 0.8):
        history = bench_draft_index.made_up(rng, 2, 20_000, same)
        first, second = history.rollouts[0].responses()
        assert np.mean(first == second) == pytest.approx(same, abs=0.1), "fresh ones agree by chance, too"


def test_it_prints_rates_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench_draft_index.main(["--quick", "--json", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for begin in (
        "build: ",
        "find: ",
        "host beside a thread: ",
        "host beside a process: ",
        "3 prompts: ",
        "230,000 ",
        "accepted ",
    ):
        assert sum(line.startswith(begin) for line in lines) == 1, begin
    (record,) = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert record["bench"] == "draft-index"
    sizes = record["results"]["sizes"]
    assert sizes["tokens"] == 3 * 2 * 300
    assert sizes["held_bytes"] == 4 * sizes["tokens"] + sizes["index"]


def test_drafts_are_accepted_as_often_whatever_the_rewards_signs():
    shares = {rewards: bench_draft_index.accepted(rewards, 4, 0) for rewards in bench_draft_index.REWARDS}
    assert shares["-1"] == shares["1"]
    assert shares["-1/+1"] == shares["0/1"]
    assert shares["-1/+1 and overlong"] > 0.95 * shares["0/1"]


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]):
    assert bench_draft_index.main(["--same", "2"]) == 2
    assert "--same (2.0) must be in [0, 1]" in capsys.readouterr().err
