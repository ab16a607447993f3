"""A start that is refused leaves the run as it was: it can be exported, and the right options go on with it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from refusals import contents
from runs import asked
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.run.stop import Stop

OPTIONS = (
    *("data.max_prompt_length=64", "data.max_response_length=8", "data.train_batch_size=2", "rollout.n=2"),
    *("rollout.max_num_seqs=4", "rollout.max_num_batched_tokens=64", "rollout.num_blocks=20", "rollout.warmup=false"),
    *("actor.ppo_max_token_len_per_gpu=256", "trainer.save_freq=1", "trainer.num_devices=1", "reward.num_workers=1"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(tiny_model, folder / "model")
    write_tiny_model(folder / "wider", hidden_size=64)
    for name, count in (("train", 4), ("other", 7)):
        rows = [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("1 / 0\n")
    assert start(folder, "trainer.compilation_cache_dir=") == 0
    return folder


def start(folder: Path, *options: str, stop: Stop | None = None) -> int:
    own = (
        f"model.path=random:{folder / 'model'}",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        f"trainer.run_dir={folder / 'run'}",
        f"trainer.compilation_cache_dir={folder / 'cache'}",
        "trainer.total_training_steps=1",
    )
    return main(["train", *own, *OPTIONS, *options], stop)


REFUSED = {
    "another-model": (["model.path=random:{}/wider"], "does not fit this model and optimizer"),
    "adapters": (["model.lora_rank=2"], "has all weights, and this run trains adapters"),
    "other-data": (["data.train_files=[{}/other.jsonl]"], "run holds a run with other data (data.train_files: "),
    "a-reward-file-that-fails": (["reward.kind=custom", "reward.path={}/reward.py"], "ZeroDivisionError"),
    "no-profile": (["rollout.layout.switch=true", "rollout.layout.profile={}/gone.json"], "gone.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_written(name: str, place: Path, capsys: pytest.CaptureFixture[str]):
    """Neither into a run that would go on, nor into a folder that would be made for a new one."""
    options, words = REFUSED[name]
    before, filled = contents(place), [option.replace("{}", str(place)) for option in options]
    new = [f"trainer.run_dir={place / 'new' / 'run'}"]
    for more in ([],) if name in ("another-model", "adapters", "other-data") else ([], new):
        assert start(place, *filled, *more) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        assert contents(place) == before


@pytest.mark.parametrize(
    "mistake",
    [
        "model.path={}/gone",
        "trainer.num_devices=64",
        "data.train_files=[{}/other.jsonl]",
    ],
)
def test_a_mistake_is_told_before_a_checkpoint_is_read(mistake: str, place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxrl.training.manifest.check", lambda *_: pytest.fail("minutes for a large checkpoint"))
    monkeypatch.setattr("jaxrl.run.host.load_weights", lambda *_: pytest.fail("a minute for a model"))
    assert start(place, mistake.replace("{}", str(place))) == 2


def test_what_a_run_began_from_is_not_read_when_it_goes_on(place: Path, tmp_path: Path):
    """Its weights are in the run's own checkpoint; only a reference is of the beginning."""
    folder = tmp_path / "place"
    shutil.copytree(place, folder)
    shutil.copytree(place / "run", tmp_path / "first")
    for file in (tmp_path / "first").rglob("checkpoints/1/state/**/*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    begins = f"trainer.init_from={tmp_path / 'first'}"
    assert start(folder, begins, "actor.use_kl_loss=true", "trainer.total_training_steps=2") == 2
    longer = ("trainer.compilation_cache_dir=", "trainer.total_training_steps=2")
    assert start(folder, begins, *longer, stop=asked()) == 0


def test_a_run_that_is_over_loads_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Nor does it with its data in a file of another form, which is no other data."""
    folder = tmp_path / "place"
    shutil.copytree(place, folder)
    (folder / "run" / "report.html").unlink()
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    monkeypatch.setattr("jaxrl.run.host.load_weights", lambda *_: pytest.fail("a minute for a model"))
    before = contents(folder / "run")
    assert start(folder, f"data.train_files={folder / 'train.parquet'}") == 0
    said = f"{folder / 'run'}: already at step 1 of 1: raise trainer.total_training_steps to continue"
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(said))
    assert line.startswith(f"{said}; what has changed since has no effect: ")
    assert re.search(r"data\.train_files: \[.*train\.jsonl.*\] -> \[.*train\.parquet.*\]", line)
    after = contents(folder / "run")
    assert after.pop("report.html")
    assert after == before, "only the page is new"
