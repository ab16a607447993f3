"""Whole runs of a tiny model with history speculation: what is drawn and learnt is what a run without it draws and
learns, to the bit, in float64; and what is drafted is counted.

Rules that race choose the responses that end first, and drafts change which those are, as any other number of rows
does. There each response is what it would be anyway, and a run ends as it would without a stop.

A model with random weights repeats itself little, so the runs here draw with a low temperature: most responses of a
prompt then resemble those of the epoch before, and drafts are accepted as well as rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import MADE_UP_PROFILE, STOPS, WIDE, Runs, assert_same_end, end, state_of

from jaxrl.record.metrics import read_metrics

SETTING = (
    *(*WIDE, "rollout.temperature=0.06", "rollout.decode_steps=2"),
    *("actor.optim.lr=0.002", "trainer.total_training_steps=6"),
)
SPECULATION = "rollout.speculation.enable=true"
CASES: dict[str, tuple[int, tuple[str, ...]]] = {  # devices, and options
    "preemptions": (1, ("rollout.max_num_seqs=4", "rollout.num_blocks=13", "rollout.speculation.verify_tokens=64")),
    "one step off": (2, (STOPS, "trainer.one_step_off=true", "rollout.num_devices=1")),
    "two workers": (2, ("rollout.num_workers=2", "rollout.speculation={epochs: 2}")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    """One compilation cache for all: most programs are the same."""
    made = Runs(tmp_path_factory.mktemp("speculation"), tiny_model)
    made.config["trainer"]["compilation_cache_dir"] = str(made.folder / "cache")
    return made


def comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the history, which one run alone has, and without what a clock measured of layouts."""
    return {name: value for name, value in values.items() if "history" not in name and "layouts" not in name}


def assert_same_training(run_dir: Path, other: Path) -> None:
    """Parameters, optimizer and the loop's state are the same to the bit, and so are the metrics of what was drawn."""
    with jax.enable_x64(True):
        (arrays, values), (expected, expected_values) = state_of(run_dir), state_of(other)
    expected = comparable(expected)
    assert comparable(values) == comparable(expected_values)
    assert comparable(arrays).keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes(), f"{name} differs"
    for ours, theirs in zip(read_metrics(run_dir), read_metrics(other), strict=True):
        for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm", "training/epoch"):
            assert ours[name] == theirs[name], name


def compare(runs: Runs, name: str, devices: int, overrides: tuple[str, ...]) -> tuple[Path, Path]:
    """Runs with speculation and without, both to the end; returns their folders. Options of speculation are of the
    first alone."""
    plain, spec = runs.folder / f"{name} plain", runs.folder / f"{name} drafted"
    others = [each for each in overrides if not each.startswith("rollout.speculation")]
    runs.finish(plain, *SETTING, *others, devices=devices)
    runs.finish(spec, *SETTING, *overrides, SPECULATION, devices=devices)
    assert_same_training(spec, plain)
    measured, before = read_metrics(spec), read_metrics(plain)
    assert not [name for line in before for name in line if "/spec/" in name], "nothing of it where it is off"
    shares = [line["rollout/spec/drafted_share"] for line in measured]
    assert 0 < max(shares) < 1
    print(f"{name}: of decoded tokens {np.round(shares, 2).tolist()} from drafts, accepted")
    print(f"  {[round(line['rollout/spec/accept_rate'], 2) for line in measured]} of those drafted")
    return spec, plain


@pytest.mark.slow
def test_a_run_is_the_same_with_drafts_and_takes_fewer_steps(runs: Runs):
    spec, plain = compare(runs, "alone", 1, ())
    measured, before = read_metrics(spec), read_metrics(plain)
    assert measured[0]["rollout/spec/drafted_share"] == 0, "the first step has no history"
    rates = [line["rollout/spec/accept_rate"] for line in measured]
    assert any(0 < rate < 1 for rate in rates), "accepted as well as rejected"
    steps, steps_before = (sum(line["rollout/decode_steps"] for line in lines) for lines in (measured, before))
    assert steps < steps_before
    for line in measured:
        assert line["rollout/spec/evicted_prompts"] == 0
        assert line["rollout/spec/index_bytes"] > 0
    events = json.loads((spec / "timeline.json").read_text())
    tracks = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert "history" in tracks
    assert "Drafts from history" in (spec / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_with_what_else_a_run_may_have(runs: Runs, case: str):
    devices, overrides = CASES[case]
    spec, _ = compare(runs, case, devices, overrides)
    measured = read_metrics(spec)
    if case == "preemptions":
        assert sum(line["rollout/preemptions"] for line in measured) > 0


NOTES = """
import json

from jaxrl.record.metrics import read_metrics

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open({file!r}, "a") as file:
        file.write(json.dumps([ground_truth, solution_str]) + "\\n")
    return len(solution_str) % 5 / 4
"""


def drawn(runs: Runs, name: str, *overrides: str) -> set[tuple[str, str]]:
    """(problem, response) of all that a run has scored, with weights that stay."""
    seen, reward = runs.folder / f"{name}.jsonl", runs.folder / f"{name}.py"
    reward.write_text(NOTES.format(file=str(seen)))
    still = ("actor.optim.lr=0", f"reward.path={reward}", "trainer.total_training_steps=10")
    runs.finish(runs.folder / name, *SETTING, STOPS, *still, *overrides)
    return {tuple(json.loads(line)) for line in seen.read_text().splitlines()}


@pytest.mark.slow
def test_responses_of_a_race_are_what_they_would_be(runs: Runs):
    """Partial rollout buffers other responses with drafts than without; all are among those of plain batches, where
    every response is waited for."""
    every = drawn(runs, "waits")
    raced = drawn(
        runs, "races", SPECULATION, "rollout.partial_rollout={enable: true, at_end: leave}", "rollout.max_num_seqs=4"
    )
    measured = read_metrics(runs.folder / "races")
    assert max(line["rollout/spec/drafted_share"] for line in measured) > 0
    assert sum(line["rollout/resumed_tokens"] for line in measured) > 0
    assert raced <= every
    assert len(raced) > 50


@pytest.mark.slow
def test_layouts_that_switch(runs: Runs):
    """A made-up profile by which a smaller batch is faster the larger tp is; it has no steps that verify."""
    profile = runs.folder / "profile.json"
    layout = (
        "rollout.layout={switch: true, min_gain: 0, cooldown: 2, allow_synthetic: true}",
        "rollout.max_num_seqs=2",
    )
    options = (*layout, f"rollout.layout.profile={profile}")
    program = (MADE_UP_PROFILE, f"--out={profile}")
    with runs.start(runs.folder / "none", *SETTING, *options, devices=8, program=program) as process:
        end(process)
    refused = (*SETTING, *options, SPECULATION)
    with runs.start(runs.folder / "refused", *refused, devices=8) as process:
        assert "or set rollout.speculation.max_batch" in end(process, status=2)
    spec, plain = compare(runs, "layouts", 8, (*options, "rollout.speculation.max_batch=8"))
    for run_dir in (spec, plain):
        assert sum(line["rollout/layout/switches"] for line in read_metrics(run_dir)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rollout.tail_batching={enable: true, at_end: leave}", "rollout.n=4"])
def test_a_run_that_goes_on_drafts_from_what_it_had(runs: Runs, rule: str):
    """Stopped after four steps: the same tokens and the same counts as of a run that was never stopped."""
    whole, stopped = (runs.folder / f"{name} {rule[8:12]}" for name in ("whole", "stopped"))
    chosen = (*SETTING, STOPS, SPECULATION, rule)
    runs.finish(whole, *chosen)
    runs.finish(stopped, *chosen, "trainer.total_training_steps=4")
    runs.finish(stopped, *chosen)
    assert_same_end(stopped, whole)
    assert max(line["rollout/spec/drafted_share"] for line in read_metrics(whole)[4:]) > 0
    for ours, theirs in zip(read_metrics(stopped), read_metrics(whole), strict=True):
        for name in ("accept_rate", "drafted_share", "tokens_per_step", "match_length", "index_bytes", "plans_share"):
            assert ours[f"rollout/spec/{name}"] == theirs[f"rollout/spec/{name}"], name
