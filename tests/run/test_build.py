"""What is said of a GPU's memory and of the compilation cache, with devices that are none."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl.config import Config, ConfigError, from_mapping
from jaxrl.run import build
from jaxrl.run.training import with_cache_folder

CONFIG = from_mapping({"model": {"path": "SmolLM2-135M"}})
VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
CLIENT = SimpleNamespace(platform_version="cuda 13000")
H100 = SimpleNamespace(
    platform="gpu", client=CLIENT, memory_stats=lambda: {"bytes_limit": 60 << 30}, device_kind="H100"
)


def configured(**trainer: str) -> Config:
    return from_mapping({"model": {"path": "m"}, "trainer": trainer})


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch):
    for name in (VARIABLE, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_float8_is_refused_where_a_gpu_has_none(option: str):
    config = from_mapping({"model": {"path": "m"}, "rollout": {option: "fp8"}})
    for capability in ("8.9", None):
        build.refuse_float8(config, SimpleNamespace(compute_capability=capability, device_kind="L4"))
    with pytest.raises(ConfigError, match=rf"^rollout.{option}=fp8: float8 needs a GPU of .* 8.9 or more, and A100"):
        build.refuse_float8(config, SimpleNamespace(compute_capability="8.0", device_kind="A100"))


def test_a_cache_that_cannot_be_written_stops_no_run_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
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
