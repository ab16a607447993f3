"""One model in training: weights, optimizer state, gradients that accumulate, one update.

Source: docs/architecture.md; gradients that add up in any order are RollPacker §4.4. Master weights, optimizer state
and the accumulator are split over all devices as `sharding.rules.train_spec` says (nested, so that a rollout layout is
a prefix); rows of a microbatch are split over the same devices, maybe each over several
(`actor.context_parallel_size`), and each layer's weights are gathered inside the scan, as in FSDP (Zhao et al. 2023).
Departures: the accumulator holds the unnormalised sum of gradients next to its denominator and is divided once, so a
minibatch may be cut into microbatches and parts of any size and order.

Memory: master weights and optimizer state always (with `actor.offload_optimizer` the latter in the host's, from where a
layer's comes to the devices at a time); the accumulator from the first `accumulate` to `apply`, to which each
layer's gradients are added as soon as they are there; activations as `actor.remat` says. For the backward pass,
attention (`actor.attention`, `kernels.attention.PackedAttention`) keeps q, k, v, the output and one number per query
and head. Scores exist for a few tiles at a time, except with `reference` and in short rows
(`kernels.packed.Tiling.longest_plain`). Prompts count once per row, not once per sample (`actor.share_prompts`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.models.streaming import HOST
from jaxrl.sharding.compiled import Meet, alone
from jaxrl.sharding.rules import map_weights
from jaxrl.train import optimizer as optimizers
from jaxrl.train.microbatches import Passes
from jaxrl.train.programs import TrainPrograms
from jaxrl.train.weightwise import flat
from jaxrl.types import RunFailed, TrainBatch

Tree = Any
A = TypeVar("A")


class Runner:
    """A model on a mesh that computes something of the tokens of batches.

    Attributes:
      programs: what runs, compiled for each shape of a microbatch.
      config, model_config, mesh: of the programs.
    """

    def __init__(self, programs: TrainPrograms, *, on_progress: Callable[[], None], meet: Meet) -> None:
        self.programs, programs.meet = programs, meet
        self.config, self.model_config, self.mesh = programs.config, programs.model_config, programs.mesh
        self._passes = Passes(programs)
        self._on_progress = on_progress
        self._newest: jax.Array | None = None  # of the last microbatch that was handed to the devices

    def _forward(self, params: Tree, batch: TrainBatch, kind: str) -> list[np.ndarray]:
        """What a pass without gradients finds of every response token: per sample float32 [T_i]."""
        return self._paced(self._passes.forward(params, batch, kind))

    def _paced(self, work: Generator[jax.Array, None, A]) -> A:
        """Runs to the end, one microbatch ahead: before the next one is handed over, the one before this one has
        run. So progress is told when there is some, and the queue is not empty."""
        while True:
            try:
                result = next(work)
            except StopIteration as end:
                return end.value
            before, self._newest = self._newest, result
            if before is not None:
                before.block_until_ready()
                self._on_progress()


class Learner(Runner):
    """A model in training. One minibatch is any number of `accumulate` calls and one `apply`.

    Attributes:
      updates: calls of `apply` so far.
      skipped_updates: those of them that changed nothing because a gradient was not finite.
    """

    def __init__(
        self,
        programs: TrainPrograms,
        params: Tree,
        *,
        on_progress: Callable[[], None] = lambda: None,
        meet: Meet = alone,
    ) -> None:
        """Places `params` on the programs' mesh: a copy of what is trained, and of what is frozen the arrays themselves
        where they have its types and shardings.

        Args:
          params: training form, numpy or jax arrays of any floating dtype. The caller keeps them.
          on_progress: called when a microbatch has run.
          meet: as in `CompiledPrograms`.
        """
        super().__init__(programs, on_progress=on_progress, meet=meet)
        self.updates, self.skipped_updates = 0, 0
        self._name = programs.objective.name
        trained, frozen = programs.partition(params)
        self._trainable = placed(trained, programs.shardings, programs.dtypes)
        self._frozen = placed(frozen, programs.shardings, programs.dtypes, copy=False)
        self._recompiles = 0  # as of the last update
        self._optimizer_state = programs.to_run(("init", 0, 0))(self._trainable)

    @property
    def params(self) -> Tree:
        """Master weights in training form. `apply` invalidates them: ask again after it."""
        return optimizers.combine(self._trainable, self._frozen)

    def accumulate(self, batch: TrainBatch) -> None:
        """Adds the gradients and denominators of a minibatch, or of a part of it. Order does not matter."""
        self._paced(self._passes.accumulate(self._trainable, self._frozen, batch))

    def apply(self) -> dict[str, float]:
        """One optimizer update from everything accumulated since the last; the accumulator is released.

        Returns:
          Metrics of the minibatch, under `actor/` or `critic/`. `skipped_updates` is 1 where its gradient was not
          finite, else 0; `recompiles` counts the programs that were compiled since the last update although all that
          are expected had been.

        Raises:
          ValueError: nothing was accumulated.
          RunFailed: a finite gradient has made weights that are not finite. There is no way back from them.
        """
        sums = self._passes.accumulator
        if sums is None:
            raise ValueError("apply() without accumulate(): the minibatch has no response tokens")
        update = self.programs.to_run(("update", 0, 0))
        self._trainable, self._optimizer_state, metrics = update(self._trainable, self._optimizer_state, sums)
        self._passes.discard()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.updates += 1
        if not values.pop("finite_weights"):
            norm, lr = values[f"{self._name}/grad_norm"], values[f"{self._name}/lr"]
            raise RunFailed(
                f"update {self.updates} of the {self._name} has made weights that are NaN or infinite, from a gradient "
                f"of norm {norm:g} at learning rate {lr:g}: nothing of it is saved. Lower {self._name}.optim.lr, then "
                "run again to go on from the last checkpoint"
            )
        self.skipped_updates += int(values[f"{self._name}/skipped_updates"])
        before, self._recompiles = self._recompiles, self.programs.recompiles
        return values | {f"{self._name}/recompiles": float(self._recompiles - before)}

    def gradients(self) -> Tree:
        """The accumulated gradients, divided by their denominator (for tests and inspection; a copy)."""
        sums = self._passes.accumulator
        assert sums is not None, "nothing accumulated"
        return jax.tree.map(lambda g: g / sums.denominator, sums.gradients)

    def discard(self) -> None:
        """Drops what was accumulated since the last update."""
        self._passes.discard()

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Tree]:
        """Everything that decides the future of training: nested dicts of arrays, unpadded and free of any layout.
        Weights that are frozen are not in it.

        Only between updates, because the accumulator is not part of it. `apply` invalidates the arrays.
        """
        assert self._passes.accumulator is None, "a checkpoint is cut at a step boundary, not inside a minibatch"
        return {
            "params": _without_frozen(self._trainable),
            "optimizer": flat(self._optimizer_state),
            "counters": {"updates": np.asarray(self.updates), "skipped_updates": np.asarray(self.skipped_updates)},
        }

    def abstract_state(self) -> dict[str, Tree]:
        """`state()` as shapes, dtypes and this model's shardings: what to restore into."""

        def abstract(x: Any) -> Any:
            sharding = x.sharding if isinstance(x, jax.Array) else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(abstract, self.state())

    def load_state(self, state: Mapping[str, Tree]) -> None:
        """Takes over what `state()` returned, on any mesh; arrays that have our shardings already are not copied."""
        wanted = self.programs.trainable
        found = zip(jax.tree.leaves(dict(state["params"])), jax.tree.leaves(wanted), strict=True)
        moved = [jax.device_put(x, to.sharding) for x, to in found]
        self._trainable = jax.tree.unflatten(jax.tree.structure(wanted), moved)
        leaves = state["optimizer"]
        template = self._optimizer_state
        moved = [jax.device_put(leaves[key], old.sharding) for key, old in flat(template).items()]
        self._optimizer_state = jax.tree.unflatten(jax.tree.structure(template), moved)
        self.updates = int(state["counters"]["updates"])
        self.skipped_updates = int(state["counters"]["skipped_updates"])
        self.discard()


def _without_frozen(trainable: Tree) -> Tree:
    """The part that is trained, without the places of the other."""
    kept = {name: _without_frozen(x) if isinstance(x, Mapping) else x for name, x in trainable.items()}
    return {name: x for name, x in kept.items() if jax.tree.leaves(x)}


def placed(params: Tree, shardings: Tree, dtypes: Tree, *, copy: bool = True) -> Tree:
    """`params` in these types on the mesh, one leaf at a time; None stays None.

    Args:
      copy: also of arrays that are as wanted. Without, nobody may delete or donate the result.
    """

    def one(leaf: Any, sharding: NamedSharding, dtype: str) -> jax.Array | None:
        if leaf is None:
            return None
        if isinstance(leaf, jax.Array):
            if not copy and leaf.dtype == dtype and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf
            # copied inside jit: device_put could alias the caller's buffers, which updates then would donate
            here = sharding.with_memory_kind("device") if sharding.memory_kind == HOST else sharding
            copied = jax.jit(lambda x: jnp.array(x, dtype, copy=True), out_shardings=here)(leaf)
            # waited for: else all copies would be on the devices before the first has gone to the host
            return copied if here is sharding else jax.block_until_ready(jax.device_put(copied, sharding))
        values = np.asarray(leaf, dtype)
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

    return map_weights(one, params, shardings, dtypes)
