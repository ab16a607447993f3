"""Weights of several workers: one program over all devices, and each worker's shards made without a copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from uneven_models import normal_params, placed, uneven

from jaxrl.sharding.layout import Layout, tp_degrees
from jaxrl.sharding.mesh import make_mesh, submeshes
from jaxrl.sharding.rules import rollout_shardings, to_rollout
from jaxrl.sharding.split_mesh import submesh_arrays


def buffers(tree) -> dict[tuple[str, int], int]:
    """The address of each leaf's shard on each device."""
    return {
        (jax.tree_util.keystr(path), shard.device.id): shard.data.unsafe_buffer_pointer()
        for path, array in jax.tree_util.tree_leaves_with_path(tree)
        for shard in array.addressable_shards
    }


@pytest.mark.parametrize(("num_workers", "tied"), [(1, False), (2, True), (4, False), (8, True)])
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


def test_an_array_that_stands_twice_is_made_once():
    mesh = make_mesh()
    part = submeshes(mesh, 2)[1]
    array = jax.device_put(np.arange(8.0), Layout(mesh, 2).sharding("tp"))
    target = Layout(part, 2).sharding("tp")
    own = submesh_arrays({"embed": array, "head": array}, {"embed": target, "head": target})
    assert own["embed"] is own["head"]
    assert array.sharding == submesh_arrays(array, array.sharding).sharding
    assert submesh_arrays(array, array.sharding) is array


def test_deleting_one_of_two_arrays_with_the_same_buffers_kills_the_other():
    mesh = make_mesh()
    array = jax.device_put(np.arange(8.0), Layout(mesh, 2).sharding("tp"))
    own = submesh_arrays(array, Layout(submeshes(mesh, 2)[0], 2).sharding("tp"))
    own.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(array)


def test_what_would_have_to_move_is_refused():
    mesh = make_mesh()
    left, right = submeshes(mesh, 2)
    array = jax.device_put(np.arange(8.0), Layout(mesh, 2).sharding("tp"))
    with pytest.raises(ValueError, match=r"submesh_arrays: \['w'\] would have to move: device 0 does not hold"):
        submesh_arrays({"w": array}, {"w": Layout(left, 4).sharding("tp")})
    there = jax.device_put(np.arange(8.0), NamedSharding(left, P()))
    with pytest.raises(ValueError, match=r"submesh_arrays: the array would have to move: device 4 does not hold"):
        submesh_arrays(there, NamedSharding(right, P()))
