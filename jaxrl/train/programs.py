"""The update's compiled programs, and the shapes and shardings that they are compiled for.

Purpose: they follow from the options, the model and the mesh alone, so they can be compiled without weights: ahead, by
another thread than the one that will run them (beside the first rollout), or for devices that are not there. Source
and numbers: `jaxrl.train.step`.

Programs, as (name, rows, tokens of a row) of the microbatch:

- `("accumulate", R, T)`: (trainable, frozen, accumulator, batch) -> (accumulator, a scalar); the accumulator is
  donated;
- `("logprobs", R, T)`: (params, batch) -> [R, T]; `("ref_logprobs", R, T)`: the same for the reference's dtype;
  `("values", R, T)`: the same of a critic;
- `("zeros", 0, 0)`: () -> accumulator;
- `("init", 0, 0)`: (trainable) -> optimizer state;
- `("update", 0, 0)`: (trainable, optimizer state, accumulator) -> (trainable, optimizer state, metrics); the first two
  are donated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import Config
from jaxrl.kernels.attention import Heads, choose_packed
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import is_trained, without_adapters
from jaxrl.models.quantized import ABSMAX
from jaxrl.models.streaming import HOST, STREAMED
from jaxrl.models.weights import Weight
from jaxrl.sharding.compiled import CompiledPrograms, products_of
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.rules import map_weights, train_shardings
from jaxrl.train import losses
from jaxrl.train import optimizer as optimizers
from jaxrl.train.objectives import ObjectiveOf, objective_of
from jaxrl.train.packing import TokenBatch, microbatch_shapes

Tree = Any
_NO_WINDOW = 2**30  # positions, in a model in which other layers have a window
Shape = tuple[str, int, int]
"""(program, rows of the microbatch on all devices together, tokens of a row); of programs without one, 0 and 0."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Sums over the microbatches of a minibatch: gradients, their denominator, and metrics."""

    gradients: Tree
    denominator: jax.Array
    means: dict[str, losses.Fraction]
    maxima: dict[str, jax.Array]


class TrainPrograms(CompiledPrograms):
    """Gradients, log-probabilities or values, and updates of one model on one mesh, each shape compiled once.

    Example::

        programs = TrainPrograms(config, model_config, mesh)
        programs.program(("accumulate", 4 * mesh.size, 1024))  # compiles it, or waits where another thread does
        Trainer(config, model_config, params, mesh, programs=programs)

    Attributes:
      config, model_config, mesh: what the programs are made for. platform: of the mesh's devices.
      objective: what the model is trained for; with a scalar head it is a critic.
      packed_attention: what `actor.attention` means on the mesh's platform.
      microbatches: the shapes of a microbatch on one device, ascending.
      optimizer: the update rule.
      trainable, frozen, state: shapes, dtypes and shardings of the master weights' two parts and the optimizer's state.
      sums: the same of what accumulates.
      rows: the sharding of a microbatch's arrays. shardings, dtypes: of all weights.
      places, ref_dtypes: shardings and types of the reference's, where it has weights of its own. With
        `actor.offload_reference` its layers' matrices lie in the host's memory (`jaxrl.models.streaming` does the same
        for the rollout's form), and the scan over layers brings them to the devices one by one.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        mesh: Mesh,
        *,
        total_updates: int = 0,
        trainable: optimizers.Trainable | None = None,
        interpret: bool = False,
        updates: bool = True,
        objective: ObjectiveOf = objective_of,
    ) -> None:
        """See `jaxrl.train.step.Trainer` for the arguments and for what is refused.

        Args, besides those:
          updates: whether the optimizer is among the programs that will be needed; False where gradients alone are
            computed.
          objective: what the model is trained for.
        """
        super().__init__()
        self._updates = updates
        if trainable is None:
            trainable = optimizers.everything if model_config.lora is None else is_trained
        self._made_with: dict[str, Any] = {
            "total_updates": total_updates,
            "trainable": trainable,
            "interpret": interpret,
            "objective": objective,
        }
        actor = config.actor
        self.config, self.model_config, self.mesh = config, model_config, mesh
        m, self.platform = model_config, platform_of(mesh.devices.flat[0])
        heads = Heads(m.num_heads, m.num_kv_heads, m.head_dim, actor.dtype, m.attn_logit_softcapping)
        self.packed_attention = choose_packed(actor.attention, self.platform, heads, interpret=interpret)
        self.microbatches = microbatch_shapes(config, model_config, mesh.size, self.packed_attention)
        self._widen = self.packed_attention.tiling.widen
        self.objective = own = objective(config, model_config, mesh, widen=self._widen)
        self.optimizer = optimizers.build(
            own.optim, own.grad_clip, total_updates, own.name, model_config.weights()["layers"]
        )
        self.shardings = train_shardings(model_config, mesh)
        self.rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._remat: decoder.Remat = "dots" if actor.remat == "auto" else actor.remat
        self._gather = _gather_functions(model_config, self.shardings, actor.dtype)
        self.places = _streamed(self.shardings) if actor.offload_reference else self.shardings
        self.ref_dtypes = model_config.dtypes(actor.dtype, actor.dtype)
        self.dtypes = model_config.dtypes(actor.param_dtype, actor.dtype)
        self.trainable, self.frozen = optimizers.partition(
            self._abstract_params(self.dtypes, self.shardings), trainable
        )
        chain = self.optimizer.chain
        shapes = jax.eval_shape(chain.init, self.trainable)
        shardings = optax.tree_utils.tree_map_params(
            chain,
            # a node without leaves stands where another part of the optimizer has the weight
            lambda x, own: x if isinstance(x, optax.MaskedNode) else own.sharding,
            shapes,
            self.trainable,
            transform_non_params=lambda _: self._replicated,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        self.state = jax.tree.map(_abstract, shapes, shardings)
        batch = self._batch(mesh.size, 16, own.teacher_top_k)
        empty = jax.eval_shape(self._gradients_of, self.trainable, self.frozen, batch)
        numbers: Accumulator = jax.tree.map(lambda x: _abstract(x, self._replicated), empty)
        self.sums = dataclasses.replace(numbers, gradients=self.trainable)

    def without_updates(self, mesh: Mesh) -> TrainPrograms:
        """The same for another mesh, for gradients alone."""
        return TrainPrograms(self.config, self.model_config, mesh, **self._made_with, updates=False)

    def partition(self, params: Tree) -> tuple[Tree, Tree]:
        """(trainable, frozen): the weights' two parts."""
        names = {optimizers.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.trainable)}
        return optimizers.partition(params, names.__contains__)

    def shapes(self) -> list[tuple[str, int, int]]:
        """Every program that a run with these options needs; full microbatches first, because most are."""
        kinds = [*self.objective.passes, "accumulate"]
        sizes = [(shape.rows * self.mesh.size, shape.length) for shape in reversed(self.microbatches)]
        whole = [(kind, *sizes[0]) for kind in kinds]
        smaller = [(kind, *size) for size in sizes[1:] for kind in kinds]
        first, last = ([("init", 0, 0)], [("update", 0, 0)]) if self._updates else ([], [])
        return [*first, ("zeros", 0, 0), *whole, *last, *smaller]

    def lower(self, kind: str, *sizes: int) -> Any:
        """The program of a shape (see the module), traced for the mesh's devices.

        Args:
          sizes: rows of the microbatch on all devices together, a multiple of their number; and tokens of a row.
        """
        rows, tokens = sizes or (0, 0)
        with products_of(self.config.actor.dtype, self.platform):
            return self._lower(kind, rows, tokens)

    def _lower(self, kind: str, rows: int, tokens: int) -> Any:
        params, total, state = (self.trainable, self.frozen), self.sums, self.state
        match kind:
            case "accumulate":
                jitted = jax.jit(self._add, donate_argnums=2, out_shardings=(_shardings(total), self._replicated))
                return jitted.lower(*params, total, self._batch(rows, tokens, self.objective.teacher_top_k))
            case "logprobs" | "ref_logprobs" | "values":
                jitted = jax.jit(self._first_of, out_shardings=self._replicated)
                params = self._abstract_ref() if kind == "ref_logprobs" else optimizers.combine(*params)
                return jitted.lower(params, self._batch(rows, tokens))
            case "zeros":
                zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), total)
                return jax.jit(zeros, out_shardings=_shardings(total)).lower()
            case "init":
                return jax.jit(self.optimizer.init, out_shardings=_shardings(state)).lower(self.trainable)
            case "update":
                out = (_shardings(self.trainable), _shardings(state), self._replicated)
                jitted = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=out)
                return jitted.lower(self.trainable, state, total)
        raise ValueError(f"the update has no program named {kind!r}")

    def _abstract_params(self, dtypes: Tree, shardings: Tree) -> Tree:
        def one(weight: Weight, sharding: NamedSharding, dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=sharding)

        return map_weights(one, self.model_config.weights(), shardings, dtypes)

    def _abstract_ref(self) -> Tree:
        """The reference's weights: of a model with adapters its base, which is there."""
        if self.model_config.lora is None:
            return self._abstract_params(self.ref_dtypes, self.places)
        return without_adapters(self._abstract_params(self.dtypes, self.shardings))

    def _batch(self, rows: int, tokens: int, top_k: int = 0) -> TokenBatch:
        return jax.tree.map(lambda x: _abstract(x, self.rows), TokenBatch.zeros(rows, tokens, top_k))

    def _hidden_and_head(self, params: Tree, batch: TokenBatch, keys: jax.Array | None) -> tuple[jax.Array, Tree]:
        """Final-normed hidden states [R, T, E] and the gathered parameters that the objective reads them with; `keys`
        as in `decoder.forward_scan`."""
        gathered = {name: self._gather[name](w) for name, w in params.items() if name != "layers"}
        rows = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, self.rows), batch)
        hidden = decoder.forward_scan(
            gathered | {"layers": params["layers"]},
            rows.tokens,
            rows.positions,
            self._attention(rows),
            self.model_config,
            dtype=jnp.dtype(self.config.actor.dtype),
            remat=self._remat,
            widen=self._widen,
            find=self._look_up,
            constrain=lambda x: jax.lax.with_sharding_constraint(x, self.rows),
            gather=self._gather_layer,
            keys=keys,
        )
        return hidden, self.objective.head(gathered)

    def _gather_layer(self, layer: Tree) -> Tree:
        """A layer's weights on every device; quantised ones cross as they are, and are made whole there. What lies in
        the host's memory comes to the devices first."""
        space = jax.memory.Space
        layer = {
            name: jax.device_put(w, space.Device) if jax.typeof(w).memory_space is space.Host else w
            for name, w in layer.items()
        }
        gathered = {name: self._gather["layers"][name](w) for name, w in layer.items()}
        if self.model_config.quantization == "none":
            return gathered
        dtype, names = self.config.actor.dtype, [name for name in gathered if not name.endswith(ABSMAX)]
        whole = {name: self.model_config.whole(name, gathered) for name in names}
        return {name: w.astype(dtype) if name + ABSMAX in gathered else w for name, w in whole.items()}

    def _look_up(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        if self.platform != "gpu":  # elsewhere the plain gradient has an order
            return decoder.look_up(table, tokens)
        # each device sums the gradient of its own rows; what is the same on all is summed over them by the transpose
        own = jax.shard_map(
            decoder.look_up_in_order,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), self.rows.spec),
            out_specs=self.rows.spec,
            check_vma=False,
        )
        return own(table, tokens)

    def _attention(self, rows: TokenBatch) -> Callable[..., jax.Array]:
        """Attention of [R, T] tokens, for all layers of a microbatch; each device loops over its own rows. With layers
        of several kinds it is told a layer's, as `decoder.forward_scan` calls it."""
        packed = self.packed_attention
        local = partial(jax.shard_map, mesh=self.mesh, in_specs=self.rows.spec, check_vma=False)
        shards = (jnp.asarray(rows.segment_ids), jnp.asarray(rows.positions), jnp.asarray(rows.prefix_ids))
        by_kind = [kind.window for kind in self.model_config.kinds]
        windows = list(dict.fromkeys(by_kind))

        def prepared(window: int, segment_ids: jax.Array, positions: jax.Array, prefix_ids: jax.Array) -> Any:
            """(the first position that each token sees, tiles); None for the former in a model without windows."""
            first = positions - (window or _NO_WINDOW) + 1 if any(windows) else None
            return first, packed.tile_pairs(segment_ids, positions, prefix_ids, self.config.actor.dtype, first)

        found = [local(partial(prepared, window), out_specs=self.rows.spec)(*shards) for window in windows]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *found) if len(windows) > 1 else found[0]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, kind: jax.Array | None = None) -> jax.Array:
            first, tiles = stacked
            if len(windows) > 1:
                own = jnp.asarray([windows.index(window) for window in by_kind])[kind]
                first, tiles = jax.tree.map(lambda x: x[own], stacked)
            return local(packed.attend, out_specs=self.rows.spec)(q, k, v, *shards, tiles, first)

        return attend

    def _per_token(self, params: Tree, batch: TokenBatch, keys: jax.Array | None = None) -> tuple[jax.Array, ...]:
        hidden, head = self._hidden_and_head(params, batch, keys)
        return self.objective.per_token(head, hidden, batch)

    def _first_of(self, params: Tree, batch: TokenBatch) -> jax.Array:
        return self._per_token(params, batch)[0]

    def _gradients_of(self, trainable: Tree, frozen: Tree, batch: TokenBatch) -> Accumulator:
        def objective(trainable: Tree) -> tuple[jax.Array, losses.LossTerms]:
            found = self._per_token(optimizers.combine(trainable, frozen), batch, keys)
            terms = self.objective.loss(found, _held_back(batch, found[0]))
            return terms.total, terms

        lora = self.model_config.lora
        keys = self._dropout_keys(trainable, batch) if lora is not None and lora.dropout else None
        total, pull_back, terms = jax.vjp(objective, trainable, has_aux=True)
        (gradients,) = pull_back(_one_after(terms, total.dtype))
        return Accumulator(gradients, terms.denominator, terms.means, terms.maxima)

    def _dropout_keys(self, trainable: Tree, batch: TokenBatch) -> jax.Array:
        """[R]: of the seed, a row's tokens and the adapters as they are. So a run that goes on draws as it would have,
        and each update draws anew. Each device makes those of its rows, from what it has of the adapters whole."""
        whole = [x for x, to in zip(*map(jax.tree.leaves, (trainable, self.trainable)), strict=True) if _is_whole(to)]
        weights = sum(jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32) for x in whole)
        order = jnp.arange(batch.tokens.shape[1], dtype=jnp.uint32) * 2 + 1
        rows = jnp.sum(batch.tokens.astype(jnp.uint32) * order, axis=1, dtype=jnp.uint32)
        key = jax.random.fold_in(jax.random.key(self.config.trainer.seed), weights)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)

    def _add(
        self, trainable: Tree, frozen: Tree, total: Accumulator, batch: TokenBatch
    ) -> tuple[Accumulator, jax.Array]:
        """`total` with a microbatch; and a number that is there when it has run, and that the next one leaves alone."""
        part = self._gradients_of(trainable, frozen, batch)
        added = jax.tree.map(jnp.add, total, part)
        return dataclasses.replace(added, maxima=jax.tree.map(jnp.maximum, total.maxima, part.maxima)), part.denominator

    def _apply(self, trainable: Tree, state: Tree, total: Accumulator) -> tuple[Tree, Tree, dict[str, jax.Array]]:
        gradients = jax.tree.map(lambda g: g / total.denominator.astype(g.dtype), total.gradients)
        lr = self.optimizer.lr(optimizers.update_count(state))
        trainable, state, outcome = self.optimizer.update(gradients, state, trainable)
        metrics = {name: fraction.total / fraction.denominator for name, fraction in total.means.items()}
        name = self.objective.name
        metrics |= total.maxima | {f"{name}/grad_norm": outcome.grad_norm, f"{name}/lr": jnp.asarray(lr)}
        finite = jnp.stack([jnp.all(jnp.isfinite(w)) for w in jax.tree.leaves(trainable)]).all()
        skipped = 1 - outcome.applied.astype(jnp.int32)
        return trainable, state, metrics | {f"{name}/skipped_updates": skipped, "finite_weights": finite}


def _is_whole(weight: jax.ShapeDtypeStruct) -> bool:
    assert weight.sharding is not None
    return weight.sharding.is_fully_replicated


def _held_back(batch: TokenBatch, found: jax.Array) -> TokenBatch:
    """The same batch, changed so that XLA cannot compute its sums before the log-probabilities (or values) exist.

    Sums over the batch alone are collectives that depend on nothing. XLA:CPU runs them beside the collectives inside
    the loop over layers; with as many threads as (virtual) devices, some devices may then wait in one collective and
    some in another, for ever. XLA removes an optimization barrier before threads are assigned, but not a comparison of
    data. `_one_after` does the same for the backward loop.
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
    """The same, of layers' matrices in the host's memory."""
    layers = {name: x.with_memory_kind(HOST) if name in STREAMED else x for name, x in shardings["layers"].items()}
    return {**shardings, "layers": layers}


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.sharding, tree)


def _gather_functions(config: ModelConfig, shardings: Tree, dtype: str) -> Tree:
    """Per weight, a function that gathers one layer of it on every device; its gradient is split again.

    Weights of layers are cast to the compute dtype first (half the traffic); norm scales and the weights outside the
    layers stay in the master dtype: the embedding's gradient is a long sum, and the head casts for itself.
    """

    def one(weight: Weight, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        spec = sharding.spec[1:] if weight.stacked else sharding.spec
        cast = dtype if weight.stacked and not weight.is_norm and not weight.dtype else None
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
