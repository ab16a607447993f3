"""Whole runs of a tiny model with history speculation: what is drawn and learnt is what a run without it draws and
learns, to the bit, in float64, under every rule; and what is drafted is counted.

A model with random weights repeats itself little, so the runs here draw with a low temperature: most responses of a
prompt then resemble each other, and drafts are accepted as well as rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from runs import Runs, state_of

WIDE = ("rollout.dtype=float64", "actor.dtype=float64", "actor.param_dtype=float64")
SETTING = (
    *(*WIDE, "rollout.temperature=0.3", "rollout.decode_steps=2", "rollout.stop=[" + ", ".join("abcdefg") + "]"),
    *("actor.optim.lr=0.001", "trainer.total_training_steps=6"),
)
SPECULATION = ("rollout.speculation.enable=true",)
SMALL = ("rollout.max_num_seqs=4", "rollout.num_blocks=13")  # rows are preempted


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_history(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "history"}


def assert_same_training(run_dir: Path, other: Path) -> None:
    """Parameters, optimizer and the loop's state are the same to the bit, and so are the metrics of what was drawn."""
    with jax.enable_x64(True):
        (arrays, values), (expected, expected_values) = state_of(run_dir), state_of(other)
    assert without_history(values) == without_history(expected_values)
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes(), f"{name} differs"
    assert {name for name in arrays if not name.startswith("host.history")} == expected.keys()
    for ours, theirs in zip(metrics_of(run_dir), metrics_of(other), strict=True):
        for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm", "training/epoch"):
            assert ours[name] == theirs[name], name


def compare(runs: Runs, *overrides: str, devices: int = 1, more: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """Runs with speculation and without, both to the end; returns the metrics of the first. `more`: of that alone."""
    plain, spec = runs.folder / "plain", runs.folder / "spec"
    runs.finish(plain, *SETTING, *overrides, devices=devices)
    runs.finish(spec, *SETTING, *overrides, *SPECULATION, *more, devices=devices)
    assert_same_training(spec, plain)
    measured, before = metrics_of(spec), metrics_of(plain)
    assert not [name for line in before for name in line if "/spec/" in name], "nothing of it where it is off"
    drafted = [line["rollout/spec/drafted_share"] for line in measured]
    assert drafted[0] == 0, "the first step has no history"
    assert 0 < max(drafted) < 1
    assert sum(line["rollout/recompiles"] for line in measured) == sum(line["rollout/recompiles"] for line in before)
    return measured


def test_a_run_is_the_same_with_drafts_and_takes_fewer_steps(tmp_path: Path, tiny_model: Path):
    measured = compare(Runs(tmp_path, tiny_model))
    before = metrics_of(tmp_path / "plain")
    later = [line["training/epoch"] > 0 for line in measured]
    assert any(later)
    steps, steps_before = (sum(line["rollout/decode_steps"] for line in lines) for lines in (measured, before))
    assert steps < steps_before
    for line in measured:
        assert line["rollout/spec/evicted_prompts"] == 0
        assert line["rollout/spec/index_bytes"] > 0
    events = json.loads((tmp_path / "spec" / "timeline.json").read_text().rstrip().rstrip(",") + "]")
    tracks = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert "history" in tracks
