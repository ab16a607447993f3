"""The box on top of a page: what a reader should look at first."""

from pathlib import Path
from typing import Any

import pytest

from jaxrl.report.runs import RecordedRun
from jaxrl.report.verdicts import verdicts, verdicts_box

GOOD = {
    "actor/grad_norm": 1.0,
    "critic/mixed_reward_groups": 0.6,
    "response_length/clip_ratio": 0.05,
    "val/reward": 0.5,
}


def run_of(*lines: dict[str, float], **info: Any) -> RecordedRun:
    metrics = [{"step": step, **GOOD, **line} for step, line in enumerate(lines, 1)]
    info = {"config": {"data": {"max_response_length": 32}}} | info
    return RecordedRun(Path("run"), metrics, [], [], [], info, [])


def learning(steps: int, gain: float) -> list[dict[str, float]]:
    return [{"critic/rewards/mean": 0.2 + gain * step + 0.01 * (step % 2)} for step in range(steps)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"response_length/clip_ratio": 0.6}], "60% of the responses are cut at 32 tokens"),
        ([{"actor/grad_norm": 0.0}, {}, {}], "The gradient was 0 in 1 of 3 steps"),
        ([{"critic/mixed_reward_groups": 0.1}], "Only 10% of the prompts have responses with different rewards"),
        (learning(20, 0.0), "The reward has not changed: 0.205 in the first 10 steps and 0.205 in the last 10"),
        ([{"actor/skipped_updates": 1.0}, {"actor/skipped_updates": 2.0}], "3 updates were skipped"),
    ],
)
def test_one_thing_to_look_at(lines: list[dict[str, float]], said: str) -> None:
    (found,) = verdicts(run_of(*lines))
    assert found.startswith(said)


def test_a_run_that_learns_has_no_box() -> None:
    assert verdicts_box(run_of(*learning(30, 0.02))) == verdicts_box(run_of()) == ""


def test_no_held_out_set_and_the_order() -> None:
    lines = [
        {name: value for name, value in GOOD.items() if name != "val/reward"} | {"response_length/clip_ratio": 0.9}
    ]
    run = RecordedRun(Path("run"), [{"step": 1, **lines[0]}], [], [], [], {}, [])
    cut, held_out = verdicts(run)
    assert cut.startswith("90%")
    assert held_out.startswith("There is no held-out set")
