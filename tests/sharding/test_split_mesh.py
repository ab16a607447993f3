"""Arrays go to a half of the mesh and come back, bit for bit, and the other half runs no program for it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from live_arrays import bytes_on
from uneven_models import normal_params, placed, uneven

from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.sharding.split_mesh import Half

MODEL = uneven(4, 2, "qwen2", vocab_size=72, hidden_size=32, intermediate_size=48)  # heads over four of eight devices


def mesh_of(count: int) -> Mesh:
    return make_mesh(jax.devices()[:count])


@pytest.mark.parametrize(("count", "index"), [(2, 1), (4, 0), (8, 0), (8, 1)])
def test_weights_go_to_a_half_and_come_back(count: int, index: int):
    half = Half(mesh_of(count), index)
    here, there = train_shardings(MODEL, half.whole), train_shardings(MODEL, half.mesh, half.whole)
    params = placed(normal_params(MODEL, "float32"), MODEL, half.whole)
    before = jax.tree.map(np.asarray, params)
    lent = half.lend(params, there)
    assert half.mesh.devices.ravel().tolist() == half.whole.devices.ravel().tolist()[index * count // 2 :][: count // 2]
    for array, sharding in zip(jax.tree.leaves(lent), jax.tree.leaves(there), strict=True):
        assert array.sharding == sharding
    jax.tree.map(np.testing.assert_array_equal, lent, before)
    # what was lent is a copy, what was given back takes the place of what came
    for array in jax.tree.leaves(params):
        array.delete()
    jax.tree.map(np.testing.assert_array_equal, lent, before)
    returned = half.give_back(lent, here)
    assert all(array.is_deleted() for array in jax.tree.leaves(lent))
    for array, sharding in zip(jax.tree.leaves(returned), jax.tree.leaves(here), strict=True):
        assert array.sharding == sharding
    jax.tree.map(np.testing.assert_array_equal, returned, before)


def test_scalars_and_arrays_that_nothing_splits():
    half = Half(mesh_of(8), 1)
    whole, own = (NamedSharding(mesh, PartitionSpec()) for mesh in (half.whole, half.mesh))
    lent = half.lend({"a": jax.device_put(np.float32(3.5), whole)}, {"a": own})
    assert float(lent["a"]) == 3.5
    assert float(half.give_back(lent, {"a": whole})["a"]) == 3.5


def test_the_other_half_holds_nothing_more():
    half = Half(mesh_of(8), 0)
    here, there = train_shardings(MODEL, half.whole), train_shardings(MODEL, half.mesh, half.whole)
    params = placed(normal_params(MODEL, "float32"), MODEL, half.whole)
    other, own = half.other.devices.ravel().tolist(), half.mesh.devices.ravel().tolist()
    before = bytes_on(other), bytes_on(own)
    lent = half.lend(params, there)
    size = sum(s.data.nbytes for x in jax.tree.leaves(lent) for s in x.addressable_shards)
    assert (bytes_on(other), bytes_on(own)) == (before[0], before[1] + size)
    returned = half.give_back(lent, here)
    size = sum(s.data.nbytes for x in jax.tree.leaves(returned) for s in x.addressable_shards)
    assert (bytes_on(other), bytes_on(own)) == (before[0] + size // 2, before[1] + size // 2)


@pytest.mark.parametrize("count", [1, 3, 6, 12])
def test_a_mesh_without_halves(count: int):
    if count > len(jax.devices()):
        mesh = Mesh(np.asarray(jax.devices()[:6]).reshape(3, 2), ("x1", "x0"))
    else:
        mesh = mesh_of(count)
    with pytest.raises(ValueError, match=r"has no halves that are meshes like it: 2\^k devices have"):
        Half(mesh, 0)


def test_what_shards_do_not_make_up():
    half = Half(mesh_of(8), 0)
    values = np.arange(64.0).reshape(8, 8)
    for spec, wanted in (
        (PartitionSpec(("x2", "x1")), PartitionSpec("x1")),  # the major axis first: its parts lie apart
        (PartitionSpec(("x0", "x2")), PartitionSpec("x1")),
        (PartitionSpec("x0", "x2"), PartitionSpec("x0", "x1")),
    ):
        array = jax.device_put(values, NamedSharding(half.whole, spec))
        with pytest.raises(ValueError, match="must be the last that splits a dim, and all else the same"):
            half.lend([array], [NamedSharding(half.mesh, wanted)])
    array = jax.device_put(values, NamedSharding(half.whole, PartitionSpec("x0", "x2")))
    (lent,) = half.lend([array], [NamedSharding(half.mesh, PartitionSpec("x0", None))])
    np.testing.assert_array_equal(lent, values)
