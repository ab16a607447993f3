"""The update's compiled programs, and the shapes and shardings that they are compiled for.

They follow from the options, the model and the mesh alone, so they can be compiled without weights: ahead, in another
thread (beside the first rollout), or for devices that are not there. Source and memory: `jaxrl.training.trainer`.

Programs, as (name, rows, tokens of a row) of the microbatch; what they replace is donated:

- `("accumulate", R, T)`: (trainable, frozen, accumulator, batch) -> (accumulator, a scalar);
- `("logprobs", R, T)`: (params, batch) -> [R, T]; `ref_logprobs`: for the reference's dtype; `values`: of a critic;
- `("zeros", 0, 0)`: () -> accumulator; `("init", 0, 0)`: (trainable) -> optimizer state;
- `("update", 0, 0)`: (trainable, optimizer state, accumulator) -> (trainable, optimizer state, metrics).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import Config
from jaxrl.kernels.attention import Heads, choose_packed
from jaxrl.kernels.by_rows import at_once
from jaxrl.kernels.reference import Keys, MaskInputs
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import is_trained, without_adapters
from jaxrl.models.streaming import HOST, STREAMED
from jaxrl.models.weights import Weight
from jaxrl.schema.devices import sharing_problem
from jaxrl.sharding.compiled import CompiledPrograms, products_of
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import entry_axes, platform_of
from jaxrl.sharding.rules import map_weights, padded_weights, train_shardings
from jaxrl.training import losses
from jaxrl.training import optimizer as optimizers
from jaxrl.training.moments import Codes
from jaxrl.training.objectives import ObjectiveOf, objective_of
from jaxrl.training.packing import Packed, TokenBatch, dealt, microbatch_shapes, pack
from jaxrl.training.vocabulary import Embedding, Split, split_of
from jaxrl.types import TrainBatch

Tree = Any
_NO_WINDOW = 2**30  # positions, in a model in which other layers have a window
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
      microbatches: the shapes of a microbatch on one device, ascending.
      trainable, frozen, state, sums: shapes, dtypes and shardings of trained and frozen weights, the optimizer's state
        and the accumulator.
      layout: its `tp` devices share rows of tokens (`actor.context_parallel_size`), its `dp` groups split them.
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
        trainable: optimizers.Trainable | None = None,
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
          trainable: which parameters are trained. Default: the adapters of a model that has some, else all.
          interpret: run the GPU kernels of `actor.attention: pallas` as plain JAX, on any device (slow; for tests).
          updates: whether the optimizer's programs will be needed; False where gradients alone are computed.
          whole: the mesh of which `mesh` is a part; weights are split in the same dims as there.

        Raises:
          ValueError: `actor.attention: pallas` on other devices than GPUs, or for a model that the kernels refuse.
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
        m, self.platform = model_config, platform_of(mesh.devices.flat[0])
        config = config.with_types(self.platform)
        actor = config.actor
        self.config, self.model_config, self.mesh = config, model_config, mesh
        if problem := sharing_problem(actor.context_parallel_size, mesh.size, config.hosts.num if whole is None else 1):
            raise ValueError(problem)
        self.layout = Layout(mesh, actor.context_parallel_size)
        heads = Heads(m.num_heads, m.num_kv_heads, m.head_dim, actor.dtype, m.attn_logit_softcapping)
        self._is_invariant = actor.numerics == "invariant"
        parts = actor.numerics_tp
        how = {"interpret": interpret, "invariant_parts": parts if self._is_invariant else 0}
        self.packed_attention = choose_packed(actor.attention, self.platform, heads, **how)
        rows = PartitionSpec(mesh.axis_names)  # of a device's parts of rows
        self._by_rows = tiles = at_once
        if self._is_invariant:
            from jaxrl.models.numerics import in_tiles, merging_exactly, refuse_invariant

            refuse_invariant(model_config, self.platform, parts)
            tiles = in_tiles(model_config, parts).for_platform(self.platform, interpret=interpret)
            exact = merging_exactly(model_config, self.platform, interpret=interpret)
            all_tiles = in_tiles(exact, parts, mesh, rows, dtype=actor.dtype)
            self._by_rows = all_tiles.for_platform(self.platform, interpret=interpret)
        self.microbatches = microbatch_shapes(config, model_config, mesh.size, self.packed_attention)
        self._widen = self.packed_attention.tiling.widen
        self.objective = own = objective(config, model_config, mesh, widen=self._widen, by_rows=tiles)
        self.optimizer = optimizers.build(own.optim, own.grad_clip, total_updates, own.name, model_config.weights())
        self.shardings = train_shardings(model_config, mesh, whole)
        self._parts = NamedSharding(mesh, rows)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._remat: decoder.Remat = "dots" if actor.remat == "auto" else actor.remat
        merges = self._is_invariant and model_config.lora is not None
        self._cast = None if merges else actor.dtype  # what is merged is cast then, as in a weight sync
        self._gather = _gather_functions(model_config, self.shardings, self._cast, experts=self._is_invariant)
        split = split_of("embed", self.shardings)
        self._embedding = Embedding(mesh, rows, split, jnp.dtype(actor.dtype), ordered=self.platform == "gpu")
        # invariant numbers need all parts of a token's experts on its device, in the order of the rollout's
        split = model_config.num_experts and not self._is_invariant
        self._mix = _mix(model_config, mesh, self.shardings, rows) if split else None
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
            # no leaves: another part of the optimizer has the weight; two leaves: it is in codes
            lambda x, own: jax.tree.map(lambda x: _fitting(own.sharding, x, actor.offload_optimizer), x),
            shapes,
            self.trainable,
            transform_non_params=lambda _: self._replicated,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode | Codes),
        )
        self.state = jax.tree.map(_abstract, shapes, shardings)
        batch = self._batch(self.layout.dp, 16 * self.layout.tp, own.teacher_top_k)
        empty = jax.eval_shape(self._gradients_of, self.trainable, self.frozen, batch, self.trainable)
        numbers: Accumulator = jax.tree.map(lambda x: _abstract(x, self._replicated), empty)
        self.sums = dataclasses.replace(numbers, gradients=self.trainable)

    def without_updates(self, mesh: Mesh) -> TrainPrograms:
        """The same for a part of the mesh, for gradients alone."""
        return TrainPrograms(self.config, self.model_config, mesh, **self._made_with, updates=False, whole=self.mesh)

    def partition(self, params: Tree) -> tuple[Tree, Tree]:
        """(trainable, frozen): the weights' two parts."""
        names = {optimizers.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.trainable)}
        return optimizers.partition(params, names.__contains__)

    def shapes(self) -> list[tuple[str, int, int]]:
        """Every program that a run with these options needs; full microbatches first, because most are."""
        kinds = [*self.objective.passes, "accumulate"]
        sizes = [(shape.rows * self.layout.dp, shape.length) for shape in reversed(self.microbatches)]
        whole = [(kind, *sizes[0]) for kind in kinds]
        smaller = [(kind, *size) for size in sizes[1:] for kind in kinds]
        first, last = ([("init", 0, 0)], [("update", 0, 0)]) if self._updates else ([], [])
        return [*first, ("zeros", 0, 0), *whole, *last, *smaller]

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
            lambda x: jax.make_array_from_callback(x.shape, self.rows(x.ndim), x.__getitem__), microbatch
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
        if not self._is_invariant or self.platform != "gpu":
            return super().compiler_options(kind)
        from jaxrl.kernels.invariant import GPU_COMPILER_OPTIONS

        return {**GPU_COMPILER_OPTIONS}

    def lower(self, kind: str, *sizes: int, platforms: tuple[str, ...] | None = None) -> Any:
        """The program of a `ProgramShape`, traced for the mesh's devices; lowered for `platforms` if given."""
        rows, tokens = sizes or (0, 0)
        with products_of(self.config.actor.dtype, self.platform):
            return self._trace(kind, rows, tokens).lower(lowering_platforms=platforms)

    def _trace(self, kind: str, rows: int, tokens: int) -> Any:
        params, total, state = (self.trainable, self.frozen), self.sums, self.state
        match kind:
            case "accumulate":
                jitted = jax.jit(self._add, donate_argnums=2, out_shardings=(_shardings(total), self._replicated))
                return jitted.trace(*params, total, self._batch(rows, tokens, self.objective.teacher_top_k))
            case "logprobs" | "ref_logprobs" | "values":
                jitted = jax.jit(self._first_of, out_shardings=self._replicated)
                params = self._abstract_ref() if kind == "ref_logprobs" else optimizers.combine(*params)
                return jitted.trace(params, self._batch(rows, tokens))
            case "zeros":
                zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), total)
                return jax.jit(zeros, out_shardings=_shardings(total)).trace()
            case "init":
                return jax.jit(self.optimizer.chain.init, out_shardings=_shardings(state)).trace(self.trainable)
            case "update":
                out = (_shardings(self.trainable), _shardings(state), self._replicated)
                jitted = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=out)
                return jitted.trace(self.trainable, state, total)
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
        return jax.tree.map(lambda x: _abstract(x, self.rows(x.ndim)), TokenBatch.zeros(rows, tokens, top_k))

    def rows(self, ndim: int) -> NamedSharding:
        """The sharding of a microbatch's array: rows over groups of devices, their tokens over each group's devices."""
        return self.layout.sharding(*("dp", "tp")[:ndim])

    def parted(self, batch: TokenBatch) -> TokenBatch:
        """The same batch with each device's parts of rows as separate rows, [R * C, T / C] where C devices share rows.
        Everything but attention and losses is computed so: a token needs no other token there."""
        return self._as(lambda x: self.rows(x.ndim).spec, lambda _: self._parts.spec, batch)

    def joined(self, found: Tree) -> Tree:
        """The inverse of `parted`, for arrays [R, T] or [R, T, ...]."""
        return self._as(lambda _: self._parts.spec, lambda _: self.rows(2).spec, found)

    def _as(self, before: Callable[[Any], PartitionSpec], after: Callable[[Any], PartitionSpec], tree: Tree) -> Tree:
        """Relabels shardings: each device keeps its data."""
        specs = jax.tree.map(before, tree), jax.tree.map(after, tree)
        same = jax.shard_map(lambda tree: tree, mesh=self.mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=False)
        return same(tree)

    def _hidden_and_head(
        self, params: Tree, rows: TokenBatch, keys: jax.Array | None
    ) -> tuple[jax.Array, Tree, losses.Load | None]:
        """Final-normed hidden states [R, T, E] of `parted` rows, the objective's head, and the load of a policy's
        experts, if it has any; `keys` as in `decoder.forward_scan`."""
        is_token = jnp.asarray(rows.segment_ids) > 0
        tells_load = self.model_config.num_experts > 0 and not self.model_config.scalar_head
        out = decoder.forward_scan(
            params,
            jnp.asarray(rows.tokens),
            jnp.asarray(rows.positions),
            self._attention(rows),
            self.model_config,
            dtype=jnp.dtype(self.config.actor.dtype),
            remat=self._remat,
            widen=self._widen,
            reduce_dtype=jnp.dtype(self.config.actor.reduce_dtype),
            find=self._embedding,
            constrain=lambda x: jax.lax.with_sharding_constraint(x, self._parts),
            gather=self._gather_layer,
            keys=keys,
            mix=self._mix,
            by_rows=self._by_rows,
            tally=partial(losses.load_of, is_token=is_token) if tells_load else None,
        )
        hidden, load = out if tells_load else (out, None)
        return hidden, self.objective.head(params), load

    def _gather_layer(self, layer: Tree) -> Tree:
        """A layer's weights on every device; quantised ones are gathered as codes and dequantised there. Weights in
        host memory come to the devices first."""
        space = jax.memory.Space
        layer = {
            name: jax.device_put(w, space.Device) if jax.typeof(w).memory_space is space.Host else w
            for name, w in layer.items()
        }
        gathered = {name: self._gather[name](w) for name, w in layer.items()}
        if self.model_config.quantization != "none":
            from jaxrl.models.quantized import ABSMAX

            names, quantised = [name for name in gathered if not name.endswith(ABSMAX)], gathered
            whole = {name: self.model_config.whole(name, quantised) for name in names}
            gathered = {n: w.astype(self._cast or w.dtype) if n + ABSMAX in quantised else w for n, w in whole.items()}
        if self._is_invariant:
            plain = dataclasses.replace(self.model_config, quantization="none")
            gathered = padded_weights(plain, self.config.actor.numerics_tp, gathered)
        return gathered

    def _attention(self, rows: TokenBatch) -> Callable[..., jax.Array]:
        """Attention of [R, T] tokens of `parted` rows, for all layers of a microbatch; each device loops over its own.

        Where devices share rows, each gathers their keys and values (as in Llama 3: Grattafiori et al. 2024,
        arXiv:2407.21783, section 3.3.2), and in the backward pass their gradients are added and split.
        """
        packed, whole = self.packed_attention, Split(1, self.layout.tp_axes)
        parts, is_shared = self._parts.spec, self.layout.tp > 1
        local = partial(jax.shard_map, mesh=self.mesh, in_specs=parts, check_vma=False)
        mask = MaskInputs(jnp.asarray(rows.segment_ids), jnp.asarray(rows.positions), jnp.asarray(rows.prefix_ids))
        by_kind = [kind.window for kind in self.model_config.kinds]
        windows = list(dict.fromkeys(by_kind))

        def all_keys(segment_ids: jax.Array, positions: jax.Array) -> Keys:
            both = whole.whole(jnp.stack([segment_ids, positions], axis=-1), jnp.int32)
            return Keys(both[..., 0], both[..., 1])

        if is_shared:
            mask = mask._replace(keys=local(all_keys, out_specs=parts)(mask.segment_ids, mask.positions))

        def prepared(window: int, mask: MaskInputs) -> Any:
            """(the first position that each token sees, or None in a model without windows; tiles)."""
            first = mask.positions - (window or _NO_WINDOW) + 1 if any(windows) else None
            return first, packed.tile_pairs(mask._replace(first=first), self.config.actor.dtype)

        found = [local(partial(prepared, window), out_specs=parts)(mask) for window in windows]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *found) if len(windows) > 1 else found[0]

        has_sinks = self.model_config.attention_sinks
        reduce_dtype = self.config.actor.reduce_dtype

        def of_part(q: jax.Array, k: jax.Array, v: jax.Array, *others: Any) -> jax.Array:
            if is_shared:
                k, v = _whole_rows(whole, reduce_dtype, k), _whole_rows(whole, reduce_dtype, v)
            return packed.attend(q, k, v, *others)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array) -> jax.Array:
            *kind, sinks = more if has_sinks else (*more, None)
            first, tiles = stacked
            if len(windows) > 1:
                own = jnp.asarray([windows.index(window) for window in by_kind])[kind[0]]
                first, tiles = jax.tree.map(lambda x: x[own], stacked)
            arguments = q, k, v, mask._replace(first=first), tiles
            specs = (*(parts for _ in arguments), PartitionSpec())
            return local(of_part, in_specs=specs, out_specs=parts)(*arguments, sinks)

        return attend

    def _per_token(
        self, params: Tree, batch: TokenBatch, keys: jax.Array | None = None
    ) -> tuple[tuple[jax.Array, ...], losses.Load | None]:
        rows = self.parted(batch)
        hidden, head, load = self._hidden_and_head(params, rows, keys)
        return self.joined(self.objective.per_token(head, hidden, rows)), load

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
        keys = self._dropout_keys(trainable, self.parted(batch)) if lora is not None and lora.dropout else None
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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole_rows(split: Split, reduce_dtype: str, x: jax.Array) -> jax.Array:
    """Keys or values of all devices that share rows; their gradients are added in at least `reduce_dtype`."""
    return split.whole(x, x.dtype)


def _whole_rows_backward(split: Split, reduce_dtype: str, _: None, d_x: jax.Array) -> tuple[jax.Array]:
    return (split.shard(d_x.astype(jnp.promote_types(d_x.dtype, reduce_dtype))).astype(d_x.dtype),)


_whole_rows.defvjp(lambda *arguments: (_whole_rows(*arguments), None), _whole_rows_backward)


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


def _mix(config: ModelConfig, mesh: Mesh, shardings: Tree, rows: PartitionSpec) -> decoder.Mix:
    """The experts' computation as training splits it: over all devices, each with different tokens."""
    from jaxrl.models import experts

    own = {name: shardings["layers"][name].spec[1:] for name in experts.WEIGHTS if name in shardings["layers"]}
    specs = {name: PartitionSpec(*spec) for name, spec in own.items()}
    return experts.over_devices(mesh, specs, rows, batched=False, gathered=True)


def _gather_functions(config: ModelConfig, shardings: Tree, dtype: str | None, *, experts: bool) -> Tree:
    """Per weight of the layers, a function that gathers one layer of it on every device; its gradient is split again.

    Weights are cast to the compute dtype first (half the traffic); norm scales stay in the master dtype. `experts`:
    whether experts' weights are gathered too.
    """

    def one(weight: Weight, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        spec = sharding.spec[1:]
        cast = dtype if not weight.is_norm and not weight.dtype else None
        if weight.has_experts and not experts:  # they stay where they are, and the tokens come to them
            return lambda w: w.astype(cast)
        return _gather(NamedSharding(sharding.mesh, PartitionSpec(*spec)), cast)

    return map_weights(one, config.weights()["layers"], shardings["layers"])


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
