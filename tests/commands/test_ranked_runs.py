"""Whole runs of a tiny model whose workers begin with the next round end as without ranking groups, to the bit."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from runs import WIDE, Runs, state_of

from jaxrl.record.metrics import read_metrics

OWN = ("trainer.one_step_off=true", "rollout.num_devices=4", "rollout.num_workers=4", "trainer.total_training_steps=8")
RANKED = ("rollout.ranking_groups.enable=true", "rollout.ranking_groups.num_groups=4", "rollout.ranking_groups.move=kv")


def assert_same_end(run_dir: Path, other: Path) -> None:
    """All that a run without ranking groups has kept is the same."""
    (arrays, values), (expected, expected_values) = state_of(run_dir), state_of(other)
    assert {name: value for name, value in values.items() if name in expected_values} == expected_values
    assert set(values) - set(expected_values) == {"history", "ranking"}
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes(), f"{name} differs"


@pytest.mark.slow
def test_ranked_rounds_end_as_others_also_when_a_run_is_killed(tmp_path: Path, tiny_model: Path):
    runs = Runs(tmp_path, tiny_model)
    plain, ranked, killed = (tmp_path / name for name in ("plain", "ranked", "killed"))
    with jax.enable_x64(True):
        runs.finish(plain, *WIDE, *OWN, devices=8)
        runs.finish(ranked, *WIDE, *OWN, *RANKED, devices=8)
        assert_same_end(ranked, plain)
        runs.kill_after(5, killed, *WIDE, *OWN, *RANKED, devices=8)
        runs.finish(killed, *WIDE, *OWN, *RANKED, devices=8)
        assert_same_end(killed, plain)
    begun = [line["rollout/ranking/groups"] for line in read_metrics(ranked)]
    assert begun[:1] == [0]
    assert begun[2:] == [4] * 6, "of 7 prompts in batches of 4, the third batch is of the second epoch"
