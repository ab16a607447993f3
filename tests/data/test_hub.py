"""Names of the Hugging Face Hub, against a hub on the loopback address."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_hub import SmallHub, small_hub

from jaxrl.data.hub import HubName, hub_name

ROOT = Path(__file__).resolve().parents[2]
MODEL, DATA = "org/tiny", "org/sums"
ASKER = """
import json, os, sys, traceback
from jaxrl.config import from_mapping
from jaxrl.data.files import data_files
from jaxrl.data.prompts import load_train
from jaxrl.models.loading import resolve_path
def path(kind, name):
    try:
        if kind == "data":
            return [str(path) for path in data_files([name], "data.train_files")]
        if kind == "sources":
            values = {"model": {"path": "m"}, "data": {"train_files": [name]}}
            return [each.source for each in load_train(from_mapping(values))]
        return resolve_path(name, weights=kind == "weights")
    except ValueError as error:
        return {"refused": str(error)}
for line in sys.stdin:
    wanted, environment, folder = json.loads(line)
    if os.fork() == 0:
        found = None
        try:
            os.environ.update(environment)
            os.chdir(folder)
            found = [path(*each) for each in wanted]
        except BaseException:
            traceback.print_exc()
        os.write(1, json.dumps(found).encode() + b"\\n")
        os._exit(0)
    os.wait()
"""
"""Answers what becomes of names, each time in a fork: huggingface_hub reads its variables where it is imported."""


@pytest.fixture(scope="module")
def asker() -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-W", "ignore", "-c", ASKER]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(
        program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process
        process.communicate(timeout=60)


Asked = Callable[..., list[Any]]


@pytest.fixture
def asked(asker: subprocess.Popen[str]) -> Asked:
    def ask(hub: SmallHub | None, home: Path, *wanted: tuple[str, str], **environment: str) -> list[Any]:
        """What becomes of names in a process whose cache is at `home`; without a hub, nothing answers."""
        own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9"}
        assert asker.stdin is not None
        assert asker.stdout is not None
        asker.stdin.write(json.dumps([wanted, own | environment, str(home.parent)]) + "\n")
        found = json.loads(asker.stdout.readline())
        assert found is not None, "it raised; its traceback is on stderr"
        return found

    return ask


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path) -> Iterator[SmallHub]:
    model, data = tmp_path / "served" / "model", tmp_path / "served" / "data"
    shutil.copytree(tiny_model, model)
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "onnx").mkdir()
    (model / "onnx" / "config.json").write_text("{}")
    (model / "README.md").write_text("words")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (data / "main").mkdir(parents=True)
    for name in ("train-0", "train-1", "test-0"):
        (data / "main" / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "1"}) + "\n")
    with small_hub() as served:
        served.add("models", MODEL, model)
        served.add("datasets", DATA, data)
        yield served


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", ("Qwen/Qwen2.5-0.5B-Instruct", "", "")),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1", "")),
        ("org/name@v1:main/train-*.parquet", ("org/name", "v1", "main/train-*.parquet")),
        *((text, None) for text in ("name", "/org/name", "a/b/c", "./name/x", "~/models", "package:m.gguf")),
        *((text, None) for text in ("random:org/name", "org/na me", "", "https://host/org/name")),
    ],
)
def test_what_is_a_name(text: str, parts: tuple[str, str, str] | None, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name(text) == (None if parts is None else HubName(*parts))
    (tmp_path / "models").mkdir()
    assert hub_name("models/misspelt") is None, "its folder is here"


def test_a_model_comes_in_two_parts_and_then_from_the_cache(hub: SmallHub, asked: Asked, tmp_path: Path):
    home = tmp_path / "home"
    (folder,) = map(Path, asked(hub, home, ("small", MODEL)))
    small = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    templates = folder / "additional_chat_templates"
    assert {file.name for file in folder.iterdir()} == small | {templates.name}
    assert [file.name for file in templates.iterdir()] == ["tool_use.jinja"]
    assert asked(hub, home, ("weights", MODEL), ("small", f"random:{MODEL}")) == [str(folder), f"random:{folder}"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not (folder / "onnx").exists()
    assert not (folder / "README.md").exists()
    before = len(hub.asked)
    assert asked(hub, home, ("small", MODEL), ("weights", MODEL)) == [str(folder)] * 2
    assert len(hub.asked) == before, "the cache has all of it"
    assert asked(None, home, ("weights", MODEL), HF_HUB_OFFLINE="1") == [str(folder)]


def test_a_branch_that_moves_stays_where_the_cache_has_it(hub: SmallHub, asked: Asked, tmp_path: Path):
    home = tmp_path / "home"
    (before,) = asked(hub, home, ("weights", MODEL))
    (hub.folders["models", MODEL] / "model.safetensors").write_bytes(b"newer")
    assert asked(hub, home, ("weights", MODEL)) == [before]
    commit = hub.commit("models", MODEL)
    (after,) = asked(hub, home, ("weights", f"{MODEL}@{commit}"))
    assert after != before
    assert (Path(str(after)) / "model.safetensors").read_bytes() == b"newer"


def test_files_of_a_data_set(hub: SmallHub, asked: Asked, tmp_path: Path):
    home = tmp_path / "home"
    names = ("main/train-*.jsonl", "main/test-0.jsonl", "train*", "")
    several, one, none, unnamed = asked(hub, home, *(("data", f"{DATA}:{n}" if n else DATA) for n in names))
    assert [Path(path).name for path in several] == ["train-0.jsonl", "train-1.jsonl"]
    assert [Path(path).name for path in one] == ["test-0.jsonl"]
    assert none == {"refused": f"data.train_files: no file of the data set {DATA} fits train*"}
    assert unnamed["refused"].endswith(f"files must be named, as in {DATA}:train*.parquet")
    again = asked(None, home, ("data", f"{DATA}:main/train-*.jsonl"))
    assert again == [several]
    assert asked(None, home, ("sources", f"{DATA}:main/train-*.jsonl")) == [[DATA] * 2]


def test_what_cannot_be_had(hub: SmallHub, asked: Asked, tmp_path: Path):
    home = tmp_path / "home"
    hub.add("models", "org/closed", hub.folders["models", MODEL])
    hub.gated.add("org/closed")
    models = ("org/missing", "org/closed", f"{MODEL}@v9", f"{MODEL}:no.gguf")
    wanted = [*(("small", name) for name in models), ("data", "org/missing:train.jsonl")]
    missing, closed, revision, file, data = asked(hub, home, *wanted)
    for found, name, why in (
        (missing, "org/missing", "Repository Not Found"),
        (closed, "org/closed", "Cannot access gated repo"),
        (revision, f"{MODEL}@v9", "Revision Not Found"),
    ):
        assert found["refused"].startswith(f"model.path: there is no {name} on this machine, and the cache of the")
        assert why in found["refused"]
    assert file == {"refused": f"model.path: the model {MODEL} of the Hugging Face Hub has no file no.gguf"}
    assert "as a dataset of the Hub it cannot be had: " in data["refused"]
    before = time.monotonic()
    unreachable, no_file = asked(None, home, *(("small", name) for name in ("org/other", f"{MODEL}:no.gguf")))
    assert time.monotonic() - before < 15, "a download tries again for half a minute"
    for found in (unreachable, no_file):
        assert "as a model of the Hub it cannot be had: [Errno 111] Connection refused" in found["refused"]
