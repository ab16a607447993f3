"""A compilation cache that cannot be written stops no run, unless its folder was asked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from jaxrl.config import Config, from_mapping
from jaxrl.runtime.cache_folder import with_cache_folder


def configured(**trainer: str) -> Config:
    return from_mapping({"model": {"path": "m"}, "trainer": trainer})


def test_the_default_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        found = with_cache_folder(configured())
    assert found == configured(compilation_cache_dir="")
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"trainer.compilation_cache_dir: {tmp_path}/file/.cache/jaxrl/xla cannot be made"
    )
    with pytest.raises(ValueError, match=r"^trainer\.compilation_cache_dir: .* is not a folder$"):
        with_cache_folder(configured(compilation_cache_dir=str(tmp_path / "file" / "xla")))


def test_nothing_is_changed_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    for config in (configured(), configured(compilation_cache_dir=""), configured(compilation_cache_dir=str(tmp_path))):
        assert with_cache_folder(config) is config
    assert not caplog.records
    assert list(tmp_path.iterdir()) == [], "a look writes nothing"
