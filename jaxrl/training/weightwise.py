"""An optimizer's step, weight by weight, and layer by layer where that saves memory.

Source: ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) for a state in the host's memory. Departure: the devices
compute the step, not the host; the state crosses once in each direction.

By layer, the step is a loop that updates weights and state in place (a scan's results would be copies of them). So the
devices hold at most one layer's state, or its decoded moments. The weights outside the layers follow, each tied to the
one before: XLA would begin all their copies at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxrl.models.streaming import is_on_host

Tree = Any
Step = Callable[[Tree, Tree, Tree, Any], tuple[Tree, Tree]]
"""(gradients, state, params, the index of the layer if they are one's alone) -> (params, state)."""
Arrays = dict[str, jax.Array]
"""By dotted path (`flat`)."""

_LAYERS = "layers."


def weightwise(
    step: Step, init: Callable[[Tree], Tree], *, by_layer: bool
) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    """`step`, which works on any part of a tree of weights, called with each weight separately; `by_layer`: with one
    layer after another of the stacks under `layers`, as stacks of one. `init`: the state of a part; without weights
    only counts.

    Each call is enclosed by barriers. So XLA's fusions, and hence its rounding, do not depend on where the state is,
    nor (except for products of matrices) on `by_layer`.
    """
    space = jax.memory.Space

    def shaped(params: Tree, by_path: Arrays) -> Tree:
        """The state of some weights."""
        return jax.tree.map(by_path.__getitem__, _paths(jax.eval_shape(init, params)))

    def whole(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        new, new_state, sums = flat(params), flat(state), flat(gradients)
        counts = {path: new_state[path] for path in flat(jax.eval_shape(init, {}))}
        of = {
            path: [name for name in flat(jax.eval_shape(init, _nested(path, w))) if name not in counts]
            for path, w in new.items()
        }
        new_state |= flat(step({}, shaped({}, counts), {}, 0)[1])

        def one(path: str, gradient: jax.Array, kept: Arrays, w: jax.Array, place: Any = 0) -> tuple[jax.Array, Arrays]:
            here = {name: jax.device_put(x, space.Device) if is_on_host(x) else x for name, x in kept.items()}
            gradient, here, w = _as_they_lie(lax.optimization_barrier((gradient, here, w)))
            own = _nested(path, w)
            own, found = map(flat, step(_nested(path, gradient), shaped(own, here | counts), own, place))
            w, found = lax.optimization_barrier(_as_they_lie((own[path], {name: found[name] for name in kept})))
            return w, {n: jax.device_put(x, space.Host) if is_on_host(kept[n]) else x for n, x in found.items()}

        def layer(i: Any, carried: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            own, kept = carried
            for path in own:
                parts = sums[path], {name: kept[name] for name in of[path]}, own[path]
                parts = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i, 1), parts)
                w, found = one(path, *parts, i)
                own = own | {path: lax.dynamic_update_slice_in_dim(own[path], w, i, 0)}
                kept = kept | {n: lax.dynamic_update_slice_in_dim(kept[n], x, i, 0) for n, x in found.items()}
            return own, kept

        before: Arrays = {}
        own = {path: w for path, w in new.items() if by_layer and path.startswith(_LAYERS)}
        if own:
            before = {name: new_state[name] for path in own for name in of[path]}
            own, before = lax.fori_loop(0, next(iter(own.values())).shape[0], layer, (own, before))
            new, new_state = new | own, new_state | before
        for path in [path for path in new if path not in own]:
            kept = {name: new_state[name] for name in of[path]}
            if any(map(is_on_host, kept.values())):
                kept, _ = lax.optimization_barrier((kept, before))
            new[path], before = one(path, sums[path], kept, new[path])
            new_state |= before
        return jax.tree.map(new.__getitem__, _paths(params)), jax.tree.map(new_state.__getitem__, _paths(state))

    return whole


def _as_they_lie(arrays: Tree) -> Tree:
    """The same, with dims in memory in the order of their shapes: else XLA may transpose whole stacks for the products
    of a step."""
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), arrays)


def flat(tree: Tree) -> dict[str, Any]:
    """A pytree as {dotted path: leaf}, in the order of its leaves."""
    return dict(zip(jax.tree.leaves(_paths(tree)), jax.tree.leaves(tree), strict=True))


def _paths(tree: Tree) -> Tree:
    """The same with each leaf's dotted path in its place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="."), tree
    )


def _nested(path: str, leaf: Any) -> Mapping[str, Any]:
    """The tree of one leaf."""
    for name in reversed(path.split(".")):
        leaf = {name: leaf}
    return leaf
