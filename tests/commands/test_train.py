"""Whole runs of a tiny model: what they leave, cut off and resumed, on other devices.

A run that is killed at any moment and resumed ends with the same training state as one that never was, bit for bit
(same machine, threads and layout). Rewards differ between samples, so every update moves the weights.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from damage import cut, flip
from runs import REWARD, Runs, asked, assert_same_end, copied_after, state_of

from jaxrl.config import from_mapping
from jaxrl.record.metrics import read_metrics
from jaxrl.record.run_dir import versions
from jaxrl.training import manifest

LOST = re.compile(r"\.jsonl is gone")  # what a start says of decisions that it cannot repeat
STEPS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    made = Runs(tmp_path_factory.mktemp("runs"), tiny_model)
    made.config["trainer"]["total_training_steps"] = STEPS
    return made


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """A run that is not disturbed; `cut` beside it is what a kill behind its third step would leave."""
    run_dir = runs.folder / "whole"
    with copied_after({3: runs.folder / "cut"}):
        output = runs.here(run_dir)
    (run_dir / "output").write_text(output)
    return run_dir


def test_the_run_directory(whole: Path):
    config = from_mapping(yaml.safe_load((whole / "config.yaml").read_text()))
    assert config.data.train_batch_size == 4
    record = json.loads((whole / "run.json").read_text())
    assert (record["versions"], record["devices"]["count"], len(record["starts"])) == (versions(), 1, 1)
    metrics = read_metrics(whole)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["actor/grad_norm"] > 0 for line in metrics), "every update was to move the weights"
    assert sum(line["reward/crashes"] for line in metrics) > 0, "some scorers were to die"
    _, *decisions = map(json.loads, (whole / "journal.jsonl").read_text().splitlines())
    assert all(line["kind"] == "verdict" and line["status"] == "crash" for line in decisions)
    crashes = sum(line["reward/crashes"] for line in metrics if line["step"] > 2)
    assert len(decisions) == crashes, "those of steps that an earlier checkpoint holds are gone"
    events = json.loads((whole / "timeline.json").read_text())
    assert {"gen", "reward", "old_log_prob", "update_actor", "sync", "save"} <= {event["name"] for event in events}
    rows = [event for event in events if event.get("cat") == "row"]
    assert sum(event["args"]["end"] in ("stop", "length") for event in rows) == STEPS * 16, "each response once"
    batches = [json.loads(line) for line in (whole / "batches.jsonl").read_text().splitlines()]
    assert [(line["step"], len(line["groups"]), sum(line["lengths"])) for line in batches] == [
        (step, 4, 16) for step in range(1, STEPS + 1)
    ]
    assert "</html>" in (whole / "report.html").read_text()
    assert sorted(int(path.name) for path in (whole / "checkpoints").iterdir() if path.name.isdigit()) == [2, 4]
    assert f"{STEPS} of {STEPS}" in (whole / "output").read_text()


def test_a_run_that_was_cut_off_ends_with_the_same_bits(runs: Runs, whole: Path):
    """Behind its first checkpoint; and when it goes on, the disk is full in the next save."""
    run_dir = runs.folder / "cut"
    assert len(read_metrics(run_dir)) == 3

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "write", full)
        said = runs.here(run_dir, status=1).splitlines()[-1]
    assert said == (
        f"jaxrl: checkpoint 4 cannot be written to {run_dir}/checkpoints: no space left on the device; the last good "
        "checkpoint is step 2: make room and run again"
    )
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["2"]
    (reward := run_dir / "reward.py").write_text(f"{REWARD}# another text\n")
    said = runs.here(run_dir, "trainer.project_name=other", f"reward.path={reward}")
    assert not LOST.search(said)
    assert f"changed since: reward.path: the text of {reward}" in said
    assert "changed since: trainer.project_name: 'jaxrl' -> 'other'" in said
    assert_same_end(run_dir, whole)
    rewards, expected = ([line["critic/rewards/mean"] for line in read_metrics(each)] for each in (run_dir, whole))
    assert rewards == expected, "each step once, with what the whole run drew"


def test_a_resumed_run_needs_its_journal_and_no_other_of_its_lines(
    runs: Runs, whole: Path, caplog: pytest.LogCaptureFixture
):
    run_dir, longer = runs.folder / "harmed", f"trainer.total_training_steps={STEPS + 1}"
    shutil.copytree(whole, run_dir)
    assert not LOST.search(runs.here(run_dir)), "nothing was harmed"
    metrics, journal = run_dir / "metrics.jsonl", run_dir / "journal.jsonl"
    flip(metrics, metrics.read_bytes().index(b"\n{") + 1, 2)
    harmed = metrics.read_bytes()
    cut(run_dir / "samples.jsonl", 9)
    (run_dir / "batches.jsonl").unlink()
    cut(journal)
    output = runs.here(run_dir, longer, status=2)
    assert f"{journal}: damaged (not as it was written): bring back" in output
    journal.unlink()
    output = runs.here(run_dir, longer, stop=asked())
    assert f"after step {STEPS} of {STEPS + 1}" in output
    told = "journal.jsonl is gone: steps after the last checkpoint ask the clock again, and may come out another way"
    assert f"{run_dir}/{told}\n" in output
    assert len(LOST.findall(output)) == 1
    assert f"{metrics}, line 2: damaged (JSONDecodeError: " in caplog.text
    assert metrics.read_bytes() == harmed, "someone may want to mend it"
    assert not LOST.search(runs.here(run_dir, longer, stop=asked())), "it is said once"


def test_a_run_may_start_from_another_ones_parameters(runs: Runs, whole: Path):
    run_dir = runs.folder / "branch"
    runs.here(run_dir, f"trainer.init_from={whole}", stop=asked())
    (arrays, host), (expected, _) = state_of(run_dir), state_of(whole)
    assert host["step"] == 0
    parameters = [name for name in expected if name.startswith("['params']")]
    assert parameters
    for name in parameters:
        assert np.array_equal(arrays[name], expected[name]), name
    assert int(arrays["['counters']['updates']"]) == 0, "a new optimizer"


def test_a_step_with_a_critic_a_reference_and_a_teacher_compiles_nothing_late(runs: Runs, tiny_model: Path):
    run_dir, teacher = runs.folder / "models", f"algorithm.teacher={{path: 'random:{tiny_model}'}}"
    said = runs.here(
        run_dir,
        *("algorithm.adv_estimator=gae", teacher, "actor.use_kl_loss=true", "rollout.warmup=true"),
        "trainer.total_training_steps=1",
    )
    assert re.search(r"\d+ programs ready in \d+ s", said)
    (line,) = read_metrics(run_dir)
    assert line["rollout/recompiles"] == 0
    assert {"critic/vf_loss", "actor/kl_loss", "actor/teacher_kl", "actor/pg_loss"} <= set(line)
    assert line["actor/grad_norm"] > 0 < line["critic/grad_norm"]


def test_rollout_on_devices_of_its_own_gives_the_same_bits(runs: Runs):
    """One-step-off in turns on one device, and at the same time on two."""
    turns, beside, short = runs.folder / "turns", runs.folder / "beside", "trainer.total_training_steps=3"
    off = ("trainer.one_step_off=true", "trainer.save_freq=2", short)
    runs.here(turns, *off)
    runs.here(beside, *off, "rollout.num_devices=1", devices=2)
    assert_same_end(beside, turns)
    events = json.loads((beside / "timeline.json").read_text())
    spans = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]
    rollouts, updates = ([span for span in spans if span[0] == name] for name in ("gen", "update_actor"))
    assert any(r[1] < u[2] and u[1] < r[2] for r in rollouts for u in updates), "nothing overlapped"


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices(runs: Runs):
    first, ends = runs.folder / "eight", {}
    runs.here(first, "rollout.tensor_model_parallel_size=2", "trainer.total_training_steps=2", devices=8)
    arrays, _ = state_of(first)
    for count in (1, 4):
        run_dir = runs.folder / f"on-{count}"
        shutil.copytree(first, run_dir)
        assert "after step 2 of 3" in runs.here(run_dir, "trainer.total_training_steps=3", devices=count)
        ends[count], _ = state_of(run_dir)
    for name in [name for name in arrays if name.startswith("['params']")]:
        assert not np.array_equal(ends[1][name], arrays[name]), f"{name}: training went on"
        # another split of the sums: the same up to rounding, unless a token flipped
        np.testing.assert_allclose(ends[1][name], ends[4][name], rtol=0, atol=0.05)
