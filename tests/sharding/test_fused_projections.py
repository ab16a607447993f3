"""Merged rollout weights: the same numbers as the separate ones, on every layout, and where they cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from uneven_models import normal_params, placed, uneven

from jaxrl.sharding import rules
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.reshard import reshard

MODELS = [  # 9/3 is padded to 12/4
    uneven(*heads, num_layers=2) for heads in ((12, 4, "qwen2"), (9, 3, "llama"), (8, 4, "qwen3"))
]
CASES = [pytest.param(config, tp, id=config.family) for config, tp in zip(MODELS, (1, 2, 4), strict=True)]


def converted(config, layout, **form):
    params = placed(normal_params(config, jnp.float64), config, layout.mesh)
    return rules.to_rollout(params, config, layout, jnp.float64, max_tp=4, layers_per_call=2, **form)


@pytest.mark.parametrize(("config", "tp"), CASES)
def test_merged_weights_hold_the_separate_ones(config, tp, x64):
    layout = Layout(make_mesh(jax.devices()[:4]), tp)
    separate, fused = converted(config, layout), converted(config, layout, fused_projections=True)
    for one, both in zip(separate["layers"], fused["layers"], strict=True):
        # the fused arrays are split over tp, in whole groups
        assert both["qkv"].sharding.is_equivalent_to(layout.sharding(None, layout.tp_axes), 4)
        assert both["gate_up"].sharding.is_equivalent_to(layout.sharding(None, None, "tp"), 3)
        slabs = [(both.pop("qkv"), ["q", "k", "v"])]
        if config.qkv_bias:
            slabs.append((both.pop("qkv_bias"), ["q_bias", "k_bias", "v_bias"]))
        for slab, names in slabs:
            q = slab[..., :-2, :]
            both |= dict(zip(names, (q.reshape(one[names[0]].shape), slab[..., -2, :], slab[..., -1, :]), strict=True))
        gate_up = both.pop("gate_up")
        both |= {"gate": gate_up[:, 0], "up": gate_up[:, 1]}
        assert both.keys() == one.keys()
        for name in one:
            np.testing.assert_array_equal(both[name], one[name])


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])
def test_they_move_between_layouts(before, after, x64):
    config, mesh = MODELS[1], make_mesh(jax.devices()[:4])
    fresh = {tp: converted(config, Layout(mesh, tp), fused_projections=True) for tp in (before, after)}
    target = rules.rollout_shardings(config, Layout(mesh, after), 4, fused_projections=True)
    moved = reshard(fresh[before], target, keep=True)
    jax.tree.map(np.testing.assert_array_equal, moved, fresh[after])
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), moved, fresh[after]))


def test_where_they_cannot_be_merged():
    """14/2 heads at tp 4 are 16/2: two shards share a key/value head."""
    layout = Layout(make_mesh(jax.devices()[:4]), 4)
    for config, form in ((uneven(14, 2, "llama"), {}), (MODELS[0], {"features_first": True})):
        with pytest.raises(ValueError, match="rollout weights with fused projections must have features last, and"):
            rules.rollout_shardings(config, layout, 4, fused_projections=True, **form)
    specs = rules.rollout_shardings(MODELS[0], layout, 4, fused_projections=True)["layers"][0]
    assert specs["qkv_bias"].spec == P(layout.tp_axes)
