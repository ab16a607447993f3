"""Arrays go to a half of the mesh and come back, bit for bit, and the other half runs no program for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from live_arrays import bytes_on
from uneven_models import normal_params, placed, uneven

from jaxrl.sharding.layout import Layout, tp_degrees
from jaxrl.sharding.mesh import make_mesh, submeshes
from jaxrl.sharding.rules import rollout_shardings, to_rollout, train_shardings
from jaxrl.sharding.split_mesh import Half, submesh_arrays

MODEL = uneven(4, 2, "qwen2", vocab_size=72, hidden_size=32, intermediate_size=48)  # heads over four of eight devices


def mesh_of(count: int) -> Mesh:
    return make_mesh(jax.devices()[:count])


@pytest.mark.parametrize(("count", "index"), [(2, 1), (8, 0)])
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


# ---------------------------------------------------------------- shards under other labels


def buffers(tree) -> dict[tuple[str, int], int]:
    """The address of each leaf's shard on each device."""
    return {
        (jax.tree_util.keystr(path), shard.device.id): shard.data.unsafe_buffer_pointer()
        for path, array in jax.tree_util.tree_leaves_with_path(tree)
        for shard in array.addressable_shards
    }


@pytest.mark.parametrize(("num_workers", "tied"), [(2, True), (8, False)])
def test_each_worker_has_its_shards_of_one_program(num_workers, tied):
    config, mesh = uneven(tie_word_embeddings=tied), make_mesh()
    params = placed(normal_params(config, np.float32), config, mesh)
    parts = submeshes(mesh, num_workers)
    for tp in tp_degrees(parts[0]):
        whole = to_rollout(params, config, Layout(mesh, tp), jnp.float32)
        before, values = buffers(whole), jax.tree.map(np.asarray, whole)
        mine = [submesh_arrays(whole, rollout_shardings(config, Layout(part, tp))) for part in parts]
        together: dict[tuple[str, int], int] = {}
        for part, own in zip(parts, mine, strict=True):
            shardings = rollout_shardings(config, Layout(part, tp))
            for array, sharding, value in zip(*map(jax.tree.leaves, (own, shardings, values)), strict=True):
                assert array.sharding == sharding
                np.testing.assert_array_equal(array, value)
            together |= buffers(own)
        assert together == before, "no copy, and nothing left out"
        # the whole is dropped; a worker that deletes its own leaves the others as they are
        del whole
        if num_workers > 1:
            for array in jax.tree.leaves(mine[0]):
                array.delete()
            assert all(array.is_deleted() for array in jax.tree.leaves(mine[0]))
        for array, value in zip(jax.tree.leaves(mine[-1]), jax.tree.leaves(values), strict=True):
            np.testing.assert_array_equal(array, value)
    assert not any(array.is_deleted() for array in jax.tree.leaves(params)), "the trainer keeps its own"


def test_what_would_have_to_move_is_refused():
    mesh = make_mesh()
    left, right = submeshes(mesh, 2)
    array = jax.device_put(np.arange(8.0), Layout(mesh, 2).sharding("tp"))
    with pytest.raises(ValueError, match=r"submesh_arrays: \['w'\] would have to move: device 0 does not hold"):
        submesh_arrays({"w": array}, {"w": Layout(left, 4).sharding("tp")})
    there = jax.device_put(np.arange(8.0), NamedSharding(left, P()))
    with pytest.raises(ValueError, match=r"submesh_arrays: the array would have to move: device 4 does not hold"):
        submesh_arrays(there, NamedSharding(right, P()))
