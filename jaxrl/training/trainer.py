"""The trainer: one model's weights, optimizer state, accumulated gradients and updates.

Policy and critic are both a `MeshTrainer`. They differ in the objective of their programs
(`jaxrl.training.objectives`), as do RL, SFT and DPO, and in the batches that they get.

Source: gradients that add up in any order are RollPacker §4.4. Master weights, optimizer state and the accumulator are
split over all devices by `sharding.rules.train_spec` (nested, so that a rollout layout is a prefix). Departure: the
accumulator holds the unnormalised sum of gradients and its denominator, and is divided once. So a minibatch may be cut
into microbatches and parts of any size and order. It is there from the first `accumulate` to `apply`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl.config import Config
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import without_adapters
from jaxrl.models.streaming import HOST
from jaxrl.sharding.compiled import Meet, alone
from jaxrl.sharding.rules import map_weights
from jaxrl.training import optimizer as optimizers
from jaxrl.training.objectives import critic_config
from jaxrl.training.programs import Accumulator, TrainPrograms
from jaxrl.training.weightwise import flat
from jaxrl.types import RunFailed, TrainBatch

Tree = Any


class DispatchQueue:
    """The microbatches that the devices have not finished, at most one besides the newest: so the devices always have
    work, and `on_progress` is called when a microbatch has run."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._results: deque[jax.Array] = deque()

    def put(self, result: jax.Array) -> None:
        """Adds a microbatch that was just dispatched, and waits for the one before it."""
        self._results.append(result)
        if len(self._results) > 1:
            self._results.popleft().block_until_ready()
            self._on_progress()


class MeshTrainer:
    """A model in training. One minibatch is any number of `accumulate` calls and one `apply`.

    Example::

        trainer = MeshTrainer(TrainPrograms(config, model_config, make_mesh()), params)
        batch.old_logprobs = trainer.token_logprobs(batch)
        trainer.accumulate(batch.select([0, 1]))
        trainer.accumulate(batch.select([2, 3]))
        metrics = trainer.apply()
        metrics = trainer.train_step(batch)  # the same in one call

    Attributes:
      updates: calls of `apply` so far. skipped_updates: those that changed nothing, for a gradient was not finite.
    """

    def __init__(
        self,
        programs: TrainPrograms,
        params: Tree,
        *,
        on_progress: Callable[[], None] = lambda: None,
        meet: Meet = alone,
    ) -> None:
        """Places `params` on the mesh: a copy of the trained part, and of the frozen part the arrays themselves where
        they have its types and shardings.

        Args:
          params: training form, numpy or jax arrays of any floating dtype. The caller keeps them. A reference model, if
            one is needed, has these weights.
          on_progress: called when a microbatch has run.
          meet: as in `CompiledPrograms`.
        """
        self.programs, programs.meet = programs, meet
        self.config, self.model_config, self.mesh = programs.config, programs.model_config, programs.mesh
        self.updates, self.skipped_updates = 0, 0
        self._name = programs.objective.name
        self._queue = DispatchQueue(on_progress)
        self._sums: Accumulator | None = None
        trained, frozen = programs.partition(params)
        self._trainable = placed(trained, programs.shardings, programs.dtypes)
        self._frozen = placed(frozen, programs.shardings, programs.dtypes, copy=False)
        self._recompiles = 0  # as of the last update
        self._optimizer_state = programs.to_run(("init", 0, 0))(self._trainable)
        self._has_ref = "ref_logprobs" in programs.objective.passes
        self._ref: Tree | None = None
        if self._has_ref and self.model_config.lora is None:
            self._ref = placed(params, programs.places, programs.ref_dtypes)

    @property
    def params(self) -> Tree:
        """Master weights in training form. `apply` invalidates them: ask again after it."""
        return optimizers.combine(self._trainable, self._frozen)

    @property
    def ref_params(self) -> Tree | None:
        """The reference's weights in training form; None where no option needs them. A model with adapters has its
        frozen base as the reference, so there is no second copy."""
        return without_adapters(self.params) if self._has_ref and self._ref is None else self._ref

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"] = "actor") -> list[np.ndarray]:
        """Log-probability of every response token under the temperature-scaled model: per sample float32 [T_i]."""
        if which == "actor":
            return self._forward("logprobs", self.params, batch)
        if not self._has_ref:
            raise ValueError(
                "the reference model is only kept with actor.use_kl_loss or algorithm.use_kl_in_reward: set one of them"
            )
        return self._forward("ref_logprobs", self.ref_params, batch)

    def token_values(self, batch: TrainBatch) -> list[np.ndarray]:
        """A critic's expected return from every response token on, before it is drawn: per sample float32 [T_i]."""
        return self._forward("values", self.params, batch)

    def _forward(self, kind: str, params: Tree, batch: TrainBatch) -> list[np.ndarray]:
        return self.programs.forward(kind, params, batch, self._queue.put)

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer update on a minibatch, or on the rest of one; returns its metrics (`apply`)."""
        self.accumulate(batch)
        return self.apply()

    def accumulate(self, batch: TrainBatch) -> None:
        """Adds the gradients and denominators of a minibatch, or of a part of it. Order does not matter."""
        for microbatch in self.programs.pack(batch, for_loss=True).microbatches:
            self._sums, result = self.programs.add_gradients(self._trainable, self._frozen, self._sums, microbatch)
            self._queue.put(result)

    def apply(self) -> dict[str, float]:
        """One optimizer update from everything accumulated since the last; the accumulator is released.

        Metrics of the minibatch are under `actor/` or `critic/`. `skipped_updates` is 1 where its gradient was not
        finite, else 0; `recompiles` counts unexpected compilations since the last update. Raises RunFailed where a
        finite gradient has made weights that are not finite.
        """
        if self._sums is None:
            raise ValueError("apply() without accumulate(): the minibatch has no response tokens")
        update = self.programs.to_run(("update", 0, 0))
        self._trainable, self._optimizer_state, metrics = update(self._trainable, self._optimizer_state, self._sums)
        self.discard()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.updates += 1
        if not values.pop("finite_weights"):
            norm, lr = values[f"{self._name}/grad_norm"], values[f"{self._name}/lr"]
            raise RunFailed(
                f"update {self.updates} of the {self._name} has made weights that are NaN or infinite, from a gradient "
                f"of norm {norm:g} at learning rate {lr:g}: nothing of it is saved. Lower {self._name}.optim.lr, then "
                "run again to resume from the last checkpoint"
            )
        self.skipped_updates += int(values[f"{self._name}/skipped_updates"])
        before, self._recompiles = self._recompiles, self.programs.recompiles
        return values | {f"{self._name}/recompiles": float(self._recompiles - before)}

    def discard(self) -> None:
        """Drops what was accumulated since the last update. The arrays are freed now, without waiting for Python's
        garbage collector: the KV pool takes their place."""
        sums, self._sums = self._sums, None
        for leaf in jax.tree.leaves(sums):
            leaf.delete()

    def begin_with(self, sums: Accumulator) -> None:
        """Begins the minibatch with sums from other devices, resharded as `programs.sums`."""
        assert self._sums is None, "sums come from elsewhere before a minibatch is accumulated here"
        self._sums = sums

    def gradients(self) -> Tree:
        """The accumulated gradients, divided by their denominator (for tests and inspection; a copy)."""
        sums = self._sums
        assert sums is not None, "nothing accumulated"
        return jax.tree.map(lambda g: g / sums.denominator, sums.gradients)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Tree]:
        """Everything that decides the future of training: nested dicts of arrays, unpadded and free of any layout.
        Weights that are frozen are not in it.

        Only between updates, because the accumulator is not part of it. `apply` invalidates the arrays.
        """
        assert self._sums is None, "a checkpoint is cut at a step boundary, not inside a minibatch"
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


def build_critic(
    config: Config,
    model_config: ModelConfig,
    params: Tree,
    mesh: Mesh,
    *,
    total_updates: int = 0,
    on_progress: Callable[[], None] = lambda: None,
    meet: Meet = alone,
) -> MeshTrainer:
    """The critic of `algorithm.adv_estimator=gae`: a second model, as large as the policy, whose head is one number per
    token. The model and the weights are the policy's: the critic's layers begin with them, and its head with zeros.
    Before the first update it predicts 0, and advantages are returns.

    Source: Schulman et al. 2017 (arXiv:1707.06347), with separate weights as in verl. Departures from verl: the head
    starts at 0 and not at random; computing type, attention and packing are those of section `actor`.
    """
    model = critic_config(model_config)
    weights = {name: params[name] for name in model.weights() if name != "score"}
    weights["score"] = np.zeros((model.hidden_size, 1), np.float32)
    programs = TrainPrograms(config, model, mesh, total_updates=total_updates)
    return MeshTrainer(programs, weights, on_progress=on_progress, meet=lambda name: meet(f"the critic's {name}"))


def _without_frozen(trainable: Tree) -> Tree:
    """The part that is trained, without the places of the other."""
    kept = {name: _without_frozen(x) if isinstance(x, Mapping) else x for name, x in trainable.items()}
    return {name: x for name, x in kept.items() if jax.tree.leaves(x)}


def placed(params: Tree, shardings: Tree, dtypes: Tree, *, copy: bool = True) -> Tree:
    """`params` in these types on the mesh, one leaf at a time; None stays None.

    Args:
      copy: also arrays that are as wanted already. Without it, nobody may delete or donate the result.
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
