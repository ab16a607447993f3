"""Runs whose judge shares its devices with several workers, with layouts that switch, and with the update of the step
before: in float64 they end as runs without these, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from runs import MADE_UP_PROFILE, STOPS, Runs, assert_same_end, end, judged
from tiny import write_tiny_model

from jaxrl.record.layouts import read_layouts

pytestmark = pytest.mark.slow
SWITCHES = ("rollout.layout.switch=true", "rollout.layout.min_gain=0.0", "rollout.layout.cooldown=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("judged")
    made = Runs(folder, write_tiny_model(folder / "model", num_hidden_layers=1))
    made.config["trainer"] |= {"compilation_cache_dir": str(folder / "cache"), "total_training_steps": 3}
    made.config["rollout"] |= {"dtype": "float64", "max_num_seqs": 4, "num_blocks": 24, "decode_steps": 2}
    made.config["actor"] |= {"dtype": "float64", "param_dtype": "float64"}
    made.config["reward"] = judged(write_tiny_model(folder / "judge"))
    return made


def finish(runs: Runs, name: str, *overrides: str, devices: int = 8) -> Path:
    run_dir = runs.folder / name
    if not run_dir.exists():
        runs.finish(run_dir, STOPS, *overrides, devices=devices)
    return run_dir


def lines(run_dir: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / file).read_text().splitlines()]


def assert_same_run(run_dir: Path, other: Path, *, but: str = "") -> None:
    """Samples, rewards and updates, and all else that a checkpoint holds but the part of this name; turns in gaps there
    were in the first."""
    assert sum(line["reward/judge/gap_turns"] for line in lines(run_dir)) > 0
    assert any(line["critic/rewards/mean"] > 0 for line in lines(run_dir)), "some verdicts hold a score"
    for ours, theirs in zip(lines(run_dir, "samples.jsonl"), lines(other, "samples.jsonl"), strict=True):
        assert {name: ours[name] for name in ("step", "prompt", "response", "reward")} == {
            name: theirs[name] for name in ("step", "prompt", "response", "reward")
        }
    for ours, theirs in zip(lines(run_dir), lines(other), strict=True):
        for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm", "actor/pg_loss"):
            assert ours[name] == theirs[name], name
        assert ours["reward/num_scored"] == theirs["reward/num_scored"]
    with jax.enable_x64(True):
        assert_same_end(run_dir, other, but=but)


def test_two_workers_on_two_devices(runs: Runs):
    short = "trainer.total_training_steps=2"
    one = finish(runs, "one of two devices", short, "reward.judge.when=after", devices=2)
    assert sum(line["reward/judge/gap_turns"] for line in lines(one)) == 0
    assert_same_run(finish(runs, "two", short, "rollout.num_workers=2", devices=2), one)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_several_workers(runs: Runs, num_workers: int):
    one = finish(runs, "one")
    assert_same_run(finish(runs, f"of {num_workers}", f"rollout.num_workers={num_workers}"), one)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_layouts_that_switch(runs: Runs, num_workers: int):
    profile, several = runs.folder / f"profile{num_workers}.json", f"rollout.num_workers={num_workers}"
    with runs.start(
        runs.folder / "none",
        *(*SWITCHES, several, f"rollout.layout.profile={profile}"),
        devices=8,
        program=(MADE_UP_PROFILE, f"--out={profile}"),
    ) as process:
        end(process)
    options = (*SWITCHES, f"rollout.layout.profile={profile}", "rollout.layout.allow_synthetic=true", several)
    switched = finish(runs, f"switched {num_workers}", *options)
    assert any(each["switches"] for each in read_layouts(switched))
    assert_same_run(switched, finish(runs, "one"), but="layouts")


@pytest.mark.parametrize("own", [(), ("rollout.num_devices=4",)], ids=["takes turns", "own devices"])
def test_one_step_off(runs: Runs, own: tuple[str, ...]):
    """The weights are those of a step before, so the run that it equals is one step off as well: on the same devices,
    with one worker and a judge that waits until the rollout has ended."""
    off = ("trainer.one_step_off=true", "trainer.total_training_steps=4", *own)
    after = finish(runs, f"off after {len(own)}", *off, "reward.judge.when=after")
    assert_same_run(finish(runs, f"off {len(own)}", *off, "rollout.num_workers=2"), after)
