"""`jaxrl replay`: what a run has recorded is drawn again, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import Runs
from talking_runs import talking

from jaxrl.cli import main
from jaxrl.record.samples import FILE_NAME
from jaxrl.types import ENVIRONMENT

pytestmark = pytest.mark.slow  # test_lora_runs.py draws a sample again, quicker


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / FILE_NAME).read_text().splitlines()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """A run of three steps whose trajectories go over turns, and over updates."""
    folder = tmp_path_factory.mktemp("talking")
    runs, run_dir = talking(folder), folder / "run"
    runs.config["trainer"] |= {"total_training_steps": 3, "save_freq": 1, "max_ckpt_to_keep": 3}
    runs.here(run_dir, "rollout.partial_rollout.enable=true")
    (folder / "talk.py").unlink()
    return run_dir, runs


def versions(sample: dict[str, Any]) -> set[int]:
    return {version for version, _ in sample["ids"]["response"]} - {ENVIRONMENT}


def test_each_token_is_drawn_again(ran, capsys: pytest.CaptureFixture[str]):
    """Whatever versions of the weights have drawn a trajectory, without its environment."""
    run_dir, _ = ran
    there = samples_of(run_dir)
    longest = max(there, key=lambda sample: len(sample["turns"]))
    mixed = max(there, key=lambda sample: len(versions(sample)))
    assert len(longest["turns"]) > 1
    assert len(versions(mixed)) > 1
    for sample in {each["key"]: each for each in (longest, mixed)}.values():
        assert main(["replay", str(run_dir), "--sample", sample["key"]]) == 0, sample["key"]
        said = capsys.readouterr().out
        assert said.count("-- the environment") == len(sample["turns"]) - 1
        drawn = sum(len(ids) for version, ids in sample["ids"]["response"] if version != ENVIRONMENT)
        assert f"each of the {drawn} tokens of the model is as it was recorded" in said


def test_another_token_is_found(ran, capsys: pytest.CaptureFixture[str]):
    """The record is spoilt at one place; and with another temperature the response is another."""
    run_dir, _ = ran
    file, sample = run_dir / FILE_NAME, samples_of(run_dir)[0]
    whole = file.read_text()
    version, ids = sample["ids"]["response"][0]
    spoilt = [*ids[:-1], (ids[-1] + 1) % 256]
    lines = whole.splitlines()
    sample["ids"]["response"][0] = [version, spoilt]
    file.write_text("\n".join([json.dumps(sample), *lines[1:]]) + "\n")
    try:
        assert main(["replay", str(run_dir), "--sample", sample["key"]]) == 1
        assert f"token {len(ids) - 1} was {spoilt[-1]}, and now {ids[-1]} is drawn" in capsys.readouterr().err
    finally:
        file.write_text(whole)
    assert main(["replay", str(run_dir), "--sample", sample["key"], "rollout.temperature=0.3"]) == 1


def test_refusals(ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir, _ = ran

    def refused(*arguments: str) -> str:
        assert main(["replay", *arguments]) == 2
        return capsys.readouterr().err

    gone = next(sample for sample in samples_of(run_dir) if 1 in versions(sample))
    (run_dir / "checkpoints" / "1").rename(tmp_path / "1")
    said = refused(str(run_dir), "--sample", gone["key"])
    assert "the weights after step 1 have drawn tokens of this sample: no checkpoint 1" in said
