"""The decoder in training: hidden states of packed rows, on a mesh whose devices each hold a part of every weight.

Rows are split over all devices, and several may share one (`actor.context_parallel_size`). Inside the scan over layers
each layer's weights are gathered, as in FSDP (Zhao et al. 2023, arXiv:2304.11277); experts stay, and tokens come to
them. Each device computes its tokens as rows of its own, except for attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import Config
from jaxrl.kernels.attention import Heads, choose_packed
from jaxrl.kernels.by_rows import ByRows, at_once
from jaxrl.kernels.reference import Keys, MaskInputs
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.weights import Weight
from jaxrl.schema.devices import sharing_problem
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import platform_of
from jaxrl.sharding.rules import map_weights, padded_weights
from jaxrl.training import losses
from jaxrl.training.packing import TokenBatch
from jaxrl.training.vocabulary import Embedding, Split, split_of

Tree = Any
_NO_WINDOW = 2**30  # positions, in a model in which other layers have a window


class MeshDecoder:
    """The forward pass of one model on one mesh.

    Attributes:
      layout: its `tp` devices share rows of tokens (`actor.context_parallel_size`), its `dp` groups split them.
      attention: of packed rows. widen: as in `HeadOptions`.
      in_one_device: how rows are computed inside a device's own program: at once, or in tiles (`actor.numerics`).
    """

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        mesh: Mesh,
        shardings: Tree,
        *,
        interpret: bool = False,
        num_hosts: int = 1,
    ) -> None:
        """`config`: with types. `shardings`: of the weights in training. Raises ValueError: the devices cannot share
        rows, `actor.attention: pallas` on other devices than GPUs, or a model that the kernels refuse."""
        self._model, self._mesh, self._actor = model, mesh, config.actor
        self.is_invariant, platform = config.actor.numerics == "invariant", platform_of(mesh.devices.flat[0])
        if problem := sharing_problem(config.actor.context_parallel_size, mesh.size, num_hosts):
            raise ValueError(problem)
        self.layout = Layout(mesh, config.actor.context_parallel_size)
        self._parts = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # of a device's parts of rows
        self._choose_kernels(platform, interpret=interpret)
        self._take_weights(shardings, platform)

    def _choose_kernels(self, platform: str, *, interpret: bool) -> None:
        m, actor = self._model, self._actor
        heads = Heads(m.num_heads, m.num_kv_heads, m.head_dim, actor.dtype, m.attn_logit_softcapping)
        how = {"interpret": interpret, "invariant_parts": actor.numerics_tp if self.is_invariant else 0}
        self.attention = choose_packed(actor.attention, platform, heads, **how)
        self.widen = self.attention.tiling.widen
        self.in_one_device: ByRows = at_once
        self._by_rows: ByRows = at_once
        if self.is_invariant:
            from jaxrl.models.numerics import in_tiles, merging_exactly, refuse_invariant

            parts = actor.numerics_tp
            refuse_invariant(m, platform, parts)
            self.in_one_device = in_tiles(m, parts).for_platform(platform, interpret=interpret)
            exact = merging_exactly(m, platform, interpret=interpret)
            of_all = in_tiles(exact, parts, self._mesh, self._parts.spec, dtype=actor.dtype)
            self._by_rows = of_all.for_platform(platform, interpret=interpret)

    def _take_weights(self, shardings: Tree, platform: str) -> None:
        """What brings each weight to the tokens, or the tokens to it."""
        m, actor = self._model, self._actor
        merges = self.is_invariant and m.lora is not None
        self._cast = None if merges else actor.dtype  # what is merged is cast then, as in a weight sync
        self._gather = _gather_functions(m, shardings, self._cast, experts=self.is_invariant)
        split = split_of("embed", shardings)
        ordered = platform == "gpu"
        self._embedding = Embedding(self._mesh, self._parts.spec, split, jnp.dtype(actor.dtype), ordered=ordered)
        # invariant numbers need all parts of a token's experts on its device, in the order of the rollout's
        stay = m.num_experts and not self.is_invariant
        self._mix = _mix(self._mesh, shardings, self._parts.spec) if stay else None

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
        same = jax.shard_map(
            lambda tree: tree, mesh=self._mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=False
        )
        return same(tree)

    def hidden(
        self, params: Tree, rows: TokenBatch, keys: jax.Array | None = None
    ) -> tuple[jax.Array, losses.Load | None]:
        """Final-normed hidden states [R, T, E] of `parted` rows, and the load of a policy's experts, if it has any;
        `keys` as in `decoder.forward_scan`."""
        m, actor, is_token = self._model, self._actor, jnp.asarray(rows.segment_ids) > 0
        tells_load = m.num_experts > 0 and not m.scalar_head
        out = decoder.forward_scan(
            params,
            jnp.asarray(rows.tokens),
            jnp.asarray(rows.positions),
            self._attention(rows),
            m,
            dtype=jnp.dtype(actor.dtype),
            remat="dots" if actor.remat == "auto" else actor.remat,
            widen=self.widen,
            reduce_dtype=jnp.dtype(actor.reduce_dtype),
            find=self._embedding,
            constrain=lambda x: jax.lax.with_sharding_constraint(x, self._parts),
            gather=self._gather_layer,
            keys=keys,
            mix=self._mix,
            by_rows=self._by_rows,
            tally=partial(losses.load_of, is_token=is_token) if tells_load else None,
        )
        return out if tells_load else (out, None)

    def _gather_layer(self, layer: Tree) -> Tree:
        """A layer's weights on every device; quantised ones are gathered as codes and dequantised there. Weights in
        host memory come to the devices first."""
        space = jax.memory.Space
        layer = {
            name: jax.device_put(w, space.Device) if jax.typeof(w).memory_space is space.Host else w
            for name, w in layer.items()
        }
        gathered = {name: self._gather[name](w) for name, w in layer.items()}
        if self._model.quantization != "none":
            from jaxrl.models.quantized import ABSMAX

            names, quantised = [name for name in gathered if not name.endswith(ABSMAX)], gathered
            whole = {name: self._model.whole(name, quantised) for name in names}
            gathered = {n: w.astype(self._cast or w.dtype) if n + ABSMAX in quantised else w for n, w in whole.items()}
        if self.is_invariant:
            plain = dataclasses.replace(self._model, quantization="none")
            gathered = padded_weights(plain, self._actor.numerics_tp, gathered)
        return gathered

    def _attention(self, rows: TokenBatch) -> Callable[..., jax.Array]:
        """Attention of [R, T] tokens of `parted` rows, for all layers of a microbatch; each device loops over its own.

        Where devices share rows, each gathers their keys and values (as in Llama 3: Grattafiori et al. 2024,
        arXiv:2407.21783, section 3.3.2), and in the backward pass their gradients are added and split.
        """
        packed, whole = self.attention, Split(1, self.layout.tp_axes)
        parts, is_shared = self._parts.spec, self.layout.tp > 1
        local = partial(jax.shard_map, mesh=self._mesh, in_specs=parts, check_vma=False)
        mask = MaskInputs(jnp.asarray(rows.segment_ids), jnp.asarray(rows.positions), jnp.asarray(rows.prefix_ids))
        by_kind = [kind.window for kind in self._model.kinds]
        windows = list(dict.fromkeys(by_kind))

        def all_keys(segment_ids: jax.Array, positions: jax.Array) -> Keys:
            both = whole.whole(jnp.stack([segment_ids, positions], axis=-1), jnp.int32)
            return Keys(both[..., 0], both[..., 1])

        if is_shared:
            mask = mask._replace(keys=local(all_keys, out_specs=parts)(mask.segment_ids, mask.positions))

        def prepared(window: int, mask: MaskInputs) -> Any:
            """(the first position that each token sees, or None in a model without windows; tiles)."""
            first = mask.positions - (window or _NO_WINDOW) + 1 if any(windows) else None
            return first, packed.tile_pairs(mask._replace(first=first), self._actor.dtype)

        found = [local(partial(prepared, window), out_specs=parts)(mask) for window in windows]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *found) if len(windows) > 1 else found[0]

        has_sinks = self._model.attention_sinks
        reduce_dtype = self._actor.reduce_dtype

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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole_rows(split: Split, reduce_dtype: str, x: jax.Array) -> jax.Array:
    """Keys or values of all devices that share rows; their gradients are added in at least `reduce_dtype`."""
    return split.whole(x, x.dtype)


def _whole_rows_backward(split: Split, reduce_dtype: str, _: None, d_x: jax.Array) -> tuple[jax.Array]:
    return (split.shard(d_x.astype(jnp.promote_types(d_x.dtype, reduce_dtype))).astype(d_x.dtype),)


_whole_rows.defvjp(lambda *arguments: (_whole_rows(*arguments), None), _whole_rows_backward)


def _mix(mesh: Mesh, shardings: Tree, rows: PartitionSpec) -> decoder.Mix:
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
