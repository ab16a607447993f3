"""Model folders that are whole but for one thing, each as a function that prepares it in the folder of a test."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from tiny import CONFIG, write_tiny_model

from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.safetensors import export_hf

INDEX = "model.safetensors.index.json"
UP, EMBED = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
Prepare = Callable[[Path], object]


@functools.cache
def files(max_file_bytes: int = 10**9, tied: bool = True) -> dict[str, bytes]:
    """A tiny model with weights, as the contents of its files."""
    config = ModelConfig.from_hf(CONFIG | {"tie_word_embeddings": tied})
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_model(name)
        params = decoder.init(config, jax.random.key(0))
        export_hf(params, config, folder, dtype=jnp.float32, max_file_bytes=max_file_bytes)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def model(folder: Path, **options: Any) -> Path:
    (folder / "m").mkdir()
    for name, content in files(**options).items():
        (folder / "m" / name).write_bytes(content)
    return folder / "m"


def config(**changes: Any) -> Prepare:
    """A model whose config.json has other values; `gone` takes keys away."""

    def prepare(folder: Path) -> None:
        gone = changes.get("gone", ())
        values = {key: value for key, value in (CONFIG | changes).items() if key != "gone" and key not in gone}
        (model(folder) / "config.json").write_text(json.dumps(values))

    return prepare


def text(name: str, content: str | bytes) -> Prepare:
    """A model of which one file has another content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (model(folder) / name).write_bytes(data)


def header(change: Callable[[dict[str, Any]], object]) -> Prepare:
    """A model whose safetensors header is changed, its tensors left."""

    def prepare(folder: Path) -> None:
        file = model(folder) / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        new = json.dumps(entries).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])

    return prepare


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Prepare:
    """A model whose tensors are changed, by name."""

    def prepare(folder: Path) -> None:
        file = model(folder) / "model.safetensors"
        entries = load_file(file)
        change(entries)
        save_file(entries, file)

    return prepare


def entry(name: str = UP, **changes: Any) -> Prepare:
    """A model of which one tensor's entry in the header has other values."""
    return header(lambda entries: entries[name].update(changes))


def weights(change: Callable[[bytes], bytes]) -> Prepare:
    def prepare(folder: Path) -> None:
        file = model(folder) / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return prepare


def index(change: Callable[[dict[str, Any]], Any]) -> Prepare:
    """A model in several files, whose index is changed; the change may return another content."""

    def prepare(folder: Path) -> None:
        file = model(folder, max_file_bytes=20_000) / INDEX
        content = json.loads(file.read_text())
        file.write_text(json.dumps(change(content) or content))

    return prepare


def placed(file: Any) -> Prepare:
    return index(lambda content: content["weight_map"].update({UP: file}))


def untied(folder: Path) -> None:
    """Weights with a head of their own, under a config that says there is none."""
    target = model(folder, tied=False)
    target.joinpath("config.json").write_text(json.dumps(CONFIG))


def pipe(name: str) -> Prepare:
    """A pipe that is never written to: reading it would hang."""

    def prepare(folder: Path) -> None:
        target = model(folder) / name
        target.unlink()
        os.mkfifo(target)

    return prepare
