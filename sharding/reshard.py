"""Moving a tree of arrays between shardings: chunk by chunk, on the devices, with a bound on the extra memory.

Purpose: `reshard` moves any tree of arrays (rollout weights, training state, packed KV) from its shardings to others;
`rollout_to_rollout` does that for rollout weights between layouts.

Source: docs/architecture.md; its facts were measured on jax 0.10.2 and 0.11.2. Three rules follow from them.

- Within one set of devices, a jitted identity with `out_shardings` moves arrays; `jax.device_put` would go through the
  host and block. Its programs are slices only when TP grows, and all-gathers only when it falls.
- Across disjoint sets, and between device and host memory, `jax.device_put` moves arrays with the same spec on both
  sides, and they are resharded on arrival. Sets that overlap without being equal are refused: there is no direct way.
- An array that is in place already is aliased, never copied and never deleted. An array that moves is deleted right
  after its chunk was dispatched (unless `keep`), so two copies of a tree never exist at once.

A tree moves in chunks, one of them in flight at a time; the last one is not waited for. Everything is checked, planned
(`jaxrl.sharding.reshard_plan`) and compiled before anything moves. Plans and programs are cached by shapes, dtypes and
shardings, so a second move of the same kind compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from jaxrl.sharding.layout import Layout
from jaxrl.sharding.reshard_plan import Leaf, ReshardReport, is_put, make_plan, program_of, steps_of, way_of
from jaxrl.sharding.rules import Model, rollout_shardings

DEFAULT_MAX_EXTRA_BYTES = 64 << 20


def reshard(
    tree: Any,
    target: Any,
    *,
    dims: Any = None,
    max_extra_bytes: int = DEFAULT_MAX_EXTRA_BYTES,
    keep: bool = False,
) -> tuple[Any, ReshardReport]:
    """Moves a tree of arrays; returns it in the target's shardings, and a report.

    The given arrays are deleted, except those that were in place already: these are in the result as they are. An array
    that occurs several times in the tree (tied weights) moves once. If an array shares its buffers with another one
    outside the tree (as after `device_put` to an equivalent sharding), deleting it deletes the other one too.

    Example::

        params, report = reshard(params, rollout_shardings(config, Layout(mesh, 4), max_tp=8))
        state, report = reshard(state, Layout(mesh, 2), dims=("dp", None, "tp"))

    Args:
      tree: of jax.Array.
      target: a tree of NamedSharding like `tree` or a prefix of it (one sharding for all); or a Layout, with `dims`.
      dims: with a Layout, what `Layout.spec` takes: one tuple for all arrays, or a tree of tuples.
      max_extra_bytes: per device; see `ReshardReport.peak_extra_bytes`. A leaf that needs more goes alone.
      keep: leave the given arrays alive.

    Raises:
      ValueError: before anything moves: a leaf that is no array, sets of devices that overlap without being equal,
        meshes between which no spec is the same.
    """
    arrays, slots, structure, leaves = _collect(tree, target, dims)
    plan = make_plan(leaves, _bound(max_extra_bytes), keep)
    programs = [[program_of(*step) for step in steps_of(leaves, chunk)] for chunk in plan.chunks]
    moved: list[Any] = list(arrays)
    previous: Any = ()
    for chunk, steps in zip(plan.chunks, programs, strict=True):
        jax.block_until_ready(previous)  # or the chunks in flight would add up
        values: Sequence[jax.Array] = [arrays[i] for i in chunk]
        for hop, program in enumerate(steps):
            results = program(*values)
            if hop or not keep:
                for value in values:
                    value.delete()
            values = results
        for i, value in zip(chunk, values, strict=True):
            moved[i] = value
        previous = values
    return jax.tree.unflatten(structure, [moved[i] for i in slots]), plan.report


def precompile(
    tree: Any,
    target: Any,
    *,
    dims: Any = None,
    max_extra_bytes: int = DEFAULT_MAX_EXTRA_BYTES,
    keep: bool = False,
) -> tuple[ReshardReport, list[Any]]:
    """Compiles what `reshard` with the same arguments would run, and moves nothing. Safe in a background thread.

    `tree` may hold `jax.ShapeDtypeStruct` with shardings. Returns the report and the compiled programs, to look at.
    """
    _, _, _, leaves = _collect(tree, target, dims)
    plan = make_plan(leaves, _bound(max_extra_bytes), keep)
    steps = dict.fromkeys(step for chunk in plan.chunks for step in steps_of(leaves, chunk))
    programs = {step: program_of(*step) for step in steps}
    return plan.report, [program for step, program in programs.items() if not is_put(step[1][0], step[2][0])]


def rollout_to_rollout(
    params: Any,
    config: Model,
    layout_from: Layout,
    layout_to: Layout,
    max_tp: int,
    features_first: bool = False,
    *,
    fused_projections: bool = False,
    max_extra_bytes: int = DEFAULT_MAX_EXTRA_BYTES,
    keep: bool = False,
) -> tuple[Any, ReshardReport]:
    """Rollout weights from one layout to another; shapes stay, because they were padded for `max_tp`.

    Args:
      params: as `rules.to_rollout` made them for `layout_from`, `max_tp`, `features_first` and `fused_projections`.
      layout_to: on the same mesh, or on a mesh without a common device.

    Raises:
      ValueError: a weight is not sharded as `layout_from` says, or a degree does not divide `max_tp`.
    """
    expected = rollout_shardings(
        config, layout_from, max_tp, features_first=features_first, fused_projections=fused_projections
    )
    for (path, array), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(expected), strict=True
    ):
        if not array.sharding.is_equivalent_to(sharding, array.ndim):
            raise ValueError(
                f"rollout weight {jax.tree_util.keystr(path)} is sharded as {array.sharding}, and layout_from (tp "
                f"{layout_from.tp}) has it as {sharding}: name the layout that the weights are in"
            )
    target = rollout_shardings(
        config, layout_to, max_tp, features_first=features_first, fused_projections=fused_projections
    )
    return reshard(params, target, max_extra_bytes=max_extra_bytes, keep=keep)


# ---------------------------------------------------------------- what is asked for


def _bound(max_extra_bytes: int) -> int:
    if max_extra_bytes < 1:
        raise ValueError(f"reshard: max_extra_bytes ({max_extra_bytes}) must be at least 1")
    return max_extra_bytes


def _collect(tree: Any, target: Any, dims: Any) -> tuple[list[Any], list[int], Any, tuple[Leaf, ...]]:
    """(distinct arrays, the index of the array at each place of the tree, the tree's structure, the arrays' paths)."""
    shardings = _shardings(tree, target, dims)
    with_path, structure = jax.tree_util.tree_flatten_with_path(tree)
    arrays: list[Any] = []
    leaves: list[Leaf] = []
    slots: list[int] = []
    known: dict[tuple[int, Sharding], int] = {}
    targets: dict[int, Sharding] = {}
    for (path, array), sharding in zip(with_path, shardings, strict=True):
        name = jax.tree_util.keystr(path) or "the array"
        if not isinstance(array, jax.Array | jax.ShapeDtypeStruct) or not isinstance(array.sharding, Sharding):
            raise ValueError(
                f"reshard: {name} is {type(array).__name__}, not an array on devices: put it there first "
                "(jax.device_put of host data)"
            )
        key = (id(array), sharding)
        if key not in known:
            if targets.setdefault(id(array), sharding) != sharding:
                raise ValueError(
                    f"reshard: {name} stands twice in the tree, with the targets {targets[id(array)]} and {sharding}: "
                    "one array can go to one place only"
                )
            known[key] = len(arrays)
            arrays.append(array)
            leaves.append(Leaf(name, array.shape, array.dtype, way_of(name, array, sharding)))
        slots.append(known[key])
    return arrays, slots, structure, tuple(leaves)


def _shardings(tree: Any, target: Any, dims: Any) -> list[Any]:
    """The target sharding of each place of the tree."""
    if isinstance(target, Layout):
        if dims is None:
            raise ValueError(
                "reshard: with a Layout as target, dims must say what splits each array, as Layout.spec takes it: dims="
                '("dp", None, "tp"), or a tree of such tuples'
            )
        layout = target
        target = jax.tree.map(lambda words: layout.sharding(*words), dims, is_leaf=_is_words)
    elif dims is not None:
        raise ValueError("reshard: dims goes with a Layout as target; shardings say it themselves")
    found: list[Any] = []
    try:
        jax.tree.map(
            lambda one, part: found.extend([one] * len(jax.tree.leaves(part))),
            target,
            tree,
            is_leaf=lambda x: isinstance(x, Sharding),
        )
    except ValueError as error:
        raise ValueError(f"reshard: the target must be a tree of shardings like the tree of arrays: {error}") from None
    strange = [one for one in found if not isinstance(one, NamedSharding)]
    if strange:
        raise ValueError(f"reshard: the target must be made of NamedSharding, found {strange[0]!r}")
    return found


def _is_words(value: Any) -> bool:
    """Whether it is a tuple of what `Layout.spec` takes, rather than a tuple of such tuples."""
    return isinstance(value, tuple) and all(
        entry is None or isinstance(entry, str) or (isinstance(entry, tuple) and all(isinstance(x, str) for x in entry))
        for entry in value
    )
