"""Whole runs with a critic: killed, resumed, on other devices, together with each rule; and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from runs import STOPS, Runs, assert_same_end, copied_after, state_of

from jaxrl.record.metrics import read_metrics

GAE = (
    "algorithm={adv_estimator: gae, lam: 0.95, use_kl_in_reward: true}",
    "critic={optim: {lr: 0.01}, ppo_epochs: 2}",
    "trainer.critic_warmup=1",
    "trainer.total_training_steps=4",
)
CRITIC = "['critic']['params']"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("critic"), tiny_model)


def test_a_run_with_a_critic_killed_and_resumed_ends_with_the_same_bits(runs: Runs):
    whole, run_dir = runs.folder / "whole", runs.folder / "killed"
    with copied_after({3: run_dir}):
        runs.here(whole, *GAE)
    runs.here(run_dir, *GAE)
    assert_same_end(run_dir, whole)
    arrays, _ = state_of(whole)
    assert int(arrays["['critic']['counters']['updates']"]) == 4 * 2 * 2, "two epochs of two minibatches a step"
    assert int(arrays["['counters']['updates']"]) == 3 * 2, "the policy waits for one step"
    head = arrays[f"{CRITIC}['score']"]
    assert head.shape == (32, 1)
    assert head.any(), "it was to learn"
    assert not np.array_equal(arrays[f"{CRITIC}['layers']['q']"], arrays["['params']['layers']['q']"])
    lines = read_metrics(whole)
    both = {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr"}
    both |= {f"critic/{what}/{of}" for what in ("values", "returns", "advantages") for of in ("mean", "max", "min")}
    both |= {"critic/vf_explained_var", "timing_s/values", "timing_s/update_critic"}
    assert all(both <= set(line) for line in lines)
    assert ["actor/pg_loss" in line for line in lines] == [False, True, True, True]
    assert lines[0]["critic/values/max"] == 0 == lines[0]["critic/values/min"], "a new critic expects nothing"
    for line in lines:
        parts = sum(value for name, value in line.items() if name.startswith("timing_s/")) - line["timing_s/step"]
        assert parts <= line["timing_s/step"]
    same = [name for name in lines[-1] if name.startswith(("critic/", "actor/", "rollout_corr/"))]
    for ours, theirs in zip(read_metrics(run_dir), lines, strict=True):
        assert {name: ours[name] for name in same if name in theirs} == {n: theirs[n] for n in same if n in theirs}

    # with the same checkpoint: an estimator without a critic
    output = runs.here(run_dir, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=5", status=2)
    place = run_dir / "checkpoints" / "4"
    assert output == (
        f"jaxrl: checkpoint {place} holds a critic, and algorithm.adv_estimator=grpo has none: go on with the run's "
        "estimator, or begin a run from its parameters (trainer.init_from)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("rollout.tail_batching={enable: true, at_end: leave}", "rollout.num_workers=2", STOPS),
            id="tail batching, two workers",
        ),
        pytest.param(
            ("rollout.partial_rollout={enable: true, at_end: leave}", "trainer.one_step_off=true", STOPS),
            id="partial rollout, one step off",
        ),
        pytest.param(
            ("rollout.partial_rollout={enable: true}", "rollout.stale_tokens=mask", STOPS), id="masked stale tokens"
        ),
    ],
)
def test_with_a_rule_as_well(runs: Runs, overrides: tuple[str, ...], request: pytest.FixtureRequest):
    name = request.node.callspec.id.replace(" ", "-").replace(",", "")
    whole, run_dir, devices = runs.folder / f"{name}-whole", runs.folder / f"{name}-killed", 2 if "two" in name else 1
    runs.finish(whole, *GAE, *overrides, devices=devices)
    runs.kill_after(2, run_dir, *GAE, *overrides, devices=devices, later_s=0.15)
    runs.finish(run_dir, *GAE, *overrides, devices=devices)
    assert_same_end(run_dir, whole)


@pytest.mark.slow
def test_beside_the_rollout_and_with_dynamic_sampling(runs: Runs):
    """One-step-off in turns on one device, and at the same time on two."""
    off = (*GAE, "trainer.one_step_off=true", "algorithm.filter_groups.enable=true")
    turns, beside = runs.folder / "turns", runs.folder / "beside"
    runs.finish(turns, *off)
    runs.finish(beside, *off, "rollout.num_devices=1", devices=2)
    assert_same_end(beside, turns)


@pytest.mark.slow
def test_on_other_devices(runs: Runs):
    first, short = runs.folder / "four", "trainer.total_training_steps=2"
    runs.finish(first, *GAE, short, devices=4)
    before, _ = state_of(first)
    ends = {}
    for count in (1, 4):
        run_dir = runs.folder / f"on-{count}"
        subprocess.run(["cp", "-r", first, run_dir], check=True)
        output = runs.finish(run_dir, *GAE, "trainer.total_training_steps=3", devices=count)
        assert "after step 2 of 3" in output
        ends[count], _ = state_of(run_dir)
    moved = [name for name in before if name.startswith(CRITIC)]
    assert moved
    for name in moved:
        assert not np.array_equal(ends[1][name], before[name]), f"{name}: training went on"
        np.testing.assert_allclose(ends[1][name], ends[4][name], rtol=0, atol=0.05)
