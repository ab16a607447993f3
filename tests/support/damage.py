"""Checkpoints of a tiny state, and damage done to their files."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxrl.training.checkpoint import Checkpointer

ABSTRACT = {"params": {"a": jax.ShapeDtypeStruct((40,), np.float64)}, "count": jax.ShapeDtypeStruct((), np.int32)}


def state_at(step: int) -> tuple[dict, dict]:
    """What a run of these tests has at a step; every byte counts, so that no compression hides one."""
    rng = np.random.default_rng(step)
    state = {"params": {"a": rng.random(40)}, "count": np.asarray(step, np.int32)}
    return state, {"step": step, "queue": rng.integers(0, 1 << 40, 30)}


@functools.cache
def _saved(steps: tuple[int, ...]) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    with Checkpointer(folder.name, max_to_keep=None) as checkpoints:
        for step in steps:
            checkpoints.save(step, *state_at(step))
    return folder


def saved(folder: Path, *steps: int) -> Path:
    """Makes `folder` a folder of checkpoints of `steps`."""
    shutil.copytree(_saved(steps).name, folder)
    return folder


def assert_restores(folder: Path, step: int) -> None:
    """The newest whole checkpoint is `step`, and it holds what was saved."""
    expected, host = state_at(step)
    with Checkpointer(folder) as checkpoints:
        assert checkpoints.latest_step() == step
        found, found_host = checkpoints.restore(ABSTRACT)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.tobytes() == np.asarray(y).tobytes(), expected, found))
    assert found_host["step"] == host["step"]
    assert found_host["queue"].tobytes() == host["queue"].tobytes()


def files_of(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def flip(file: Path, at: int = 0, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[at % len(content)] ^= 1 << bit
    file.write_bytes(content)


def cut(file: Path, size: int = 0) -> None:
    file.write_bytes(file.read_bytes()[:size])


def harm(step: Path, moments: random.Random) -> str:
    """One random flip or cut somewhere in a step's files; says what was done."""
    file = moments.choice(files_of(step))
    return f"{file.relative_to(step)}: {harm_file(file, moments)}"


def harm_file(file: Path, moments: random.Random) -> str:
    """One random flip or cut; says what was done."""
    size = file.stat().st_size
    if moments.random() < 0.3:
        kept = moments.randrange(size)
        cut(file, kept)
        return f"{kept} of {size} bytes kept"
    at, bit = moments.randrange(size), moments.randrange(8)
    flip(file, at, bit)
    return f"bit {bit} of byte {at} of {size}"
