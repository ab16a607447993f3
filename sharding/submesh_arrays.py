"""An array's shards on some of its devices, as an array of those devices alone: other labels, the same buffers.

Purpose: weights come to several workers by one program over all devices. In its result the workers are replicas, so
every worker's shards are there already, and `submesh_arrays` gives them to it without a copy (about 0.01 ms an array).

Both arrays then share their buffers, and deleting one kills the other. So only one may own them: the whole
array is dropped after it was split so, and not deleted; from then on each part is the only array with its buffers.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding


def submesh_arrays(tree: Any, target: Any) -> Any:
    """The arrays of a tree under other shardings, with the buffers that they have.

    An array that occurs several times in the tree (tied weights) is made once.

    Args:
      tree: of jax.Array.
      target: a tree of NamedSharding like `tree`, over devices on which the arrays are.

    Raises:
      ValueError: an array is not on one of the target's devices, or has another part of it there.
    """
    known: dict[tuple[int, NamedSharding], jax.Array] = {}

    def one(path: Any, array: jax.Array, sharding: NamedSharding) -> jax.Array:
        key = (id(array), sharding)
        if key not in known:
            known[key] = _on_submesh(jax.tree_util.keystr(path) or "the array", array, sharding)
        return known[key]

    return jax.tree_util.tree_map_with_path(one, tree, target)


def _on_submesh(name: str, array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    there = array.sharding.devices_indices_map(array.shape)
    wanted = sharding.devices_indices_map(array.shape)
    moving = [device.id for device, part in wanted.items() if there.get(device) != part]
    if moving:
        raise ValueError(
            f"submesh_arrays: {name} would have to move: device {moving[0]} does not hold the part of it that "
            f"{sharding.spec} says: use reshard"
        )
    parts = [shard.data for shard in array.addressable_shards if shard.device in wanted]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
