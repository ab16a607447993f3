"""60 SIGKILLs at random moments under five sets of rules, saves among them: each run ends as an unbroken one.

A quick one is in tests/commands/test_train.py.
"""

import json
import random
import time
from pathlib import Path

import pytest
from runs import Runs, assert_same_end, end, kill, num_steps, wait_for_steps

STOPS = "rollout.stop=[" + ", ".join("abcdefghijklm") + "]"  # lengths that differ
RULES = {
    "plain": (),
    "tail-batching": (
        STOPS,
        "rollout.tail_batching={enable: true, at_end: leave}",
        "algorithm.filter_groups.enable=true",
    ),
    "partial-rollout": (STOPS, "rollout.partial_rollout={enable: true, at_end: leave}"),
    "one-step-off": (STOPS, "trainer.one_step_off=true"),
    # which end is told first decides what is buffered
    "two-workers": (STOPS, "rollout.partial_rollout={enable: true, at_end: leave}", "rollout.num_workers=2"),
}
DEVICES = {"two-workers": 2}
KILLS = {"plain": 14, "tail-batching": 12, "partial-rollout": 12, "one-step-off": 12, "two-workers": 10}
STEPS = {"plain": 100}  # its steps are short; 40 of the others are enough for their kills
PATIENCE_S = 300.0


def wait_for_a_save(process, run_dir: Path) -> None:
    """Until a draft of a checkpoint is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not list((run_dir / "checkpoints").glob("*.draft*")):
        assert process.poll() is None, end(process)
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_killed_runs_end_with_the_same_bits(rule: str, tmp_path: Path, tiny_model: Path):
    runs = Runs(tmp_path, tiny_model)
    whole, run_dir, overrides = (
        tmp_path / "whole",
        tmp_path / "killed",
        (*RULES[rule], f"trainer.total_training_steps={STEPS.get(rule, 40)}"),
    )
    began = time.monotonic()
    devices = DEVICES.get(rule, 1)
    runs.finish(whole, *overrides, devices=devices)
    starting_s = max(time.monotonic() - began - 40 * 0.25, 1.0)
    moments, seen, in_saves = random.Random(rule), [], 0
    for i in range(KILLS[rule]):
        with runs.start(run_dir, *overrides, devices=devices) as process:
            match i % 4:
                case 0 | 2:
                    wait_for_a_save(process, run_dir)
                    time.sleep(moments.uniform(0, 0.03))
                case 1:
                    wait_for_steps(process, run_dir, num_steps(run_dir) + 1)
                    time.sleep(moments.uniform(0, 0.8))
                case _:
                    time.sleep(moments.uniform(0, starting_s))
            assert process.poll() is None, end(process)
            kill(process)
        in_saves += bool(list((run_dir / "checkpoints").glob("*.draft*")))
        seen.append(num_steps(run_dir))
    runs.finish(run_dir, *overrides, devices=devices)
    print(f"{rule}: {len(seen)} kills, {in_saves} with a save under way, after steps {seen}")
    assert_same_end(run_dir, whole)
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run_dir, whole)
    ]
    for killed, expected in zip(*lines, strict=True):
        assert killed["step"] == expected["step"]
        assert killed["critic/rewards/mean"] == expected["critic/rewards/mean"]
    assert not list((run_dir / "checkpoints").glob("*.draft*"))
