"""Bad inputs of the class "concurrency": two programs that want the same folder or file at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest
from refusals import Refusal, contents, problems

from jaxrl.cli import main
from jaxrl.commands.export import export
from jaxrl.config import from_mapping
from jaxrl.record.files import writing_whole
from jaxrl.record.run_dir import RunDir

TASK = ("data.train_files=[{tmp}/train.jsonl]", "data.max_prompt_length=64", "data.max_response_length=16")
MODEL = ("model.path=random:{model}", "data.train_batch_size=2", "trainer.total_training_steps=8")
TRAIN = ("train", *MODEL, *TASK, "trainer.compilation_cache_dir={tmp}/cache")
SIMULATE = ("simulate", "model.path=m", "model.random_init=true", "data.task=leg_counting")
HELD = "{run} belongs to a run that is still going (it holds {run}/.lock): wait for it, or choose another {of}.run_dir"
HOLD = """
import sys
from jaxrl.config import from_mapping
from jaxrl.record.run_dir import RunDir
run_dir = RunDir(sys.argv[1])
run_dir.record_start(from_mapping({"model": {"path": "m"}, "data": {"task": "leg_counting"}}), {"platform": "cpu"}, 0)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_folder_that_another_process_has(
    refused: Callable[[Iterable[Refusal]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A report of it needs no lock: it only reads, and its page is replaced as a whole."""
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        before = contents(run)
        refused(
            Refusal((*arguments, f"{section}.run_dir={run}"), HELD.format(run=run, of=section), problems)
            for arguments, section in ((TRAIN, "trainer"), (SIMULATE, "simulate"))
        )
        assert contents(run) == before
        assert main(["report", str(run)]) == 0
        assert capsys.readouterr().out == f"{run / 'report.html'}\n"
        other.kill()
    RunDir(run).close()


def test_two_exports_into_one_folder(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The one that is ready first has it; the other one is refused and leaves nothing behind."""
    out = tmp_path / "out"
    other = tmp_path / "out.tmp"
    other.mkdir()
    (other / "mine").write_text("")

    def second(*arguments: object, **options: object) -> None:
        monkeypatch.undo()
        export(f"random:{tiny_model}", str(out), "float32", say=lambda line: None)

    monkeypatch.setattr("jaxrl.commands.export.export_hf", second)
    with pytest.raises(ValueError, match="must be empty or absent: an export never overwrites"):
        export(f"random:{tiny_model}", str(out), "float32", say=lambda line: None)
    assert {"out/model.safetensors", "out/config.json", "out.tmp/mine"} < set(contents(tmp_path))
    assert not [name for name in contents(tmp_path) if ".jaxrl" in name]


def test_two_writers_of_one_file(tmp_path: Path):
    """As two evaluations with one --out: the file is that of the one that ends last, whole."""
    path = tmp_path / "out.jsonl"
    with writing_whole(path) as first:
        first.write(b"first\n" * 1000)
        with writing_whole(path) as second:
            second.write(b"second\n")
        assert path.read_bytes() == b"second\n"
    assert path.read_bytes() == b"first\n" * 1000
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_refused_start_does_not_take_the_folder_from_one_that_begins(tmp_path: Path):
    """The first is refused and takes back its lock and its folder; the second comes in between."""
    config = from_mapping({"model": {"path": "m"}, "data": {"task": "leg_counting"}})
    refused = RunDir(tmp_path / "run")
    with pytest.raises(ValueError, match="still going"):
        RunDir(tmp_path / "run")
    refused.close()
    with closing(RunDir(tmp_path / "run")) as run_dir:
        run_dir.record_start(config, {"platform": "cpu"}, 0)
        with pytest.raises(ValueError, match="still going"):
            RunDir(tmp_path / "run")
        assert (tmp_path / "run" / ".lock").exists(), "the third one's refusal leaves the second one's lock"
