"""Whole runs in bfloat16 with `actor.numerics=invariant`: in every step the trainer finds the log-probabilities that
the rollout has recorded, to the bit, whatever mechanism decides what is computed beside a token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from runs import MADE_UP_PROFILE, PLAIN_REWARD, STOPS, Runs, assert_same_end, copied_after, end

from jaxrl.record.layouts import read_layouts
from jaxrl.record.metrics import read_metrics

OWN = ("actor.numerics=invariant", "actor.dtype=bfloat16", "rollout.dtype=bfloat16", "trainer.save_freq=2")
CASES: dict[str, tuple[int, int, tuple[str, ...]]] = {  # devices, steps and options
    "one device": (1, 20, ()),
    "two devices": (2, 4, ()),
    "tail batching": (1, 20, ("rollout.tail_batching.enable=true", STOPS)),
    "adapters": (1, 6, ("model.lora_rank=4",)),
    "adapters on int8": (1, 4, ("model.lora_rank=4", "model.base_quantization=int8")),
    "adapters and tp": (2, 4, ("model.lora_rank=4", "rollout.tensor_model_parallel_size=2", "actor.numerics_tp=2")),
    "two workers": (2, 4, ("rollout.num_workers=2", STOPS)),
    "drafts": (1, 8, ("rollout.speculation.enable=true", "rollout.temperature=0.06", "actor.optim.lr=0.002")),
}


@pytest.fixture
def runs(tmp_path: Path, tiny_model: Path) -> Runs:
    made = Runs(tmp_path, tiny_model)
    (tmp_path / "reward.py").write_text(PLAIN_REWARD)
    return made


def assert_no_mismatch(run_dir: Path, steps: int) -> list[dict[str, float]]:
    lines = read_metrics(run_dir)
    assert len(lines) == steps
    for line in lines:
        found = {name: value for name, value in line.items() if name.startswith("rollout_corr/")}
        assert found
        assert set(found.values()) == {0.0}, found
    assert sum(line["actor/grad_norm"] > 0 for line in lines) >= steps // 2, "most updates are to move the weights"
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_trainer_finds_what_the_rollout_has_recorded(runs: Runs, name: str, tmp_path: Path):
    devices, steps, more = CASES[name]
    options = (*OWN, *more, f"trainer.total_training_steps={steps}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with copied_after({3: cut}):
        runs.here(whole, *options, devices=devices)
    lines = assert_no_mismatch(whole, steps)
    if name == "drafts":
        assert sum(line["rollout/spec/accept_rate"] for line in lines) > 0
    runs.here(cut, *options, devices=devices)
    assert_same_end(cut, whole)


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times(runs: Runs, tmp_path: Path):
    """At moments of chance, in the steps and in the saves between them."""
    kills, chance = 20, random.Random(0)
    runs.config["trainer"] |= {"total_training_steps": kills + 2, "compilation_cache_dir": str(tmp_path / "cache")}
    options = (*OWN, "trainer.save_freq=1", STOPS)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    runs.finish(whole, *options)
    for i in range(kills):
        runs.kill_after(i + 1, killed, *options, later_s=chance.uniform(0, 0.5))
    runs.finish(killed, *options)
    assert_same_end(killed, whole)
    assert_no_mismatch(killed, kills + 2)


@pytest.mark.slow
def test_switches_between_layouts(runs: Runs, tmp_path: Path):
    """By a profile with which a smaller batch is faster the larger tp is."""
    profile, steps = tmp_path / "profile.json", 20
    layout = f"{{switch: true, profile: {profile}, allow_synthetic: true, min_gain: 0.0, cooldown: 2}}"
    options = (*OWN, "actor.numerics_tp=4", f"rollout.layout={layout}", f"trainer.total_training_steps={steps}", STOPS)
    end(runs.start(tmp_path / "unnamed", *options, devices=4, program=(MADE_UP_PROFILE, f"--out={profile}")))
    runs.here(tmp_path / "run", *options, devices=4)
    assert_no_mismatch(tmp_path / "run", steps)
    switches = [switch for each in read_layouts(tmp_path / "run") for switch in each["switches"]]
    assert len(switches) >= steps, "one a step"
