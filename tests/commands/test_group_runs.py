"""Runs in which the trajectories of a prompt are compared, by a class that never says the same twice."""

from __future__ import annotations

import json
from pathlib import Path

from runs import Runs, assert_same_end, copied_after
from talking_runs import talking

from jaxrl.cli import main
from jaxrl.record.journal import read_journal

CONTEST = """
import random

class Contest:
    def __init__(self, notes):
        self.notes = notes

    def compute_group_rewards(self, trajectories):
        with open(self.notes + "-compared", "a") as file:
            file.write(f"{len(trajectories)}\\\\n")
        return [len(each.turn_rewards) + random.random() for each in trajectories]
""".replace("\\\\n", "\\n")


def contesting(folder: Path) -> Runs:
    runs = talking(folder)
    with open(folder / "talk.py", "a") as file:
        file.write(CONTEST)
    runs.config["environment"]["group"] = "Contest"
    return runs


def num_compared(folder: Path) -> int:
    return len((folder / "notes-compared").read_text().splitlines())


def test_a_run_that_is_killed_compares_nothing_again(tmp_path: Path):
    runs, whole, killed = contesting(tmp_path), tmp_path / "whole", tmp_path / "killed"
    steps = "trainer.total_training_steps=1"
    with copied_after({1: killed}):
        runs.here(whole, steps)
    count, prompts = num_compared(tmp_path), runs.config["data"]["train_batch_size"]
    assert count == prompts
    kinds = [entry["kind"] for entry in read_journal(killed / "journal.jsonl")[1:]]
    assert kinds.count("group") == count
    for line in map(json.loads, (whole / "metrics.jsonl").read_text().splitlines()):
        assert line["environment/group_reward/mean"] > 1
        assert line["environment/group_errors"] == 0
    for line in map(json.loads, (whole / "samples.jsonl").read_text().splitlines()):
        own = sum(turn["reward"] for turn in line["turns"])
        assert line["reward"] == own + line["info"]["group_reward"]
        assert line["info"]["group_reward"] > len(line["turns"])
    (killed / "metrics.jsonl").unlink()
    runs.here(killed, steps)
    assert num_compared(tmp_path) == count
    assert_same_end(killed, whole)


def test_an_evaluation_compares_too(tmp_path: Path):
    runs = contesting(tmp_path)
    config = runs._write()
    (tmp_path / "val.jsonl").write_text('{"question": "other", "answer": "1"}\n{"question": "one", "answer": "1"}\n')
    own = [f"data.val_files={tmp_path / 'val.jsonl'}", "rollout.val_kwargs.n=2"]
    assert main(["eval", f"--config={config}", *own, f"--out={tmp_path / 'out.jsonl'}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert num_compared(tmp_path) == len(lines) / 2 == 2
    assert all(line["info"]["group_reward"] > 1 for line in lines)
