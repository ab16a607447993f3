"""The benchmark of rewards beside the rollout: a trial, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benches import ROOT, run_quick

sys.path.insert(0, str(ROOT / "scripts"))

import bench_rewards
from bench.reward_rounds import MachineClock, Timed

from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import SampleKey


def test_the_bound_is_what_no_schedule_can_beat():
    keys = [SampleKey(0, 0, i) for i in range(2)]
    verdicts = {key: Verdict(0.0, key, 1.0, "ok", {}, seconds) for key, seconds in zip(keys, (3.0, 0.5), strict=True)}
    timed = Timed(10.0, step_s=45.0, ended_s={keys[0]: 12.0, keys[1]: 40.0}, verdicts=verdicts)
    assert (timed.rollout_s, timed.bound_s, timed.scoring_s) == (40.0, 45.0, 35.0), "at ten times the machine's pace"


def test_a_clock_of_the_machine_may_be_fast():
    clock = MachineClock(1000.0)
    began = clock.now_ns
    clock.reach(began + 10_000_000_000)
    assert clock.now_ns >= began + 10_000_000_000
    clock.advance(5.0)
    assert clock.now_ns >= began + 15_000_000_000


@pytest.mark.slow
def test_a_trial(tmp_path: Path):
    record, _ = run_quick(tmp_path, "bench_rewards")
    overlap, timeouts = record["results"]["cases"]
    for name in ("beside", "after"):
        assert overlap[name]["step_s"] >= overlap[name]["rollout_s"]
    for name in ("fixed", "first_epoch", "later"):
        assert timeouts[name]["mean_reward"] > 0, "programs ran"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "0"], "bench_rewards: --workers (0) must be at least 1"),
        (["--scale", "0"], "bench_rewards: --scale (0) must be in (0, 1], --endless (0.05) in [0, 1)"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert bench_rewards.main(arguments) == 2
    assert capsys.readouterr().err == sentence + "\n"
