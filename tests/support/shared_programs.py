"""Programs that the tests of one process share: what one run has compiled, a later one with the same options runs.

jax keeps on disk what its compiler made, but every run traces and lowers its programs anew, which takes a CPU as long
as compiling them. Here a program is known by all that decides what it is. So a test that changes code which is traced
must have shapes or options of its own.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax

from jaxrl.rollout.layout_programs import LayoutPrograms
from jaxrl.sharding.compiled import _CARRIED, CompiledPrograms
from jaxrl.training.programs import TrainPrograms

MOST = 400  # the oldest go: each holds some megabytes
MOST_MAPS = 30_000
"""Mappings of a process. Linux allows 65,530: LLVM has some for each program, and beyond them it takes the process with
it."""

_known: dict[Any, Any] = {}


def key_of(programs: CompiledPrograms, shape: Any) -> Any:
    """All that decides a program; None: it is not shared."""
    settings = tuple(str(getattr(jax.config, f"jax_{name}")) for name in _CARRIED)
    if isinstance(programs, LayoutPrograms):
        return settings, programs.model, programs.layout, programs.config, shape
    if isinstance(programs, TrainPrograms):
        config = programs.config
        made_with = *programs.made_with.values(), programs.total_updates if shape[0] == "update" else 0
        read = repr((config.actor, config.critic, config.algorithm, config.rollout.temperature))
        placed = tuple(jax.tree.leaves(programs.shardings))  # on a part of a larger mesh as on all of it
        return settings, read, programs.model_config, programs.mesh, placed, *made_with, shape
    return None


def share() -> None:
    alone = CompiledPrograms.compile

    def compile(programs: CompiledPrograms, shape: Any) -> Any:
        key = key_of(programs, shape)
        if key is None:
            return alone(programs, shape)
        found = _known.get(key)
        if found is None:
            found = _known[key] = alone(programs, shape)
            if len(_known) > MOST:
                del _known[next(iter(_known))]
        return found

    CompiledPrograms.compile = compile


def make_room(most: int = MOST_MAPS) -> None:
    """Forgets all programs, these and jax's own, where the process has more mappings than `most`."""
    if num_maps() > most:
        _known.clear()
        jax.clear_caches()
        gc.collect()


def num_maps() -> int:
    """Mappings of this process; 0 where the system does not say."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0
