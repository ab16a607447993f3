"""Bad inputs of the class "run directories and checkpoints": folders that cannot be written, and damaged files in them.

tests/refusals/test_checkpoints.py has those of checkpoints, tests/record/test_files.py and test_journal.py the other
places that cannot be written, and lines that cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from refusals import Refusal, problems

from jaxrl.config import from_mapping, to_mapping
from jaxrl.record.state import dump_state

DATA = ("data.train_files=[{tmp}/train.jsonl]", "data.max_prompt_length=64", "data.max_response_length=16")
MODEL = ("model.path=random:{model}", "data.train_batch_size=2", "trainer.total_training_steps=8")
TRAIN = ("train", *MODEL, *DATA, "trainer.compilation_cache_dir={tmp}/cache")
RUN = (*TRAIN, "trainer.run_dir={tmp}/run")
SIMULATED = ("model.path=m", "model.random_init=true", "simulate.model=Qwen2.5-7B", "simulate.num_devices=1")
SIMULATE = ("simulate", *SIMULATED, "data.task=leg_counting", "simulate.run_dir={tmp}/run")
DEFAULTS = to_mapping(from_mapping({"model": {"path": "random:gone"}, "data": {"task": "leg_counting"}}))
Prepare = Callable[[Path], object]


def prepared(*steps: Prepare) -> Callable[[Path], None]:
    """Problems to train on, and whatever the case needs."""

    def prepare(folder: Path) -> None:
        problems(folder)
        for step in steps:
            step(folder)

    return prepare


def a_run(kind: str = "train", **files: str | bytes | None) -> Prepare:
    """A run directory with what each start writes; a file's content by its name (`run_json`), None for a folder."""

    def prepare(folder: Path) -> None:
        run = folder / "run"
        run.mkdir()
        devices = {"platform": "simulated" if kind == "simulate" else "cpu", "kind": "cpu", "count": 1}
        told: dict[str, Any] = {"kind": kind, "devices": devices, "starts": []}
        contents = {"run_json": json.dumps(told), "config_yaml": yaml.safe_dump(DEFAULTS), "_lock": ""} | files
        for name, content in contents.items():
            path = run / name.replace("_", ".")
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def without(name: str) -> Prepare:
    return lambda folder: (folder / "run" / name).unlink()


def file(name: str = "run") -> Prepare:
    return lambda folder: (folder / name).write_text("mine")


def folder(name: str) -> Prepare:
    return lambda path: (path / name).mkdir()


def link(name: str, to: str) -> Prepare:
    return lambda path: (path / name).symlink_to(path / to)


def place(run_dir: str, sentence: str, *steps: Prepare) -> Refusal:
    """A run directory that cannot be one."""
    return Refusal((*TRAIN, f"trainer.run_dir={run_dir}"), f"trainer.run_dir: {sentence}", prepared(*steps))


def damaged(file: str, content: str | bytes | None, sentence: str) -> Refusal:
    """A run whose directory holds a damaged file."""
    return Refusal(RUN, "{tmp}/run/" + sentence, prepared(a_run(**{file: content})))


TOLD = '{"journal":2,"bytes":          27,"crc32":         7}\n'
BRING_BACK = "bring back the file as it was, or move it away, and steps after the last checkpoint ask the clock again"
PLACES = (
    place("{tmp}/run", "{tmp}/run is not a folder", file()),
    place("{tmp}/run/a/b", "{tmp}/run/a/b cannot be made: {tmp}/run is not a folder", file()),
    place("{tmp}/run", "{tmp}/train.jsonl is not a folder", link("run", "train.jsonl")),
    Refusal(
        (*TRAIN, 'trainer.run_dir="{tmp}/a\\0b"'),
        "trainer.run_dir must be a path, found a NUL character in '{tmp}/a\\x00b' (command line: "
        'trainer.run_dir="{tmp}/a\\0b")',
        prepared(),
    ),
    place("/proc/jaxrl", "/proc/jaxrl cannot be written: /proc may not be changed by this user"),
    place("{tmp}/run", "{tmp}/run/.lock: is a directory", folder("run"), folder("run/.lock")),
)
DAMAGED = (
    damaged("run_json", '{"devices": {',
            "run.json: not valid JSON (Expecting property name enclosed in double quotes, column 14)"),
    damaged("run_json", "[1]", "run.json: damaged: mend it, or move it away"),
    damaged("run_json", "{}", "run.json: damaged: mend it, or move it away"),
    damaged("run_json", None, "run.json: is a directory"),
    damaged("run_json", b"\xff\xfe", "run.json: not UTF-8 text (byte 0)"),
    damaged("config_yaml", "trainer: {seed: 1",
            "config.yaml, line 1: expected ',' or '}', but got '<stream end>'"),
    damaged("config_yaml", "",
            "config.yaml: empty, though it held the options of a run: bring it back, or move it away"),
    *(damaged("journal_jsonl", content, f"journal.jsonl: damaged (not as it was written): {BRING_BACK}")
      for content in ("Monday\n", TOLD, TOLD + '{"step":1,"kind":"verdict"}\n')),
)  # fmt: skip
SIMULATIONS = (
    Refusal(
        RUN,
        "{tmp}/run holds a run of `jaxrl simulate`, and this is `jaxrl train`: choose another trainer.run_dir",
        prepared(a_run("simulate")),
    ),
    Refusal(
        SIMULATE,
        "{tmp}/run holds a run of `jaxrl train`, and this is `jaxrl simulate`: choose another simulate.run_dir",
        a_run(),
    ),
    Refusal(SIMULATE, "simulate.run_dir: {tmp}/run is not a folder", file()),
    Refusal(
        SIMULATE,
        "{tmp}/run/state.json: not a simulation's state of schema 2; remove it to start again",
        a_run("simulate", state_json='{"simu'),
    ),
    Refusal(
        SIMULATE,
        "{tmp}/run/state.json: not a simulation's state of schema 2; remove it to start again",
        a_run("simulate", state_json='{"simulation": 9, "state": {}}'),
    ),
    Refusal(
        SIMULATE,
        "{tmp}/run/state.json: a simulation's state without its step; remove it to start again",
        a_run("simulate", state_json=dump_state({})),
    ),
)


def export(sentence: str, *steps: Prepare, source: str = "{tmp}/run", out: str = "{tmp}/out") -> Refusal:
    return Refusal(("export", source, out), sentence, prepared(*steps))


OTHERS = (
    export("{tmp}/run: neither a run nor a model: there is no such file or folder"),
    export("{tmp}/run is a simulated run: it has no weights to export", a_run("simulate")),
    export(
        "{tmp}/run is a run without its config.yaml, which names its model: put it back",
        a_run(),
        without("config.yaml"),
    ),
    export(
        "{tmp}/run is a run of the model gone, which is not there any more: put it back, or name its new place as "
        "model.path in {tmp}/run/config.yaml",
        a_run(),
    ),
    export("{tmp}/run/run.json: damaged: mend it, or move it away", a_run(run_json="1")),
    export("the folder to write: {tmp}/out is not a folder", a_run(), file("out")),
    export("{tmp}/out must be empty or absent: an export never overwrites", a_run(), folder("out"), file("out/mine")),
    export(
        "the folder to write: {tmp}/out/a cannot be made: {tmp}/out is not a folder",
        a_run(),
        file("out"),
        out="{tmp}/out/a",
    ),
    Refusal(("tune", "--run={tmp}/run"), "{tmp}/run is not a run directory: it holds no run.json"),
    Refusal(
        (*TRAIN[:-1], "trainer.run_dir={tmp}/run", "trainer.compilation_cache_dir={tmp}/train.jsonl"),
        "trainer.compilation_cache_dir: {tmp}/train.jsonl is not a folder",
        prepared(),
    ),
)


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused([*PLACES, *DAMAGED, *SIMULATIONS, *OTHERS])
