"""`jaxrl profile` on eight virtual devices, and runs that choose a layout by a profile.

`test_equal_runs.py` has runs whose layout switches.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import PLAIN_REWARD, Runs, end
from tiny import write_tiny_model

from jaxrl.record.metrics import read_metrics
from jaxrl.scheduling.layouts.latency_profile import Profile

pytestmark = pytest.mark.slow
DEGREES = (1, 2, 4, 8)
SIZES = ("--max-context=32", "--token-budget=256", "--repeats=1")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """With 9 query and 3 key/value heads, so that weights of layouts that adapt are padded."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "num_hidden_layers": 1}
    made = Runs(tmp_path, write_tiny_model(tmp_path / "model", **sizes))
    (tmp_path / "reward.py").write_text(PLAIN_REWARD)
    made.config["data"] |= {"max_prompt_length": 48, "max_response_length": 48}
    layout = {"switch": True, "profile": str(tmp_path / "profile.json"), "min_gain": 0.0, "cooldown": 2}
    made.config["rollout"] |= {"max_num_seqs": 2, "decode_steps": 2, "dtype": "float64", "layout": layout}
    made.config["rollout"].pop("num_blocks")
    return made


def run(runs: Runs, *words: str, status: int = 0) -> str:
    program = words[:2] if words[0].endswith(".py") else ("-m", "jaxrl", words[0])
    rest = words[2:] if words[0].endswith(".py") else words[1:]
    return end(runs.start(runs.folder / "unnamed", *rest, devices=8, program=program), status)


def test_what_is_measured_is_not_measured_again(runs: Runs):
    profile = runs.folder / "profile.json"
    output = run(runs, "profile", *SIZES)
    table = Profile.from_json(json.loads(profile.read_text()))
    assert table.source == "measured"
    assert table.degrees == DEGREES
    pairs = {(a, b) for a in DEGREES for b in DEGREES if a != b}
    assert {(cost.from_tp, cost.to_tp) for cost in table.switches} == pairs
    assert f"{len(table.decode)} decode points" in output
    sizes_of = {rows.tp: rows.sizes for rows in table.row_sizes}
    assert all(point.batch in sizes_of[point.tp] for point in table.decode), "no batch that would be padded"
    profile.write_text(json.dumps(table.to_json() | {"decode": table.to_json()["decode"][1:]}))
    run(runs, "profile", *SIZES)
    again = Profile.from_json(json.loads(profile.read_text()))
    assert set(table.decode[1:]) <= set(again.decode)
    assert {entry.point for entry in again.decode} == {entry.point for entry in table.decode}
    assert (again.prefill, again.switches) == (table.prefill, table.switches)
    foreign = again.to_json()
    foreign["identity"]["jax_version"] = "0.0.1"
    profile.write_text(json.dumps(foreign))
    assert "is of something else: jax_version is '0.0.1' there" in run(runs, "profile", *SIZES, status=2)


def test_steps_that_verify_drafts_are_measured_and_plans_ask_them(runs: Runs):
    profile = runs.folder / "profile.json"
    options = (
        *("rollout.speculation.enable=true", "rollout.tensor_model_parallel_size=4"),
        *("rollout.layout.degrees=[4, 8]", "rollout.layout.switch=false"),
    )
    assert "4 that verify" in run(runs, "profile", *SIZES, f"--out={profile}", *options)
    table = Profile.from_json(json.loads(profile.read_text()))
    # 16 drafted tokens a step on a CPU, shared by the rows of a dp group: two at tp 4, four at tp 8
    assert (table.verify_widths(4), table.verify_widths(8)) == ({2: 8}, {4: 4})
    steps = (
        "data.train_batch_size=7",
        "actor.ppo_mini_batch_size=0",
        "trainer.total_training_steps=2",
    )  # seven problems: two epochs
    run(runs, "train", f"trainer.run_dir={runs.folder / 'run'}", *steps, *options)
    assert "rollout/spec/plans_share" in read_metrics(runs.folder / "run")[1]
    other = ("rollout.speculation.verify_tokens=8", f"trainer.run_dir={runs.folder / 'other'}")
    said = run(runs, "train", *steps, *options, *other, status=2)
    assert "run `jaxrl profile` with the same rollout.speculation options" in said
