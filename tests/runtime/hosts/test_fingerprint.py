"""What a process was given, as texts: each thing that differs changes its own fact, and no other."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny import write_tiny_model

from jaxrl.config import Config, from_mapping
from jaxrl.runtime.hosts.fingerprint import (
    NUM_SAMPLES,
    WHOLE_BYTES,
    _flags,
    _hash,
    _sampled_hash,
    differences,
    fingerprint,
)


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A configuration that names files of each kind."""
    write_tiny_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    (tmp_path / "more.jsonl").write_text('{"question": "b", "answer": "2"}\n')
    (tmp_path / "reward.py").write_text("def compute_score(*given): return 1.0\n")
    (tmp_path / "domain.py").write_text("def compute_score(*given): return 2.0\n")
    return {
        "model": {"path": f"{tmp_path}/model", "random_init": True},
        "data": {"train_files": [f"{tmp_path}/train.jsonl", f"{tmp_path}/more.jsonl"]},
        "reward": {
            "kind": "custom",
            "path": f"{tmp_path}/reward.py",
            "domains": {"maths": {"kind": "custom", "path": f"{tmp_path}/domain.py"}},
        },
        "trainer": {"run_dir": f"{tmp_path}/run", "compilation_cache_dir": f"{tmp_path}/cache"},
        "hosts": {"num": 2, "coordinator": "somewhere:1234"},
    }


def facts(values: dict[str, Any]) -> dict[str, str]:
    return fingerprint(from_mapping(values), jax.local_devices()[:2])


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return list(differences(before, after))


@pytest.mark.parametrize(
    ("section", "option", "value", "name"),
    [
        ("rollout", "temperature", 0.5, "the option rollout.temperature"),
        ("trainer", "seed", 3, "the option trainer.seed"),
        ("hosts", "devices_per_host", 2, "the option hosts.devices_per_host"),
        ("reward", "name", "another", "the option reward.name"),
    ],
)
def test_an_option(values, section: str, option: str, value: Any, name: str):
    before = facts(values)
    values.setdefault(section, {})[option] = value
    assert changed(before, facts(values)) == [name]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train.jsonl", "the content of data.train_files[0]"),
        ("more.jsonl", "the content of data.train_files[1]"),
        ("reward.py", "the content of reward.path"),
        ("domain.py", "the content of reward.domains.maths.path"),
        ("model/config.json", "the content of model.path/config.json"),
        ("model/tokenizer.json", "the content of model.path/tokenizer.json"),
        ("model/extra.safetensors", "the content of model.path/extra.safetensors"),
    ],
)
def test_a_file(values, tmp_path: Path, file: str, name: str):
    before = facts(values)
    with open(tmp_path / file, "a", encoding="utf-8") as opened:
        opened.write(" ")
    assert changed(before, facts(values)) == [name]


def test_a_file_that_is_not_there(values, tmp_path: Path):
    before = facts(values)
    (tmp_path / "more.jsonl").unlink()
    found = differences(before, facts(values))
    assert list(found) == ["the content of data.train_files[1]"]
    assert found["the content of data.train_files[1]"][1] == "not there"


def test_a_host_s_own_does_not_count(values, tmp_path: Path):
    """The same files elsewhere, another cache, another way to the others, another folder for what XLA dumps."""
    before = facts(values)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("model", "train.jsonl", "more.jsonl", "reward.py", "domain.py"):
        os.rename(tmp_path / name, elsewhere / name)
    (elsewhere / "model" / ".cache").mkdir()
    (elsewhere / "model" / ".cache" / "hidden").write_text("x")

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        return value.replace(str(tmp_path), str(elsewhere)) if isinstance(value, str) else value

    values = moved(values)
    values["hosts"]["coordinator"] = "elsewhere:1"
    assert changed(before, facts(values)) == []


def test_x64(values):
    before = facts(values)
    with jax.enable_x64(True):
        found = differences(before, facts(values))
    assert found == {"the setting jax_enable_x64": ("False", "True")}


@pytest.mark.parametrize(
    ("variable", "value", "same"),
    [
        ("XLA_FLAGS", "{} --xla_cpu_enable_fast_math=true", False),
        ("XLA_FLAGS", "--xla_dump_to=/tmp/mine {}", True),
        ("NCCL_ALGO", "Ring", False),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_x=1", False),
        ("NCCL_SOCKET_IFNAME", "eth0", True),
    ],
)
def test_variables(values, monkeypatch, variable: str, value: str, same: bool):
    before = facts(values)
    monkeypatch.setenv(variable, value.format(os.environ.get(variable, "")))
    assert changed(before, facts(values)) == ([] if same else [f"the variable {variable}"])


@pytest.mark.parametrize(
    ("text", "same"), [("--b=2  --a=1", True), ("--a=1 --b=2 --xla_dump_to=x", True), ("--a=1", False), ("", False)]
)
def test_flags_count_in_any_order(text: str, same: bool):
    assert (_flags(text) == _flags("--a=1 --b=2")) == same


def test_devices(values):
    config = from_mapping(values)
    found = differences(fingerprint(config, jax.local_devices()[:2]), fingerprint(config, jax.local_devices()[:1]))
    assert found == {}, "their number is compared as the world opens"


def test_what_explains_others_comes_first(values):
    names = list(facts(values))
    places = [
        next(i for i, name in enumerate(names) if name.startswith(start))
        for start in ("the version of", "the source of", "the option", "the content of", "the setting", "the kind of")
    ]
    assert places == sorted(places)


def test_every_option_counts_or_is_a_host_s_own(values):
    """But for those of simulated runs."""
    named = {name.removeprefix("the option ") for name in facts(values) if name.startswith("the option ")}
    sections = {field.name for field in dataclasses.fields(Config)} - {"simulate"}
    assert {name.partition(".")[0] for name in named} == sections
    own = ("hosts.coordinator", "hosts.address", "trainer.run_dir", "trainer.compilation_cache_dir")
    assert named.isdisjoint(own)


def test_a_large_file_is_sampled(tmp_path: Path):
    """Its size, its first 8 MiB, its last MiB and ranges between them count; not every byte does."""
    size = WHOLE_BYTES + 12345
    file = tmp_path / "large.safetensors"
    file.write_bytes(b"\0" * size)
    first, whole = _sampled_hash(file), _hash(file)

    step = (size - 9 * 2**20) // NUM_SAMPLES
    for place in (0, 2**23 - 1, 2**23 + step, 2**23 + 63 * step + 100, size - 2**20, size - 1):
        with open(file, "r+b") as opened:
            opened.seek(place)
            opened.write(b"x")
        assert _sampled_hash(file) != first, place
        with open(file, "r+b") as opened:
            opened.seek(place)
            opened.write(b"\0")
    assert (_sampled_hash(file), _hash(file)) == (first, whole)
    os.truncate(file, size - 1)
    assert _sampled_hash(file) != first


def test_a_folder_of_many_files_has_one_fact(values, tmp_path: Path):
    for i in range(70):
        (tmp_path / "model" / f"part-{i}.bin").write_bytes(b"x")
    before = facts(values)
    assert "of 74 files" in before["the content of model.path"]
    (tmp_path / "model" / "part-3.bin").write_bytes(b"y")
    assert changed(before, facts(values)) == ["the content of model.path"]
