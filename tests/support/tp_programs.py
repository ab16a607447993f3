"""Compiles every program of a rollout for H100s and prints them, where the CUDA plugin is (`for_gpu.ask_for_gpu`).

Arguments: SHAPE TP KIND..., with kinds `prefill`, `decode`, `verify`, `switch`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
from gpu import compiled

from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.models.shapes import named_shape
from jaxrl.rollout.layout_programs import ExecutorConfig, LayoutPrograms
from jaxrl.sharding import kv_migration, reshard
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh


def main(arguments: Sequence[str]) -> int:
    """For `tp` devices: the kernels of each program by name; of a switch how many programs move weights and KV, from
    tp 1 and back to it."""
    shape, tp, kinds = arguments[0], int(arguments[1]), arguments[2:]
    config, mesh = dataclasses.replace(named_shape(shape), num_layers=1), make_mesh(compiled.devices(tp))
    sizes = ExecutorConfig(64, dtype="bfloat16", max_tp=tp, proposer=Drafting(8, 8192, 256))
    programs, one = (LayoutPrograms(config, Layout(mesh, degree), sizes) for degree in (tp, 1))
    told: dict[str, Any] = {}
    for kind in kinds:
        if kind == "switch":
            told[kind] = [*programs_of_switch(one, programs), *programs_of_switch(programs, one)]
            continue
        largest = next(each for each in reversed(programs.shapes()) if each[0] == kind)
        with compiled.as_default_device():
            lowered = programs.lower(*largest)
        told[kind] = compiled.compile_program(lowered, programs.compiler_options(kind)).kernels
    print(json.dumps(told))
    return 0


def programs_of_switch(before: LayoutPrograms, after: LayoutPrograms) -> tuple[int, int]:
    target = jax.tree.map(lambda x: x.sharding, after.abstract_params())
    with mock.patch.object(reshard, "_default_kind", return_value=None):  # compile-only devices know no such kinds
        weights = reshard.precompile(before.abstract_params(), target)
    blocks = after.cache_shape.num_blocks
    pool = kv_migration.precompile(before.layout, after.layout, before.abstract_pool(), blocks, [(64, 0)])
    return len(weights), len(pool)
