"""The optimizer: clipping by global norm, AdamW or Muon, a learning-rate schedule; non-finite gradients are skipped.

Built from optax (Loshchilov & Hutter 2019 for AdamW; Pascanu et al. 2013 for clipping; Jordan et al. 2024 for Muon,
scaled as by Liu et al. 2025, arXiv:2502.16982, eq. 4, so that it takes AdamW's learning rates). Muon trains the
matrices of the layers, each layer separately; norms, biases, the embedding and the heads have AdamW. Departures: a
warm-up of n updates starts at lr/n. verl and transformers start at 0 and have the same rates one update later: here no
rollout is spent on an update that changes nothing. `optax.apply_if_finite` is not used: it lets an update through after
a number of failures in a row.

Parameters are partitioned into trainable and frozen ones before anything is differentiated: `partition` replaces the
leaves of the other part by None, which is an empty subtree to JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxrl.config import ConfigError, OptimSection
from jaxrl.models.lora import is_trained
from jaxrl.models.streaming import is_on_host
from jaxrl.models.weights import Weight
from jaxrl.training.weightwise import weightwise

Tree = Any


def partition(params: Tree, adapters_alone: bool) -> tuple[Tree, Tree]:
    """(trainable, frozen): two trees like `params`, with None where a leaf belongs to the other."""

    def keep(wanted: bool) -> Tree:
        def one(path: Any, leaf: Any) -> Any:
            return leaf if (not adapters_alone or is_trained(path_name(path))) == wanted else None

        return jax.tree_util.tree_map_with_path(one, params)

    return keep(True), keep(False)


def combine(trainable: Tree, frozen: Tree) -> Tree:
    """The inverse of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None)


def path_name(path: Any) -> str:
    """A key path as `layers/q`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def schedule(optim: OptimSection, total_updates: int = 0, model: str = "actor") -> optax.Schedule:
    """Learning rate as a function of the number of updates made so far. `total_updates`: where cosine and linear
    schedules end; they stay there afterwards, and a warm-up may be longer. `model`: the section that has `optim`."""
    warmup, decay = optim.lr_warmup_steps, max(total_updates - optim.lr_warmup_steps, 1)
    if optim.lr_scheduler_type != "constant" and not total_updates:
        raise ConfigError(
            f"{model}.optim.lr_scheduler_type={optim.lr_scheduler_type} needs the number of updates in all: set "
            "trainer.total_training_steps"
        )
    match optim.lr_scheduler_type:
        case "constant":
            after = optax.constant_schedule(optim.lr)
        case "cosine":
            after = optax.cosine_decay_schedule(optim.lr, decay, alpha=optim.min_lr_ratio)
        case "linear":
            after = optax.linear_schedule(optim.lr, optim.lr * optim.min_lr_ratio, decay)
    if not warmup:
        return after

    def warmed_up(count: Any) -> Any:
        return jnp.where(count < warmup, optim.lr * (count + 1) / warmup, after(count - warmup))

    return warmed_up


class UpdateOutcome(NamedTuple):
    """Scalars: the gradient's global norm before clipping, and whether it was finite, so that it was applied."""

    grad_norm: jax.Array
    applied: jax.Array


class Optimizer(NamedTuple):
    """An optax chain, the schedule inside it (to be reported), the global norm to clip at (0: off), and whether the
    step takes one layer after another (`weightwise`)."""

    chain: optax.GradientTransformationExtraArgs
    lr: optax.Schedule
    grad_clip: float
    by_layer: bool = False

    def update(
        self, sums: Tree, state: Tree, params: Tree, denominator: jax.Array | float = 1.0
    ) -> tuple[Tree, Tree, UpdateOutcome]:
        """(params, state, outcome) after one update; both unchanged if any entry of the gradient `sums` / `denominator`
        is not finite. A state in host memory is copied to the devices a layer at a time; the bits are the same."""

        def mean(g: jax.Array) -> jax.Array:
            return g / jnp.asarray(denominator, g.dtype)

        norm = jnp.sqrt(sum(jnp.sum(jnp.square(mean(g))) for g in jax.tree.leaves(sums)))
        finite = jnp.isfinite(norm)

        def step(sums: Tree, state: Tree, params: Tree, place: Any) -> tuple[Tree, Tree]:
            gradients = jax.tree.map(mean, sums)
            if self.grad_clip:
                factor = self.grad_clip / jnp.maximum(norm, self.grad_clip)
                gradients = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
            updates, new_state = self.chain.update(gradients, state, params, place=place)

            def choose(new: jax.Array, old: jax.Array) -> jax.Array:
                return jnp.where(finite, new, old)

            new_params = optax.apply_updates(params, updates)
            return jax.tree.map(choose, new_params, params), jax.tree.map(choose, new_state, state)

        by_layer = self.by_layer or any(map(is_on_host, jax.tree.leaves(state)))
        whole = weightwise(step, self.chain.init, by_layer=by_layer)
        return *whole(sums, state, params), UpdateOutcome(norm, finite)


def build(
    optim: OptimSection,
    grad_clip: float,
    total_updates: int = 0,
    model: str = "actor",
    weights: Mapping[str, Any] | None = None,
) -> Optimizer:
    """The optimizer of a section; `total_updates` and `model` as in `schedule`. `weights`: the model's, as declared;
    needed for Muon and for states in int8."""
    lr = schedule(optim, total_updates, model)
    assert weights is not None or (optim.name, optim.state_dtype == "int8") == ("adamw", False), "looks at dims"
    declared = {path_name(path): each for path, each in jax.tree_util.tree_leaves_with_path(weights or {})}

    def kept(inner: optax.GradientTransformation) -> optax.GradientTransformation:
        if optim.state_dtype == "float32":
            return inner
        from jaxrl.training.moments import block_of, kept_as

        blocks = {name: block_of(each) for name, each in declared.items()} if optim.state_dtype == "int8" else {}
        return kept_as(optim.state_dtype, inner, blocks)

    scale = kept(optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2))
    if optim.name == "muon":
        matrices = {name: each for name, each in declared.items() if name.startswith("layers/") and each.is_matrix}
        scale = _muon(optim.momentum, matrices, scale, kept)
    chain = optax.chain(
        scale,
        optax.add_decayed_weights(optim.weight_decay) if optim.weight_decay else optax.identity(),
        optax.scale_by_learning_rate(lr),
    )
    return Optimizer(chain, lr, grad_clip, by_layer=(optim.name, optim.state_dtype) != ("adamw", "float32"))


_MUON_RMS = 0.2  # of an update, as AdamW's usually is (arXiv:2502.16982, §2.2)


def _muon(
    momentum: float,
    matrices: Mapping[str, Weight],
    others: optax.GradientTransformation,
    kept: Callable[[optax.GradientTransformation], optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Orthogonalised momentum, `kept` in its type, for `matrices` (by their paths), and `others` for all else."""

    def dims(path: Any, gradient: Any) -> MuonDimensionNumbers:
        first, split = _dims(matrices[path_name(path)])
        return MuonDimensionNumbers(tuple(range(first, split)), tuple(range(split, gradient.ndim)))

    def scaled(path: Any, update: jax.Array) -> jax.Array:
        first, split = _dims(matrices[path_name(path)])
        return update * (_MUON_RMS * max(prod(update.shape[first:split]), prod(update.shape[split:])) ** 0.5)

    def label(path: Any, _: Any) -> str:
        return "muon" if path_name(path) in matrices else "adam"

    by_path = jax.tree_util.tree_map_with_path
    orthogonalised = scale_by_muon(beta=momentum, weight_dimension_numbers=lambda updates: by_path(dims, updates))
    of_matrices = optax.chain(kept(orthogonalised), optax.stateless(lambda updates, _: by_path(scaled, updates)))
    return optax.partition({"muon": of_matrices, "adam": others}, lambda params: by_path(label, params))


def _dims(matrix: Weight) -> tuple[int, int]:
    """The first dim of inputs, and of outputs, of a weight that stacks matrices."""
    return matrix.num_stacked, matrix.num_stacked + matrix.num_inputs


def update_count(state: Tree) -> jax.Array:
    """How many updates a state has seen (skipped ones are not counted). Scalar int32."""
    return state[-1].count
