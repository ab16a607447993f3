"""What a process writes that is not the first: its own folder, and nothing of the run's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from refusals import contents

from jaxrl.config import Config, from_mapping
from jaxrl.record.journal import Journal
from jaxrl.record.layouts import read_layouts
from jaxrl.record.metrics import read_metrics
from jaxrl.record.run_dir import FollowerRunDir, RunDir
from jaxrl.record.run_record import open_record
from jaxrl.types import Group, Prompt, Sample, SampleKey

IDS, ZEROS = np.asarray([5, 6], np.int32), np.zeros((2,), np.float32)
SAMPLE = Sample(SampleKey(0, 0, 0), IDS, ZEROS, ZEROS, IDS, "stop", text="4", reward=0.5)
GROUPS = [Group(Prompt(0, 0, (1,), "2+2?", "src", "4"), [SAMPLE])]


def make_config() -> Config:
    data = {"task": "leg_counting", "task_config": {"min_animals": 2}}
    return from_mapping({"model": {"path": "m", "random_init": True}, "data": data, "hosts": {"num": 2}})


def steps(run_dir: RunDir | FollowerRunDir, config: Config) -> None:
    tell = None if run_dir.leads else lambda *decision: None
    with open_record(config, run_dir, -1, tell=tell) as record:
        record.open_sinks()
        run_dir.record_start(config, {"platform": "cpu"}, 0)
        record.begin()
        assert record.timeline is not None
        assert record.journal is not None
        record.on_eval(0, {"val/reward": 0.5, "val/accuracy": 0.25}, GROUPS)
        with record.timeline.phase("step"):
            record.on_step(1, {"x": 1.0}, GROUPS)
        record.layouts.write(1, 0, "plain", "measured", {"points": [[0.0, 1, 1]], "switches": []})
        record.journal.append(1, "verdict", (0,), {"status": "timeout"})
        assert record.journal.find(1, "verdict", (0,)) is not None, "what was decided is known here as well"
        run_dir.record_checkpoint(1, record.written())
        run_dir.record_cache("name", "note")


def test_one_leads_and_one_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = make_config()
    with closing(RunDir(tmp_path)) as leading:
        steps(leading, config)
        assert leading.report(lambda folder: folder / "page") == tmp_path / "page"
    written, shown = contents(tmp_path), capsys.readouterr().out
    assert "held-out reward" in shown
    assert not (tmp_path / "hosts").exists()
    with closing(FollowerRunDir(tmp_path, 1)) as following:
        assert following.earlier == config
        following.refuse_other_kind()
        with open(following.early_file("rewards.log"), "a") as log:
            log.write("printed by a reward\n")
        steps(following, config)
        assert following.report(lambda folder: pytest.fail("written by the first")) == tmp_path / "report.html"
    own = {path: content for path, content in contents(tmp_path).items() if path not in written}
    assert {path: content for path, content in contents(tmp_path).items() if path in written} == written
    assert {Path(path).name for path in own if Path(path).suffix} == {"rewards.log", "timeline.json", "layouts.jsonl"}
    assert all(Path(path).is_relative_to("hosts") for path in own)
    assert capsys.readouterr().out == "", "the first one shows the run"
    assert len(read_metrics(tmp_path)) == 2
    assert len(read_layouts(tmp_path)) == 2, "each host's workers have lines of their own"
    told = []
    journal = Journal(tmp_path / "journal.jsonl", 0, begin=False, tell=lambda *decision: told.append(decision))
    journal.begin()
    assert journal.find(1, "verdict", (0,)) is not None
    journal.cut(1)
    assert journal.find(1, "verdict", (0,)) is None
    journal.append(2, "verdict", (1,), {"status": "timeout"})
    assert told == [(2, "verdict", (1,), {"status": "timeout"})]
    assert journal.find(2, "verdict", (1,)) is not None
    journal.close()
    assert {path: content for path, content in contents(tmp_path).items() if path in written} == written


def test_a_refused_start_leaves_nothing(tmp_path: Path):
    (tmp_path / "run").mkdir()
    before = contents(tmp_path)
    with closing(FollowerRunDir(tmp_path / "run", 2)) as following:
        following.early_file("rewards.log").write_text("printed by a reward\n")
    assert contents(tmp_path) == before
    own = tmp_path / "run" / "hosts" / "2"
    own.mkdir(parents=True)
    (own / "rewards.log").write_text("earlier\n")
    with (
        closing(FollowerRunDir(tmp_path / "run", 2)) as following,
        open(following.early_file("rewards.log"), "a") as log,
    ):
        log.write("later\n")
    assert (own / "rewards.log").read_text() == "earlier\n"
