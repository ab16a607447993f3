"""configs/algorithms: one file per published method, each with the settings that make it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxrl.config.files import load
from jaxrl.train.losses import METHODS

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "algorithms"


def test_every_method_has_a_file_and_every_file_a_method():
    assert sorted(method.example for method in METHODS.values()) == sorted(file.stem for file in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", METHODS)
def test_a_file_has_its_methods_settings(name: str):
    method = METHODS[name]
    config = dataclasses.asdict(load(FOLDER / f"{method.example}.yaml", []))
    for option, value in method.settings.items():
        found = config
        for part in option.split("."):
            found = found[part]
        assert found == value, option


@pytest.mark.parametrize("name", METHODS)
def test_a_header_says_how_to_run_it_and_what_was_seen(name: str):
    file = FOLDER / f"{METHODS[name].example}.yaml"
    header = file.read_text(encoding="utf-8").partition("model:")[0]
    assert f"# Command: jaxrl train --config configs/algorithms/{file.name}" in header
    for part in ("Hardware: ", "Date: ", "# Seen"):
        assert part in header
