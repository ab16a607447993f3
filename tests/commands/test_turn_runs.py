"""Whole runs over turns: with each rule, killed and resumed, and what a tool that is slow or dies does to others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import assert_same_end, copied_after
from talking_runs import talking

from jaxrl.record.journal import read_journal

RULES = {
    "plain": (),
    "tail batching": ("rollout.tail_batching.enable=true",),
    "tail batching that resumes": ("rollout.tail_batching={enable: true, relaunch: resume}",),
    "partial rollout": ("rollout.partial_rollout.enable=true",),
    "over-provisioning": ("rollout.over_provisioning.enable=true",),
    "dynamic sampling": ("algorithm.filter_groups.enable=true",),
    "one step off": ("trainer.one_step_off=true",),
    "stream trainer": ("trainer.stream.enable=true", "actor.ppo_mini_batch_size=0", "rollout.num_workers=2"),
    "workers": ("rollout.num_workers=2",),
    "speculation": ("rollout.speculation.enable=true", "rollout.speculation.max_batch=8"),
}
DEVICES = {"stream trainer": 2, "workers": 2}  # 1 by default
RACING = {"tail batching", "tail batching that resumes", "partial rollout", "over-provisioning", "dynamic sampling"}


def lines_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def noted(folder: Path) -> list[float]:
    """The names of the calls that were made; not those of few words, which two samples may say."""
    file = folder / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    return [float(line.split()[1]) for line in lines if int(line.split()[0]) > 16]


def answered_in(run_dir: Path) -> set[float]:
    """The names of the calls whose answers the journal has."""
    turns = [entry for entry in read_journal(run_dir / "journal.jsonl")[1:] if entry["kind"] == "turn"]
    return {entry["metrics"]["name"] for entry in turns if entry["metrics"]}


SOME = ("tail batching", *(pytest.param(name, marks=pytest.mark.slow) for name in RULES if name != "tail batching"))


@pytest.mark.parametrize("rule", SOME)
def test_what_was_answered_is_not_asked_again(tmp_path: Path, rule: str):
    """A run that is killed before its first checkpoint does all of its steps again, on the answers of its journal."""
    runs, whole, killed = talking(tmp_path), tmp_path / "whole", tmp_path / "killed"
    options, devices = (*RULES[rule], "trainer.total_training_steps=2"), DEVICES.get(rule, 1)
    with copied_after({2: killed}):
        runs.here(whole, *options, devices=devices)
    answered, num_notes = answered_in(killed), len(noted(tmp_path))
    (killed / "metrics.jsonl").unlink()
    runs.here(killed, *options, devices=devices)
    again = noted(tmp_path)[num_notes:]
    assert answered
    assert not answered & {*again}, "a tool was called again"
    assert not again or rule in RACING, "only what was waited for when a round ended is asked again"
    assert_same_end(killed, whole)
    assert lines_of(killed, "samples.jsonl") == lines_of(whole, "samples.jsonl")
