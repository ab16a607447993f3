"""A run's directory: the lock, what it records, and what has changed since."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from refusals import contents

from jaxrl.config import Config, from_mapping
from jaxrl.config.files import load
from jaxrl.record.run_dir import RunDir, refuse_overwriting


def make_config(**trainer: object) -> Config:
    values = {"path": "m", "random_init": True}
    task = {"task": "leg_counting", "task_config": {"min_animals": 2}, "prompt_template": "{question} é"}
    return from_mapping({"model": values, "data": task, "trainer": trainer})


def test_the_config_comes_back_from_its_file(tmp_path: Path):
    run_dir, config = RunDir(tmp_path / "new" / "run"), make_config(seed=3)
    assert run_dir.changes(config) == []
    run_dir.record_start(config, {"platform": "cpu", "count": 1}, 0)
    assert from_mapping(yaml.safe_load(run_dir.file("config.yaml").read_text())) == config
    assert load(str(run_dir.file("config.yaml")), []) == config
    assert run_dir.changes(config) == []
    run_dir.close()


def test_every_start_is_recorded(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    run_dir.record_start(make_config(seed=3), {"platform": "cpu", "kind": "cpu", "count": 8}, 0)
    run_dir.record_start(make_config(seed=4), {"platform": "gpu", "kind": "H100", "count": 1}, 7)
    record = json.loads(run_dir.file("run.json").read_text())
    assert [start["from_step"] for start in record["starts"]] == [0, 7]
    assert [start["devices"]["count"] for start in record["starts"]] == [8, 1]
    assert record["devices"]["kind"] == "H100", "the latest start, on top"
    assert record["seeds"] == {"trainer": 4, "data": 0}
    assert record["config"]["trainer"]["seed"] == 4
    run_dir.record_checkpoint(4)
    missing = f"checkpoint 4 is missing, though {tmp_path}/run.json names it"
    assert [run_dir.missing_checkpoint(found) for found in (4, 2, None)] == [None, missing, None]
    assert set(record) >= {"versions", "commit", "command", "started"}
    assert not list(tmp_path.glob("*.tmp"))
    run_dir.close()


def test_a_start_leaves_its_lock_and_clears_temporary_files_of_one_that_was_killed(tmp_path: Path):
    with closing(RunDir(tmp_path / "run")) as run_dir:
        for name in ("run.json", "metrics.jsonl", "state.json"):
            run_dir.file(f".jaxrl-{name}-0123456789ab.tmp").write_text("half")
        run_dir.file("notes.tmp").write_text("the user's")
        run_dir.record_start(make_config(), {}, 0)
    assert {file.name for file in run_dir.path.iterdir()} == {".lock", "config.yaml", "run.json", "notes.tmp"}
    before = contents(tmp_path)
    with closing(RunDir(tmp_path / "run")) as early, early.early_file("notes.tmp").open("a") as notes:
        notes.write("of a start that fails")
    assert contents(tmp_path) == before


def test_what_is_read_is_not_replaced(tmp_path: Path):
    data, link = tmp_path / "val.jsonl", tmp_path / "link.jsonl"
    data.write_text("{}\n")
    link.symlink_to(data)
    for out in (data, link, tmp_path / "a" / ".." / "val.jsonl"):
        with pytest.raises(ValueError, match=r"^--out \(.*\) would replace .*val.jsonl, which this command reads"):
            refuse_overwriting(out, "--out", ["", data])
    refuse_overwriting(tmp_path / "other.jsonl", "--out", ["", data])


def test_a_runs_own_files_are_not_replaced(tmp_path: Path):
    (tmp_path / "run.json").write_text("{}")
    for name in ("metrics.jsonl", "run.json", "checkpoints/3/manifest.json"):
        with pytest.raises(ValueError, match=rf"would replace a file of the run in {tmp_path}: name another file"):
            refuse_overwriting(tmp_path / name, "--out")
    refuse_overwriting(tmp_path / "report.html", "--out")
