"""A command's output never takes the place of its input, nor of a run's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxrl.config import from_mapping
from jaxrl.record.outputs import inputs_of, refuse_overwriting


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
