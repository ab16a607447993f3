"""A run's directory: the lock, what it records, and what has changed since."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from refusals import contents

from jaxrl.config import Config, from_mapping
from jaxrl.config.files import load
from jaxrl.record.files import temporary_path
from jaxrl.record.run_dir import (
    RunDir,
    commit,
    inputs_of,
    recorded_config,
    recorded_start,
    refuse_overwriting,
    versions,
)

HOLD = """
import sys, time
from jaxrl.record.run_dir import RunDir
run_dir = RunDir(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def make_config(**trainer: object) -> Config:
    values = {"path": "m", "random_init": True}
    task = {"task": "leg_counting", "task_config": {"min_animals": 2}, "prompt_template": "{question} é"}
    return from_mapping({"model": values, "data": task, "trainer": trainer})


def test_a_second_process_is_kept_out_until_the_first_is_gone(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        try:
            with pytest.raises(ValueError, match=r"belongs to a run that is still going .* choose another trainer"):
                RunDir(tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
    RunDir(tmp_path).close()


def test_the_config_comes_back_from_its_file(tmp_path: Path):
    run_dir, config = RunDir(tmp_path / "new" / "run"), make_config(seed=3)
    assert run_dir.changes(config) == []
    run_dir.record_start(config, {"platform": "cpu", "count": 1}, 0)
    assert from_mapping(yaml.safe_load(run_dir.file("config.yaml").read_text())) == config
    assert load(str(run_dir.file("config.yaml")), []) == config
    assert run_dir.changes(config) == []
    run_dir.close()


def test_changes_are_listed_one_by_one(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    run_dir.record_start(make_config(seed=3), {}, 0)
    assert run_dir.changes(make_config(seed=4, save_freq=7)) == ["trainer.save_freq: 10 -> 7", "trainer.seed: 3 -> 4"]
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
    assert set(record) >= {"versions", "commit", "command", "started"}
    assert not list(tmp_path.glob("*.tmp"))
    run_dir.close()


def test_versions_and_commit():
    assert {"python", "jax", "numpy"} <= set(versions())
    assert commit() == "" or len(commit().removesuffix("+changes")) == 40


def test_runs_of_different_commands_keep_apart(tmp_path: Path):
    for kind, other in (("simulate", "train"), ("train", "sft"), ("sft", "dpo")):
        with closing(RunDir(tmp_path / kind, kind=kind)) as run_dir:
            run_dir.refuse_other_kind()
            run_dir.record_start(make_config(), {"platform": "cpu", "kind": "x", "count": 1}, 0)
            run_dir.refuse_other_kind()
        rule = rf"holds a run of `jaxrl {kind}`, and this is `jaxrl {other}`: choose another trainer\.run_dir"
        with closing(RunDir(tmp_path / kind, kind=other)) as run_dir, pytest.raises(ValueError, match=rule):
            run_dir.refuse_other_kind()


def test_a_start_that_is_refused_leaves_nothing(tmp_path: Path):
    """A folder that was not there, one that was, and one in which another run may begin in between."""
    RunDir(tmp_path / "new" / "run").close()
    assert contents(tmp_path) == {}
    (tmp_path / "there").mkdir()
    RunDir(tmp_path / "there").close()
    assert contents(tmp_path) == {"there": "folder"}
    first = RunDir(tmp_path / "a" / "b")
    (tmp_path / "a" / "mine").write_text("")
    first.close()
    assert set(contents(tmp_path)) == {"there", "a", "a/mine"}


def test_what_a_refused_start_has_appended_is_taken_back(tmp_path: Path):
    for name in ("new", "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        (tmp_path / "there" / "rewards.log").write_text("earlier\n")
        before = contents(tmp_path)
        with closing(RunDir(tmp_path / name)) as run_dir, open(run_dir.early_file("rewards.log"), "a") as log:
            log.write("printed by a reward file\n")
        assert contents(tmp_path) == before


def test_a_start_leaves_its_lock_and_clears_temporary_files_of_one_that_was_killed(tmp_path: Path):
    with closing(RunDir(tmp_path / "run")) as run_dir:
        for name in ("run.json", "metrics.jsonl", "state.json"):
            run_dir.file(f".jaxrl-{name}-0123456789ab.tmp").write_text("half")
        run_dir.file("notes.tmp").write_text("the user's")
        run_dir.record_start(make_config(), {}, 0)
    assert {file.name for file in run_dir.path.iterdir()} == {".lock", "config.yaml", "run.json", "notes.tmp"}
    before = contents(tmp_path)
    RunDir(tmp_path / "run").close()
    assert contents(tmp_path) == before


def test_a_start_leaves_the_temporary_files_of_others(tmp_path: Path):
    """An evaluation's, a report's and an export's may go on in the folder; a killed export leaves a folder."""
    with closing(RunDir(tmp_path / "run")) as run_dir:
        kept = {temporary_path(run_dir.file("report.html")), temporary_path(run_dir.file("e.jsonl"))}
        kept |= {temporary_path(run_dir.file("metrics.jsonl-2")), temporary_path(run_dir.file("hf"), "partial")}
        folders = {run_dir.file(".jaxrl-0123456789ab.tmp"), temporary_path(run_dir.file("metrics.jsonl"))}
        for file in kept:
            file.write_text("half")
        for folder in folders:
            folder.mkdir()
        run_dir.record_start(make_config(), {}, 0)
        assert all(place.exists() for place in kept | folders)


def test_what_the_start_and_checkpoints_record_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda n: synced.append(os.readlink(f"/proc/self/fd/{n}")) or fsync(n))
    with closing(RunDir(tmp_path)) as run_dir:
        run_dir.record_start(make_config(), {}, 0)
        run_dir.record_checkpoint(10)
    assert [Path(name).name.split("-")[1] for name in synced] == ["config.yaml", "run.json", "run.json"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", '{"devices": 7}', "damaged"),
        ("config.yaml", "trainer: {seed: x}", "trainer.seed"),
    ],
)
def test_damaged_records_of_a_start_are_named(tmp_path: Path, name: str, content: str, words: str):
    with closing(RunDir(tmp_path)) as run_dir:
        run_dir.file(name).write_text(content)
        with pytest.raises(ValueError, match=words) as caught:
            (recorded_start if name == "run.json" else recorded_config)(tmp_path)
        assert str(tmp_path / name) in str(caught.value)


# -- what other commands may not overwrite ---------------------------------------------------------------------------


def test_what_is_read_is_not_replaced(tmp_path: Path):
    data, link = tmp_path / "val.jsonl", tmp_path / "link.jsonl"
    data.write_text("{}\n")
    link.symlink_to(data)
    for out in (data, link, tmp_path / "a" / ".." / "val.jsonl"):
        with pytest.raises(ValueError, match=r"^--out \(.*\) would replace .*val.jsonl, which this command reads"):
            refuse_overwriting(out, "--out", ["", data])
    refuse_overwriting(tmp_path / "other.jsonl", "--out", ["", data])


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "run.json", "checkpoints/3/manifest.json"])
def test_a_runs_own_files_are_not_replaced(tmp_path: Path, name: str):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"would replace a file of the run in {tmp_path}: name another file"):
        refuse_overwriting(tmp_path / name, "--out")
    refuse_overwriting(tmp_path / "eval.jsonl", "--out")
    refuse_overwriting(tmp_path / "report.html", "--out")


def test_outside_of_a_run_any_name_will_do(tmp_path: Path):
    refuse_overwriting(tmp_path / "metrics.jsonl", "--out")


def test_every_file_that_the_options_name_is_an_input():
    values = {
        "model": {"path": "m"},
        "data": {"train_files": ["t.jsonl"], "val_files": ["v.jsonl"]},
        "reward": {"kind": "custom", "path": "r.py"},
        "algorithm": {"filter_groups": {"enable": True, "path": "f.py"}},
    }
    assert {"t.jsonl", "v.jsonl", "r.py", "f.py"} <= set(inputs_of(from_mapping(values)))


def test_a_journal_that_is_gone_is_noted(tmp_path: Path):
    with closing(RunDir(tmp_path)) as run_dir:
        assert run_dir.missing_journal() is None
        run_dir.record_start(make_config(), {}, 0, checkpoint=None)
        file = run_dir.file("journal.jsonl")
        said = "is gone: steps after the last checkpoint ask the clock again, and may come out another way"
        assert run_dir.missing_journal() == f"{file} {said}"
        file.write_text("")
        assert run_dir.missing_journal() is None, "its reader refuses it"
