"""Moving trees between shardings: values, aliases, memory, what is compiled, and what is refused."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from live_arrays import Watched, live_bytes
from uneven_models import normal_params, placed, uneven

from jaxrl.sharding import reshard as module
from jaxrl.sharding import rules
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.reshard import gathers, precompile, reshard

DEGREES = (1, 2, 4, 8)
PAIRS = list(itertools.permutations(DEGREES, 2))


def train_params(config, mesh, dtype):
    return placed(normal_params(config, dtype), config, mesh)


def on(mesh, tp, *words, dtype=jnp.float32, shape=(16, 32)):
    array = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    return jax.device_put(array, Layout(mesh, tp).sharding(*words))


def equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_every_pair_of_layouts_equals_a_fresh_conversion(x64):
    config, mesh, dtype, features_first = uneven(), make_mesh(), "float64", True
    params = train_params(config, mesh, dtype)
    fresh = {
        tp: rules.to_rollout(params, config, Layout(mesh, tp), dtype, 8, features_first=features_first)
        for tp in DEGREES
    }
    for before, after in PAIRS:
        target = rules.rollout_shardings(config, Layout(mesh, after), 8, features_first=features_first)
        equal(reshard(fresh[before], target, max_extra_bytes=64 << 10, keep=True), fresh[after])


def test_the_source_is_gone_except_for_what_was_there_already():
    config, mesh = uneven(), make_mesh()
    params = rules.to_rollout(train_params(config, mesh, jnp.float32), config, Layout(mesh, 8), jnp.float32)
    moved = reshard(params, rules.rollout_shardings(config, Layout(mesh, 2), 8))
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
        assert before.is_deleted() == (before is not after)
    in_place = [a is b for a, b in zip(*map(jax.tree.leaves, (params, moved)), strict=True)]
    assert 2 * config.num_layers + 1 <= sum(in_place) < len(in_place)  # norms
    equal(moved, rules.to_rollout(train_params(config, mesh, jnp.float32), config, Layout(mesh, 2), jnp.float32, 8))


def test_what_is_there_survives_a_move_of_its_alias():
    """`device_put` to an equivalent sharding shares buffers, and deleting one array of them kills both."""
    mesh = make_mesh()
    here, there = Layout(mesh, 8).sharding("tp"), Layout(mesh, 8).sharding(None, "tp")
    array = on(mesh, 8, "tp")
    alias = jax.device_put(array, NamedSharding(mesh, P(("x0", "x1", "x2"), None)))
    a, b = reshard((array, alias), here)
    assert a is array
    assert b is alias
    np.testing.assert_array_equal(a, b)
    # named twice, moved once, deleted once
    tree = {"embed": array, "head": array}
    moved = reshard(tree, there)
    assert moved["embed"] is moved["head"]
    assert array.is_deleted()
    with pytest.raises(ValueError, match=r"\['b'\] stands twice in the tree, with the targets .*one place only"):
        reshard({"a": moved["head"], "b": moved["head"]}, {"a": here, "b": there})


def test_precompiling_from_shapes_leaves_nothing_to_compile():
    mesh = make_mesh()
    spec = Layout(mesh, 8).sharding("tp", None)
    tree = {"w": on(mesh, 8, "tp", shape=(16, 48)), "b": on(mesh, 8, "tp", shape=(8,))}
    target = {"w": Layout(mesh, 4).sharding(None, "tp"), "b": Layout(mesh, 2).sharding("tp")}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    precompile(abstract, target)
    misses = module.program_of.cache_info().misses
    moved = reshard(tree, target)
    assert module.program_of.cache_info().misses == misses
    assert moved["w"].sharding.is_equivalent_to(target["w"], 2)
    assert spec != target["w"]


@pytest.mark.parametrize(("before", "after"), [(1, 8), (4, 1)])
def test_memory_stays_within_the_bound(before, after, monkeypatch):
    """Live buffers are counted when each chunk has been dispatched and nothing of it deleted yet: the worst moment."""
    mesh = make_mesh()
    tree = [
        {"in": on(mesh, before, None, "tp", shape=(64, 128)), "out": on(mesh, before, "tp", None, shape=(64, 128))}
        for _ in range(6)
    ]
    target = [{"in": Layout(mesh, after).sharding(None, "tp"), "out": Layout(mesh, after).sharding("tp")}] * 6
    jax.block_until_ready(tree)
    size = 64 * 128 * 4
    bound = 3 * size // after + (3 * size // before if after < before else 0) + 64
    start, watched = live_bytes(), Watched(module.program_of)
    monkeypatch.setattr(module, "program_of", watched)
    moved = reshard(tree, target, max_extra_bytes=bound)
    end = live_bytes()
    extra = max(now[d] - max(start[d], end[d]) for now in watched.seen for d in now)
    assert len(watched.seen) > 2
    assert extra + max(watched.temporaries) <= bound
    assert end[0] - start[0] == 12 * size // after - 12 * size // before
    np.testing.assert_array_equal(moved[5]["in"], np.arange(64 * 128).reshape(64, 128))


@pytest.mark.parametrize(("before", "after"), [(1, 8), (2, 4), (8, 2)])
def test_compiled_programs(before, after):
    """Slices only when tp grows; one all-gather per array when it falls; nothing else."""
    mesh = make_mesh()
    source, target = Layout(mesh, before).sharding(None, "tp"), Layout(mesh, after).sharding(None, "tp")
    types = ((16, 32), jnp.dtype(jnp.float32))
    text = module.program_of((types,) * 2, (source,) * 2, (target,) * 2).as_text()
    found = re.findall(r"= .*?(all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text)
    assert set(found) == (set() if after > before else {"all-gather"})
    assert len(found) <= 2


def test_what_gathers():
    mesh = make_mesh()

    def between(before, after, *words):
        return gathers((16, 32), Layout(mesh, before).sharding("tp"), Layout(mesh, after).sharding(*words))

    assert [between(1, 8, "tp"), between(2, 4, "tp"), between(8, 1, "tp"), between(4, 2, "tp")] == [0, 0, 1, 1]
    assert between(8, 8, None, "tp"), "another dim"


# ---------------------------------------------------------------- other devices


def halves():
    return make_mesh(jax.devices()[:4]), make_mesh(jax.devices()[4:8])


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 2)])
def test_disjoint_devices(before, after):
    """The same spec across, the rest on arrival, and nothing through the host."""
    left, right = halves()
    array = on(left, before, None, "tp")
    moved = reshard([array], Layout(right, after).sharding(None, "tp"), keep=True)
    assert array._npy_value is None, "a host copy was made"
    assert moved[0].sharding.is_equivalent_to(Layout(right, after).sharding(None, "tp"), 2)
    np.testing.assert_array_equal(moved[0], np.arange(512).reshape(16, 32))
    back = reshard(moved, Layout(left, before).sharding(None, "tp"))
    assert moved[0].is_deleted()
    np.testing.assert_array_equal(back[0], array)


# ---------------------------------------------------------------- refusals


def test_sets_that_overlap_are_refused():
    array = on(make_mesh(), 8, "tp")
    with pytest.raises(ValueError, match=r"\[0\] is on 8 devices and its target on 4, of which 4 are the same: no pro"):
        reshard([array], Layout(halves()[0], 4).sharding("tp"))
    turned = make_mesh(jax.devices()[::-1])
    with pytest.raises(ValueError, match=r"the target's devices in another order: use one mesh for both"):
        reshard(array, Layout(turned, 4).sharding("tp"))
    assert not array.is_deleted()
