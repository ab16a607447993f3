"""The trainer: log-probabilities, gradients that accumulate, one update.

Source: docs/architecture.md; streaming gradients in any order are RollPacker §4.4. Master weights, optimizer state and
the accumulator are split over all devices as `sharding.rules.train_spec` says (nested, so that a rollout layout is a
prefix); rows of a microbatch are split over the same devices, and each layer's weights are gathered inside the scan, as
in FSDP (Zhao et al. 2023). Departures: the accumulator holds the unnormalised sum of gradients next to its denominator
and is divided once, so a minibatch may be cut into microbatches and parts of any size and order.

Memory: master weights and optimizer state always; the accumulator from the first `accumulate` to `apply`, and beside
it, while a microbatch runs, that microbatch's gradients; logits of `actor.logprob_chunk_tokens` tokens per device;
activations as `actor.remat` says. For the backward pass, attention (`actor.attention`,
`kernels.attention.PackedAttention`) keeps q, k, v, the output and one number per query and head. Scores exist for a few
tiles at a time, except with `reference` and in short rows (`kernels.packed.Tiling.longest_plain`). Prompts count once
per row, not once per sample (`actor.share_prompts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import Config
from jaxrl.kernels.attention import choose_packed
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.weights import Weight
from jaxrl.sharding.rules import map_weights, train_shardings
from jaxrl.train import losses
from jaxrl.train import optimizer as optimizers
from jaxrl.train.logprobs import HeadOptions, token_logprobs
from jaxrl.train.packing import Packed, TokenBatch, pack
from jaxrl.types import RunFailed, TrainBatch

Tree = Any


@struct.dataclass
class Accumulator:
    """Sums over the microbatches of a minibatch: gradients, their denominator, and metrics."""

    gradients: Tree
    denominator: jax.Array
    means: dict[str, losses.Fraction]
    maxima: dict[str, jax.Array]


class Trainer:
    """Holds the model in training. One minibatch is any number of `accumulate` calls and one `apply`.

    Example::

        trainer = Trainer(config, model_config, params, make_mesh())
        batch.old_logprobs = trainer.token_logprobs(batch)
        trainer.accumulate(batch.select([0, 1]))
        trainer.accumulate(batch.select([2, 3]))
        metrics = trainer.apply()

    Attributes:
      updates: calls of `apply` so far.
      skipped_updates: those of them that changed nothing because a gradient was not finite.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        params: Tree,
        mesh: Mesh,
        *,
        total_updates: int = 0,
        trainable: optimizers.Trainable = optimizers.everything,
        interpret: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Places a copy of `params` on the mesh.

        Args:
          config: `actor`, `algorithm`, `rollout.temperature` and the lengths in `data` are read. `actor.remat: auto`
            means `dots` here; `jaxrl.runtime.memory.plan_remat` replaces it before, if the memory is known.
          model_config: of the decoder.
          params: training form, numpy or jax arrays of any floating dtype. The caller keeps them. A reference model, if
            one is needed, has these weights.
          mesh: rows and weights are split over all of its axes.
          total_updates: optimizer updates in the whole run; only schedules that decay need it.
          trainable: which parameters are trained; the rest is kept as it is.
          interpret: run the GPU kernels of `actor.attention: pallas` as plain JAX, on any device (slow; for tests).
          on_progress: called when a microbatch has run.

        Raises:
          ValueError: `actor.attention: pallas` on other devices than GPUs, or for a model that the kernels refuse.
        """
        actor = config.actor
        platform = mesh.devices.flat[0].platform
        self._packed_attention = choose_packed(actor.attention, platform, interpret=interpret)
        self.config, self.model_config, self.mesh = config, model_config, mesh
        self.updates, self.skipped_updates = 0, 0
        self._shardings = train_shardings(model_config, mesh)
        self._widen = self._packed_attention.tiling.widen
        self._remat: decoder.Remat = "dots" if actor.remat == "auto" else actor.remat
        self._optimizer = optimizers.build(actor.optim, actor.grad_clip, total_updates)
        self._trainable, self._frozen = optimizers.partition(
            _place(params, self._shardings, actor.param_dtype), trainable
        )
        self._ref: Tree | None = None
        if config.needs_ref:
            self._ref = _place(params, self._shardings, actor.dtype)
        self._accumulator: Accumulator | None = None
        self._on_progress = on_progress
        self._newest: jax.Array | None = None  # of the last microbatch that was handed to the devices
        self._build_programs()
        self._optimizer_state = self._rest(self._init_optimizer(self._trainable))

    # ------------------------------------------------------------------ what the loop calls

    @property
    def params(self) -> Tree:
        """Master weights in training form. `apply` invalidates them: ask again after it."""
        return optimizers.combine(self._trainable, self._frozen)

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"] = "actor") -> list[np.ndarray]:
        """Log-probability of every response token under the temperature-scaled model.

        Args:
          batch: advantages and log-probabilities in it are not read.
          which: `actor` (the model in training) or `ref` (the reference).

        Returns:
          Per sample float32 [T_i].

        Raises:
          ValueError: `ref` without a KL option that needs one; a sample that is too long.
        """
        if which == "ref" and self._ref is None:
            raise ValueError(
                "the reference model is only kept with actor.use_kl_loss or algorithm.use_kl_in_reward: set one of them"
            )
        params = self.params if which == "actor" else self._ref
        packed = self._pack(batch)
        results: list[jax.Array] = []
        for micro in packed.microbatches:
            results.append(self._logprobs(params, self._on_device(micro)))
            self._handed_over(results[-1])
        return [x.astype(np.float32) for x in packed.unpack([np.asarray(x) for x in results])]

    def accumulate(self, batch: TrainBatch) -> None:
        """Adds the gradients and denominators of a minibatch, or of a part of it. Order does not matter."""
        for micro in self._pack(batch).microbatches:
            if self._accumulator is None:
                self._accumulator = self._zeros()
            self._accumulator, result = self._accumulate(
                self._trainable, self._frozen, self._accumulator, self._on_device(micro)
            )
            self._handed_over(result)

    def apply(self) -> dict[str, float]:
        """One optimizer update from everything accumulated since the last; the accumulator is released.

        Returns:
          Metrics of the minibatch. `actor/skipped_updates` is 1 where its gradient was not finite, else 0.

        Raises:
          ValueError: nothing was accumulated.
          RunFailed: a finite gradient has made weights that are not finite. There is no way back from them.
        """
        if self._accumulator is None:
            raise ValueError("apply() without accumulate(): the minibatch has no response tokens")
        state = self._rest(self._optimizer_state, to="device")
        self._trainable, state, metrics = self._update(self._trainable, state, self._accumulator)
        self._optimizer_state = self._rest(state)
        self._discard()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.updates += 1
        if not values.pop("finite_weights"):
            raise RunFailed(
                f"update {self.updates} has made weights that are NaN or infinite, from a gradient of norm "
                f"{values['actor/grad_norm']:g} at learning rate {values['actor/lr']:g}: nothing of it is saved. Lower "
                "actor.optim.lr, then run again to go on from the last checkpoint"
            )
        self.skipped_updates += int(values["actor/skipped_updates"])
        return values

    def gradients(self) -> Tree:
        """The accumulated gradients, divided by their denominator (for tests and inspection; a copy)."""
        assert self._accumulator is not None, "nothing accumulated"
        denominator = self._accumulator.denominator
        return jax.tree.map(lambda g: g / denominator, self._accumulator.gradients)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Tree]:
        """Everything that decides the future of training: nested dicts of arrays, unpadded and free of any layout.

        Only between updates, because the accumulator is not part of it. `apply` invalidates the arrays.
        """
        assert self._accumulator is None, "a checkpoint is cut at a step boundary, not inside a minibatch"
        return {
            "params": self.params,
            "optimizer": _flat(self._optimizer_state),
            "counters": {"updates": np.asarray(self.updates), "skipped_updates": np.asarray(self.skipped_updates)},
        }

    def abstract_state(self) -> dict[str, Tree]:
        """`state()` as shapes, dtypes and this trainer's shardings: what to restore into."""

        def abstract(x: Any) -> Any:
            sharding = x.sharding if isinstance(x, jax.Array) else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(abstract, self.state())

    def load_state(self, state: Mapping[str, Tree]) -> None:
        """Takes over what `state()` returned, on any mesh; arrays that have our shardings already are not copied."""
        params = jax.tree.map(jax.device_put, dict(state["params"]), self._shardings)
        names = optimizers.partition(params, lambda path: _has_leaf(self._trainable, path))
        self._trainable, self._frozen = names
        leaves = state["optimizer"]
        template = self._optimizer_state
        placed = [jax.device_put(leaves[key], old.sharding) for key, old in _flat(template).items()]
        self._optimizer_state = jax.tree.unflatten(jax.tree.structure(template), placed)
        self.updates = int(state["counters"]["updates"])
        self.skipped_updates = int(state["counters"]["skipped_updates"])
        self._discard()

    # ------------------------------------------------------------------ programs

    def _build_programs(self) -> None:
        replicated = NamedSharding(self.mesh, PartitionSpec())
        self._rows = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        trained = jax.tree.map(lambda x: x.sharding, self._trainable)
        chain = self._optimizer.chain
        self._state_shardings = optax.tree_utils.tree_map_params(
            chain,
            lambda _, sharding: sharding,
            jax.eval_shape(chain.init, self._trainable),
            trained,
            transform_non_params=lambda _: replicated,
        )
        self._init_optimizer = jax.jit(chain.init, out_shardings=self._state_shardings)
        self._gather = _gather_functions(self.model_config, self._shardings, self.config.actor.dtype)
        self._logprobs = jax.jit(self._logprobs_of, out_shardings=replicated)
        batch = TokenBatch.zeros(self.mesh.size, 16)
        empty = jax.eval_shape(self._gradients_of, self._trainable, self._frozen, batch)
        accumulator = jax.tree.map(lambda _: replicated, empty).replace(gradients=trained)
        self._accumulate = jax.jit(self._add, donate_argnums=2, out_shardings=(accumulator, replicated))
        self._zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty), out_shardings=accumulator
        )
        self._update = jax.jit(
            self._apply, donate_argnums=(0, 1), out_shardings=(trained, self._state_shardings, replicated)
        )

    def _hidden_and_head(self, params: Tree, batch: TokenBatch) -> tuple[jax.Array, Tree]:
        """Final-normed hidden states [R, T, E] and the gathered parameters that turn them into logits."""
        gathered = {name: self._gather[name](w) for name, w in params.items() if name != "layers"}
        rows = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, self._rows), batch)
        hidden = decoder.forward_scan(
            gathered | {"layers": params["layers"]},
            rows.tokens,
            rows.positions,
            self._attention(rows),
            self.model_config,
            dtype=jnp.dtype(self.config.actor.dtype),
            remat=self._remat,
            widen=self._widen,
            constrain=lambda x: jax.lax.with_sharding_constraint(x, self._rows),
            gather=lambda layer: {name: self._gather["layers"][name](w) for name, w in layer.items()},
        )
        head = "lm_head" if "lm_head" in gathered else "embed"
        return hidden, {head: gathered[head]}

    def _attention(self, rows: TokenBatch) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        """Attention of [R, T] tokens, for all layers of a microbatch; each device loops over its own rows."""
        packed = self._packed_attention
        local = partial(jax.shard_map, mesh=self.mesh, out_specs=self._rows.spec, check_vma=False)
        shards = (jnp.asarray(rows.segment_ids), jnp.asarray(rows.positions), jnp.asarray(rows.prefix_ids))
        tiles = local(lambda segments, _, prefixes: packed.tile_pairs(segments, prefixes), in_specs=self._rows.spec)(
            *shards
        )

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return local(packed.attend, in_specs=self._rows.spec)(q, k, v, *shards, tiles)

        return attend

    def _token_logprobs(self, params: Tree, batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
        hidden, head = self._hidden_and_head(params, batch)
        options = HeadOptions(
            project=partial(_project, config=self.model_config),
            chunk=self.config.actor.logprob_chunk_tokens,
            temperature=self.config.rollout.temperature or 1.0,
            entropy_gradient=bool(self.config.actor.entropy_coeff),
            widen=self._widen,
        )
        return token_logprobs(options, head, hidden, jnp.asarray(batch.tokens), jnp.asarray(batch.loss_mask), self.mesh)

    def _logprobs_of(self, params: Tree, batch: TokenBatch) -> jax.Array:
        return self._token_logprobs(params, batch)[0]

    def _gradients_of(self, trainable: Tree, frozen: Tree, batch: TokenBatch) -> Accumulator:
        def objective(trainable: Tree) -> tuple[jax.Array, losses.LossTerms]:
            logprobs, entropy = self._token_logprobs(optimizers.combine(trainable, frozen), batch)
            terms = losses.compute(logprobs, entropy, _held_back(batch, logprobs), self.config)
            return terms.total, terms

        total, pull_back, terms = jax.vjp(objective, trainable, has_aux=True)
        (gradients,) = pull_back(_one_after(terms, total.dtype))
        return Accumulator(gradients, terms.denominator, terms.means, terms.maxima)

    def _add(
        self, trainable: Tree, frozen: Tree, total: Accumulator, batch: TokenBatch
    ) -> tuple[Accumulator, jax.Array]:
        """`total` with a microbatch; and a number that is there when it has run, and that the next one leaves alone."""
        part = self._gradients_of(trainable, frozen, batch)
        added = jax.tree.map(jnp.add, total, part)
        return added.replace(maxima=jax.tree.map(jnp.maximum, total.maxima, part.maxima)), part.denominator

    def _apply(self, trainable: Tree, state: Tree, total: Accumulator) -> tuple[Tree, Tree, dict[str, jax.Array]]:
        gradients = jax.tree.map(lambda g: g / total.denominator.astype(g.dtype), total.gradients)
        lr = self._optimizer.lr(optimizers.update_count(state))
        trainable, state, outcome = self._optimizer.update(gradients, state, trainable)
        metrics = {name: fraction.total / fraction.denominator for name, fraction in total.means.items()}
        metrics |= total.maxima | {"actor/grad_norm": outcome.grad_norm, "actor/lr": jnp.asarray(lr)}
        finite = jnp.stack([jnp.all(jnp.isfinite(w)) for w in jax.tree.leaves(trainable)]).all()
        skipped = 1 - outcome.applied.astype(jnp.int32)
        return trainable, state, metrics | {"actor/skipped_updates": skipped, "finite_weights": finite}

    def _handed_over(self, result: jax.Array) -> None:
        """Waits for the microbatch before this one: progress is told when there is some, and the queue is not empty."""
        before, self._newest = self._newest, result
        if before is not None:
            before.block_until_ready()
            self._on_progress()

    # ------------------------------------------------------------------ placing things

    def _pack(self, batch: TrainBatch) -> Packed:
        return pack(
            batch,
            max_model_length=self.config.max_model_length,
            max_tokens_per_device=self.config.actor.ppo_max_token_len_per_gpu,
            num_devices=self.mesh.size,
            share_prompts=self.config.actor.share_prompts,
            row_cost=self._row_cost,
        )

    def _row_cost(self, tokens: int) -> float:
        """The work of a row, in units of a token that attends to nothing."""
        model = self.model_config
        per_key = 2 * model.num_layers * model.num_heads * model.head_dim / model.num_params()
        return tokens * (1 + per_key * self._packed_attention.num_keys(tokens))

    def _on_device(self, batch: TokenBatch) -> TokenBatch:
        # the callback form works on several processes, each of which packs the same batch
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, self._rows, x.__getitem__), batch)

    def _rest(self, state: Tree, to: Literal["rest", "device"] = "rest") -> Tree:
        """The optimizer state where it stays between updates (host memory if offloaded), or back on the device."""
        if not self.config.actor.offload_optimizer:
            return state
        kind = "device" if to == "device" else "pinned_host"
        return jax.device_put(
            state, jax.tree.map(lambda s: s.with_memory_kind(kind), self._state_shardings), donate=False
        )

    def _discard(self) -> None:
        """Frees the accumulator now, without waiting for Python's garbage collector: the KV pool takes its place."""
        for leaf in jax.tree.leaves(self._accumulator):
            leaf.delete()
        self._accumulator = None


def _held_back(batch: TokenBatch, logprobs: jax.Array) -> TokenBatch:
    """The same batch, changed so that XLA cannot compute its sums before the log-probabilities exist.

    Sums over the batch alone are collectives that depend on nothing. XLA:CPU runs them beside the collectives inside
    the loop over layers; with as many threads as (virtual) devices, some devices may then wait in one collective and
    some in another, for ever. XLA removes an optimization barrier before threads are assigned, but not a comparison of
    data. `_one_after` does the same for the backward loop.
    """
    never = _never(logprobs)
    return dataclasses.replace(
        batch,
        loss_mask=jnp.where(never, 0, batch.loss_mask),
        num_sequences=jnp.where(jnp.any(never, axis=1), 0, batch.num_sequences),
    )


def _one_after(terms: losses.LossTerms, dtype: Any) -> jax.Array:
    """1, the cotangent of the loss, which exists only once all sums of `terms` do."""
    return jnp.where(_never(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(terms))), 0, 1).astype(dtype)


def _never(x: Any) -> jax.Array:
    """False everywhere, in a form that no compiler can simplify: whether a NaN is positive."""
    return jnp.isnan(x) & (x > 0)


def _project(head: Tree, x: jax.Array, config: ModelConfig) -> jax.Array:
    return decoder.logits(head, x, config)


def _place(params: Tree, shardings: Tree, dtype: str) -> Tree:
    """A copy of `params` in `dtype` on the mesh, one leaf at a time."""

    def one(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array):
            # copied inside jit: device_put could alias the caller's buffers, which updates then would donate
            return jax.jit(lambda x: jnp.array(x, dtype, copy=True), out_shardings=sharding)(leaf)
        values = np.asarray(leaf, dtype)
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

    return map_weights(one, params, shardings)


def _gather_functions(config: ModelConfig, shardings: Tree, dtype: str) -> Tree:
    """Per weight, a function that gathers one layer of it on every device; its gradient is split again.

    Weights of layers are cast to the compute dtype first (half the traffic); norm scales and the weights outside the
    layers stay in the master dtype: the embedding's gradient is a long sum, and the head casts for itself.
    """

    def one(weight: Weight, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        spec = sharding.spec[1:] if weight.stacked else sharding.spec
        cast = dtype if weight.stacked and weight.init != "ones" else None
        return _gather(NamedSharding(sharding.mesh, PartitionSpec(*spec)), cast)

    return map_weights(one, config.weights(), shardings)


def _gather(split: NamedSharding, dtype: str | None) -> Callable[[jax.Array], jax.Array]:
    whole = NamedSharding(split.mesh, PartitionSpec())

    @jax.custom_vjp
    def gather(w: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(w if dtype is None else w.astype(dtype), whole)

    def forward(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        # an empty array carries the master dtype to the backward pass
        return gather(w), jnp.zeros((0,), w.dtype)

    def backward(like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
        # a constraint's own transpose would ask for the whole gradient on every device: an all-reduce of all weights
        return (jax.lax.with_sharding_constraint(gradient, split).astype(like.dtype),)

    gather.defvjp(forward, backward)
    return gather


def _flat(tree: Tree) -> dict[str, Any]:
    """A pytree as {dotted path: leaf}, in the order of its leaves."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _has_leaf(tree: Tree, path: str) -> bool:
    return any(optimizers.path_name(p) == path for p, _ in jax.tree_util.tree_leaves_with_path(tree))
