"""Which parts a model's weights are cut into, and what has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxrl.kernels.invariant import Cut
from jaxrl.models.numerics import in_tiles, refuse_invariant
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

from .conftest import tiny_config


def test_cuts_are_those_of_a_layout():
    model = tiny_config(num_heads=8, num_kv_heads=2)
    layout = Layout(make_mesh(jax.devices()[:8]), 4)
    tiles = in_tiles(model, 8, layout.mesh, PartitionSpec(layout.dp_axes), layout)
    both, one = ("x0", "x1"), ("x0",)
    wanted = {
        **{"q": Cut(1, both, True), "k": Cut(1, one, True), "v": Cut(1, one, True), "o": Cut(0, both, True)},
        **{"gate": Cut(1, both, True), "up": Cut(1, both, True), "down": Cut(0, both, True)},
        "embed": Cut(0, both, True),
    }
    assert {name: cut for name, cut in tiles.cuts if name in wanted} == wanted
    assert {name for name, _ in tiles.cuts} <= {*wanted, "q_bias", "k_bias", "v_bias", "lm_head"}
    assert (tiles.parts, tiles.axes, tiles.own_parts) == ((2, 2, 2), both, 2)
    alone = in_tiles(model, 8)
    assert (alone.axes, alone.own_parts) == ((), 8)
    assert {name: cut.dim for name, cut in alone.cuts} == {name: cut.dim for name, cut in tiles.cuts}


def test_what_invariant_numbers_are_refused_for():
    def model(**own: Any) -> Any:
        return SimpleNamespace(**({"num_experts": 0, "lora": None} | own))

    refuse_invariant(model(), "cpu", 8)
    refuse_invariant(model(num_experts=4), "cpu", 2)
    refuse_invariant(model(num_experts=4, lora=object()), "gpu", 4)
    for args, what in (
        ((model(), "tpu", 1), "devices of the kind tpu: it is built for CPUs and NVIDIA's GPUs"),
        ((model(num_experts=4), "cpu", 8), r"a mixture of 4 experts per layer: actor.numerics_tp \(8\) must divide"),
    ):
        with pytest.raises(ValueError, match=rf"^actor.numerics \(invariant\) must be fast for {what}"):
            refuse_invariant(*args)
