"""The update's compiled programs, and the shapes and shardings that they are compiled for.

They follow from the options, the model and the mesh alone, so they can be compiled without weights: ahead, in another
thread (beside the first rollout), or for devices that are not there. Source and memory: `jaxrl.training.trainer`.

Programs, as (name, rows, tokens of a row) of the microbatch; what they replace is donated:

- `("accumulate", R, T)`: (trainable, frozen, accumulator, batch) -> (accumulator, a scalar);
- `("logprobs", R, T)`: (params, batch) -> [R, T]; `ref_logprobs`: for the reference's dtype; `top_logprobs`: of a
  teacher; `values`: of a critic;
- `("zeros", 0, 0)`: () -> accumulator; `("init", 0, 0)`: (trainable) -> optimizer state;
- `("update", 0, 0)`: (trainable, optimizer state, accumulator) -> (trainable, optimizer state, metrics).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import Config
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import without_adapters
from jaxrl.models.streaming import HOST, STREAMED
from jaxrl.models.weights import Weight
from jaxrl.sharding.compiled import CompiledPrograms, products_of
from jaxrl.sharding.mesh import entry_axes, platform_of
from jaxrl.sharding.rules import map_weights, train_shardings
from jaxrl.training import losses
from jaxrl.training import optimizer as optimizers
from jaxrl.training.mesh_decoder import MeshDecoder
from jaxrl.training.objectives import ObjectiveOf, objective_of
from jaxrl.training.packing import Packed, TokenBatch, dealt, microbatch_shapes, pack
from jaxrl.types import TrainBatch

Tree = Any
ProgramShape = tuple[str, int, int]
"""(program, rows of the microbatch on all devices together, tokens of a row); of programs without one, 0 and 0."""


class Accumulator(struct.PyTreeNode):
    """Sums over the microbatches of a minibatch: gradients, their denominator, and metrics."""

    gradients: Tree
    denominator: jax.Array
    means: dict[str, losses.Fraction]
    maxima: dict[str, jax.Array]


class TrainPrograms(CompiledPrograms):
    """The programs of one model on one mesh, each shape compiled once.

    Attributes:
      config: as given, with the platform's types.
      decoder: what computes hidden states. layout: as its own.
      microbatches: the shapes of a microbatch on one device, ascending.
      trainable, frozen: shapes, dtypes and shardings of trained and frozen weights.
      places, ref_dtypes: shardings and types of a reference's own weights. With `actor.offload_reference` its layers'
        matrices lie in host memory (`jaxrl.models.streaming` does the same for the rollout's form), and the scan over
        layers brings them to the devices one by one.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        mesh: Mesh,
        *,
        total_updates: int = 0,
        interpret: bool = False,
        updates: bool = True,
        objective: ObjectiveOf = objective_of,
        whole: Mesh | None = None,
    ) -> None:
        """
        Args:
          config: `auto` means `dots` for `actor.remat` and `logprobs.DEFAULT_CHUNK` for `actor.logprob_chunk_tokens`
            here; `jaxrl.run.build.with_planned_update` replaces both before by what the memory allows.
          mesh: rows of tokens and weights are split over all of its axes.
          total_updates: optimizer updates in the whole run; only schedules that decay need it.
          interpret: run the GPU kernels of `actor.attention: pallas` as plain JAX, on any device (slow; for tests).
          updates: whether the optimizer's programs will be needed; False where gradients alone are computed.
          whole: the mesh of which `mesh` is a part; weights are split in the same dims as there.

        Raises:
          ValueError: as `MeshDecoder`.
        """
        super().__init__()
        self.made_with: dict[str, Any] = {"interpret": interpret, "objective": objective}
        self.total_updates, self._updates, self.platform = total_updates, updates, platform_of(mesh.devices.flat[0])
        self.config = config = config.with_types(self.platform)
        self.model_config, self.mesh = model_config, mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.shardings = train_shardings(model_config, mesh, whole)
        self.dtypes = model_config.dtypes(config.actor.param_dtype, config.actor.dtype)
        self.places = _streamed(self.shardings) if config.actor.offload_reference else self.shardings
        self.ref_dtypes = model_config.dtypes(config.actor.dtype, config.actor.dtype)
        num_hosts = config.hosts.num if whole is None else 1
        self.decoder = own = MeshDecoder(
            config, model_config, mesh, self.shardings, interpret=interpret, num_hosts=num_hosts
        )
        self.layout = own.layout
        self.microbatches = microbatch_shapes(config, model_config, mesh.size, own.attention)
        self.objective = objective(config, model_config, mesh, widen=own.widen, by_rows=own.in_one_device)
        self.trainable, self.frozen = optimizers.partition(
            self._abstract_params(self.dtypes, self.shardings), model_config.lora is not None
        )

    @cached_property
    def sums(self) -> Accumulator:
        """Shapes, dtypes and shardings of the accumulator."""
        batch = self._batch(self.layout.dp, 16 * self.layout.tp, self.objective.teacher_top_k)
        empty = jax.eval_shape(self._gradients_of, self.trainable, self.frozen, batch, self.trainable)
        numbers: Accumulator = jax.tree.map(lambda x: _abstract(x, self._replicated), empty)
        return dataclasses.replace(numbers, gradients=self.trainable)

    @cached_property
    def optimizer(self) -> optimizers.Optimizer:
        own = self.objective
        return optimizers.build(own.optim, own.grad_clip, self.total_updates, own.name, self.model_config.weights())

    @cached_property
    def state(self) -> Tree:
        """Shapes, dtypes and shardings of the optimizer's state."""
        chain, on_host = self.optimizer.chain, self.config.actor.offload_optimizer
        shapes = jax.eval_shape(chain.init, self.trainable)
        whole: tuple[Any, ...] = (optax.MaskedNode,)
        if self.objective.optim.state_dtype == "int8":
            from jaxrl.training.moments import Codes

            whole += (Codes,)
        shardings = optax.tree_utils.tree_map_params(
            chain,
            # no leaves: another part of the optimizer has the weight; two leaves: it is in codes
            lambda x, own: jax.tree.map(lambda x: _fitting(own.sharding, x, on_host), x),
            shapes,
            self.trainable,
            transform_non_params=lambda _: self._replicated,
            is_leaf=lambda x: isinstance(x, whole),
        )
        return jax.tree.map(_abstract, shapes, shardings)

    def without_updates(self, mesh: Mesh) -> TrainPrograms:
        """The same for a part of the mesh, for gradients alone."""
        return TrainPrograms(self.config, self.model_config, mesh, **self.made_with, updates=False, whole=self.mesh)

    def partition(self, params: Tree) -> tuple[Tree, Tree]:
        """(trainable, frozen): the weights' two parts."""
        return optimizers.partition(params, self.model_config.lora is not None)

    def shapes(self) -> list[tuple[str, int, int]]:
        """Every program that a run with these options needs; full microbatches first, because most are."""
        learns = self.objective.learns
        kinds = [*self.objective.passes, *(["accumulate"] if learns else [])]
        sizes = [(shape.rows * self.layout.dp, shape.length) for shape in reversed(self.microbatches)]
        whole = [(kind, *sizes[0]) for kind in kinds]
        smaller = [(kind, *size) for size in sizes[1:] for kind in kinds]
        first, last = ([("init", 0, 0)], [("update", 0, 0)]) if self._updates else ([], [])
        return [*first, *([("zeros", 0, 0)] if learns else []), *whole, *last, *smaller]

    # ------------------------------------------------------------------ running them

    def pack(self, batch: TrainBatch, *, for_loss: bool = False) -> Packed:
        """The samples in microbatches of this mesh's shapes; for the loss with the teacher's tokens that it reads."""
        return pack(
            batch,
            shapes=self.microbatches,
            max_model_length=self.config.max_model_length,
            num_row_groups=self.layout.dp,
            top_k=self.objective.teacher_top_k if for_loss else 0,
        )

    def on_device(self, microbatch: TokenBatch) -> TokenBatch:
        """A microbatch with its rows split over the mesh, the columns of each as `dealt` has them."""
        microbatch = microbatch.with_columns(dealt(microbatch.tokens.shape[1], self.layout.tp))
        # the callback form works on several processes, each of which packs the same batch
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, self.decoder.rows(x.ndim), x.__getitem__), microbatch
        )

    def forward(
        self, kind: str, params: Tree, batch: TrainBatch, dispatched: Callable[[jax.Array], None]
    ) -> list[np.ndarray]:
        """What a program without gradients (`kind`) finds of every response token: float32 [T_i, ...] per sample.
        `dispatched` is called with the result of each microbatch once it is dispatched."""
        packed, results = self.pack(batch), list[jax.Array]()
        for microbatch in packed.microbatches:
            results.append(self.dispatch(kind, params, microbatch))
            dispatched(results[-1])
        return self.unpack(packed, results)

    def dispatch(self, kind: str, params: Tree, microbatch: TokenBatch) -> jax.Array:
        """Runs a program without gradients; nothing is waited for."""
        return self.to_run((kind, *microbatch.tokens.shape))(params, self.on_device(microbatch))

    def unpack(self, packed: Packed, results: Sequence[jax.Array]) -> list[np.ndarray]:
        """The results of `dispatch`, one per microbatch, by sample."""
        found = [np.asarray(x)[:, np.argsort(dealt(x.shape[1], self.layout.tp))] for x in results]
        return [x.astype(np.float32) for x in packed.unpack(found)]

    def add_gradients(
        self, trainable: Tree, frozen: Tree, sums: Accumulator | None, microbatch: TokenBatch
    ) -> tuple[Accumulator, jax.Array]:
        """`sums` (None: zeros), which are donated, plus a microbatch's; and a number that is ready when it has run.
        Nothing is waited for."""
        if sums is None:
            sums = self.to_run(("zeros", 0, 0))()
        program = self.to_run(("accumulate", *microbatch.tokens.shape))
        return program(trainable, frozen, sums, self.on_device(microbatch))

    # ------------------------------------------------------------------ compiling them

    def compiler_options(self, kind: str) -> dict[str, Any]:
        if not self.decoder.is_invariant or self.platform != "gpu":
            return super().compiler_options(kind)
        from jaxrl.kernels.invariant import GPU_COMPILER_OPTIONS

        return {**GPU_COMPILER_OPTIONS}

    def lower(self, kind: str, *sizes: int, platforms: tuple[str, ...] | None = None) -> Any:
        """The program of a `ProgramShape`, traced for the mesh's devices; lowered for `platforms` if given."""
        rows, tokens = sizes or (0, 0)
        with products_of(self.config.actor.dtype, self.platform):
            return self._trace(kind, rows, tokens).lower(lowering_platforms=platforms)

    def _trace(self, kind: str, rows: int, tokens: int) -> Any:
        params = self.trainable, self.frozen
        match kind:
            case "accumulate":
                total = self.sums
                jitted = jax.jit(self._add, donate_argnums=2, out_shardings=(_shardings(total), self._replicated))
                return jitted.trace(*params, total, self._batch(rows, tokens, self.objective.teacher_top_k))
            case "logprobs" | "ref_logprobs" | "top_logprobs" | "values":
                jitted = jax.jit(self._first_of, out_shardings=self._replicated)
                params = (
                    self._abstract_ref() if kind in ("ref_logprobs", "top_logprobs") else optimizers.combine(*params)
                )
                return jitted.trace(params, self._batch(rows, tokens))
            case "zeros":
                zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), self.sums)
                return jax.jit(zeros, out_shardings=_shardings(self.sums)).trace()
            case "init":
                return jax.jit(self.optimizer.chain.init, out_shardings=_shardings(self.state)).trace(self.trainable)
            case "update":
                out = (_shardings(self.trainable), _shardings(self.state), self._replicated)
                jitted = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=out)
                return jitted.trace(self.trainable, self.state, self.sums)
        raise ValueError(f"the update has no program named {kind!r}")

    def _abstract_params(self, dtypes: Tree, shardings: Tree) -> Tree:
        def one(weight: Weight, sharding: NamedSharding, dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=sharding)

        return map_weights(one, self.model_config.weights(), shardings, dtypes)

    def _abstract_ref(self) -> Tree:
        """The reference's weights; a model with adapters has its base as the reference."""
        if self.model_config.lora is None:
            return self._abstract_params(self.ref_dtypes, self.places)
        return without_adapters(self._abstract_params(self.dtypes, self.shardings))

    def _batch(self, rows: int, tokens: int, top_k: int = 0) -> TokenBatch:
        return jax.tree.map(lambda x: _abstract(x, self.decoder.rows(x.ndim)), TokenBatch.zeros(rows, tokens, top_k))

    def _per_token(
        self, params: Tree, batch: TokenBatch, keys: jax.Array | None = None
    ) -> tuple[tuple[jax.Array, ...], losses.Load | None]:
        rows = self.decoder.parted(batch)
        hidden, load = self.decoder.hidden(params, rows, keys)
        return self.decoder.joined(self.objective.per_token(self.objective.head(params), hidden, rows)), load

    def _first_of(self, params: Tree, batch: TokenBatch) -> jax.Array:
        return self._per_token(params, batch)[0][0]

    def _gradients_of(self, trainable: Tree, frozen: Tree, batch: TokenBatch, sums: Tree) -> Accumulator:
        """Adds a microbatch's gradients to `sums` in place, a layer's as soon as they are computed, so that a second
        copy of all gradients never exists."""

        def objective(trainable: Tree) -> tuple[jax.Array, losses.LossTerms]:
            found, load = self._per_token(optimizers.combine(trainable, frozen), batch, keys)
            terms = self.objective.loss(found, _held_back(batch, found[0]))
            if load is not None:
                terms = losses.with_load(terms, load, self.config.actor.router_aux_loss_coef)
            return terms.total, terms

        lora = self.model_config.lora
        keys = self._dropout_keys(trainable, self.decoder.parted(batch)) if lora is not None and lora.dropout else None
        pull_back: Any  # declared as a plain function
        total, pull_back, terms = jax.vjp(objective, trainable, has_aux=True)
        into = jax.tree.map(jax.new_ref, sums)
        pull_back.with_refs(into)(_one_after(terms, total.dtype))
        return Accumulator(jax.tree.map(jax.freeze, into), terms.denominator, terms.means, terms.maxima)

    def _dropout_keys(self, trainable: Tree, batch: TokenBatch) -> jax.Array:
        """[R] of `parted` rows, from the seed, a row's tokens and the adapters. So a resumed run draws the same
        numbers, and each update new ones. Each device makes the keys of its rows, from adapters that are not split."""
        pairs = zip(*map(jax.tree.leaves, (trainable, self.trainable)), strict=True)
        whole = [x for x, to in pairs if to.sharding.is_fully_replicated]
        weights = sum(jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32) for x in whole)
        order = jnp.arange(batch.tokens.shape[1], dtype=jnp.uint32) * 2 + 1
        rows = jnp.sum(batch.tokens.astype(jnp.uint32) * order, axis=1, dtype=jnp.uint32)
        key = jax.random.fold_in(jax.random.key(self.config.trainer.seed), weights)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)

    def _add(
        self, trainable: Tree, frozen: Tree, total: Accumulator, batch: TokenBatch
    ) -> tuple[Accumulator, jax.Array]:
        """`total` with a microbatch; and a number that is ready when it has run, and that the next one does not
        donate."""
        part = self._gradients_of(trainable, frozen, batch, total.gradients)
        denominator, means = jax.tree.map(jnp.add, (total.denominator, total.means), (part.denominator, part.means))
        maxima = jax.tree.map(jnp.maximum, total.maxima, part.maxima)
        return Accumulator(part.gradients, denominator, means, maxima), part.denominator

    def _apply(self, trainable: Tree, state: Tree, total: Accumulator) -> tuple[Tree, Tree, dict[str, jax.Array]]:
        lr = self.optimizer.lr(optimizers.update_count(state))
        trainable, state, outcome = self.optimizer.update(total.gradients, state, trainable, total.denominator)
        metrics = {name: fraction.total / fraction.denominator for name, fraction in total.means.items()}
        if (load := metrics.pop(losses.LOAD, None)) is not None:
            metrics |= losses.load_metrics(load, self.model_config.num_experts_per_tok)
        name = self.objective.name
        metrics |= total.maxima | {f"{name}/grad_norm": outcome.grad_norm, f"{name}/lr": jnp.asarray(lr)}
        finite = jnp.stack([jnp.all(jnp.isfinite(w)) for w in jax.tree.leaves(trainable)]).all()
        skipped = 1 - outcome.applied.astype(jnp.int32)
        return trainable, state, metrics | {f"{name}/skipped_updates": skipped, "finite_weights": finite}


def _held_back(batch: TokenBatch, found: jax.Array) -> TokenBatch:
    """The same batch, changed so that XLA cannot compute its sums before the log-probabilities (or values) exist.

    Sums over the batch alone are collectives that depend on nothing. XLA:CPU runs them beside the collectives of the
    loop over layers; with as many threads as (virtual) devices, they may then deadlock. XLA removes an optimization
    barrier before threads are assigned, but not a comparison of data. `_one_after` does the same for the backward loop.
    """
    never = _never(found)
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


def _abstract(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _streamed(shardings: Tree) -> Tree:
    """The same with layers' matrices in host memory."""
    layers = {name: x.with_memory_kind(HOST) if name in STREAMED else x for name, x in shardings["layers"].items()}
    return {**shardings, "layers": layers}


def _fitting(sharding: NamedSharding, x: jax.ShapeDtypeStruct, on_host: bool) -> NamedSharding:
    """A weight's sharding for its optimizer state: without splits that do not divide (fewer blocks than devices), and
    possibly in host memory."""
    shards = [math.prod(sharding.mesh.shape[axis] for axis in entry_axes(entry)) for entry in sharding.spec]
    entries = zip(x.shape, shards, sharding.spec, strict=False)
    found = sharding.update(spec=PartitionSpec(*(None if size % count else entry for size, count, entry in entries)))
    return found.with_memory_kind(HOST) if on_host else found


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.sharding, tree)
