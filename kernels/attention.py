"""One interface to attention over a paged KV cache, and to attention over packed rows.

Prefill, decode and verification are the same operation with a different number of queries per row: `PagedAttention`
takes C queries a row and masks by position. On GPUs a decode step's attention can also be the kernel that begins with
the layer's product and writes the new keys and values (`decode_pallas`). `rollout.attention` chooses the implementation
over the cache, and `actor.attention` that on packed rows:

- `"reference"`: plain jnp (`jaxrl.kernels.reference`), on any platform; the oracle of all tests;
- `"pallas"`: our GPU kernels (`paged_pallas`, `decode_pallas`, `packed_pallas`). Over the cache on TPUs it is JAX's
  own, for one query a row (`paged_tpu`; the reference for several). A ValueError for unsupported shapes or dtypes;
- `"auto"`, over the cache: the kernels where the platform has some that take the shapes and dtypes, else the reference.
  On packed rows: the kernels on GPUs where they take the model's heads and dtype, else jnp in tiles (`packed`). Where
  JAX has no Pallas on Triton, which it deprecates from 0.11 on, `auto` is jnp. All of this is known while tracing.

docs/kernels.md explains the kernels and has measurements.

Dims: R rows, C queries per row, H query heads, K key/value heads, D head dim; N blocks, P positions per block, W blocks
per table, T tokens of a packed row. All of it is local to one device: callers run it inside `shard_map`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax

from jaxrl.kernels import packed, reference
from jaxrl.kernels.by_rows import with_gradient_of
from jaxrl.kernels.reference import PLAIN, Cached, MaskInputs, Rule

if TYPE_CHECKING:
    from jaxrl.kernels.packed_pallas import TileLists

Implementation = Literal["auto", "reference", "pallas"]
_NO_TRITON = "this JAX has no Pallas on Triton"
_KERNEL_KEYS = 128  # two tiles of keys: the kernels skip most other tiles, so packing may count on about as much


def has_triton() -> bool:
    """Whether JAX has the language of most of our GPU kernels."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


class PagedAttention(NamedTuple):
    """Attention over the paged cache on devices of one platform. Hashable; `choose_paged` makes one from an option."""

    implementation: Implementation | Literal["invariant", "invariant_pallas"]  # as above, or the file of that name
    interpret: bool = False  # run the GPU kernels as plain JAX, on any device (slow; for tests)
    parts: int = 1  # in which `invariant` computes a device's heads
    on_tpu: bool = False  # `pallas` is `paged_tpu` for one query a row, and the reference for more

    def write(self, pool_KNPD: Cached, new_RCKD: Cached, *rows: jax.Array) -> Cached:
        """The pool with new keys or values; `rows`: as in `reference.write_kv`."""
        return reference.write_kv(pool_KNPD, new_RCKD, *rows, by_head=self.on_tpu)

    def attend(
        self,
        q_RCHD: jax.Array,
        k_KNPD: Cached,
        v_KNPD: Cached,
        tables_RW: jax.Array,
        positions_RC: jax.Array,
        rule: Rule = PLAIN,
        sinks_H: jax.Array | None = None,
    ) -> jax.Array:
        """[R, C, H, D]: query (r, c) sees the row's cached positions 0 .. positions[r, c], its own included, within the
        rule's window; `sinks_H` as in `reference.packed_attention`. Raises ValueError for shapes, dtypes or rules that
        the kernels of `pallas` and `invariant_pallas` refuse."""
        arrays = (q_RCHD, k_KNPD, v_KNPD, tables_RW, positions_RC)
        if self.implementation == "invariant":
            from jaxrl.kernels import invariant

            return invariant.paged_attention(*arrays, rule, sinks_H, self.parts)
        if self.implementation == "invariant_pallas":
            from jaxrl.kernels import invariant_pallas, paged_pallas  # here for the same reasons as below

            tiles = invariant_pallas.sizes_of(q_RCHD.dtype)
            how = {"rule": rule, "sinks_H": sinks_H, "tiles": tiles, "interpret": self.interpret}
            return paged_pallas.paged_attention(*arrays, **how)
        if self.on_tpu:
            from jaxrl.kernels import paged_tpu  # here for the same reasons as below

            reason = paged_tpu.refusal(q_RCHD, k_KNPD, rule, sinks_H)
            if self.implementation == "reference" or q_RCHD.shape[1] > 1 or (reason and self.implementation == "auto"):
                return reference.paged_attention(*arrays, rule, sinks_H, by_head=True)
            if reason:
                raise ValueError(f"rollout.attention (pallas) must be auto or reference: {reason}")
            return paged_tpu.paged_attention(*arrays, rule)
        if self.implementation == "reference" or (self.implementation == "auto" and rule.softcap):
            return reference.paged_attention(*arrays, rule, sinks_H)
        # Imported here: a run on CPU need not wait for it, and works with a JAX that lacks this backend of Pallas.
        from jaxrl.kernels import paged_pallas

        if self.implementation == "auto" and paged_pallas.refusal(q_RCHD, k_KNPD, v_KNPD, k_KNPD.shape[0]):
            return reference.paged_attention(*arrays, rule, sinks_H)
        return paged_pallas.paged_attention(*arrays, rule=rule, sinks_H=sinks_H, interpret=self.interpret)

    def decodes(self, heads: int, kv_heads: int, dim: int, dtype: Any) -> bool:
        """Whether a decode step's attention can be `decode_pallas.decode_attention`, for a device's heads."""
        if self.on_tpu or self.implementation not in ("auto", "pallas"):
            return False
        from jaxrl.kernels import decode_pallas

        return decode_pallas.decode_refusal(heads, kv_heads, dim, dtype) is None


def choose_paged(
    implementation: Implementation,
    platform: str,
    softcap: float = 0.0,
    *,
    interpret: bool = False,
    invariant_parts: int = 0,
) -> PagedAttention:
    """Resolves `rollout.attention` on devices of a platform (`cpu`, `gpu`, `tpu`).

    `invariant_parts`: `PagedAttention.parts` where `actor.numerics` is invariant; else 0.

    Raises:
      ValueError: kernels on other devices than theirs, for a model with a cap, or without their backend in this JAX.
    """
    runs, on_tpu = platform == "gpu" or interpret, platform == "tpu"
    if invariant_parts:
        return PagedAttention("invariant_pallas" if runs else "invariant", interpret, invariant_parts)
    if implementation == "pallas":
        asked = "rollout.attention (pallas) must be auto or reference"
        if not (runs or on_tpu):
            raise ValueError(f"{asked} on {platform}: the Pallas kernels run on NVIDIA's GPUs and on TPUs")
        if softcap and not on_tpu:
            raise ValueError(f"{asked} for a model whose scores are capped")
        if runs and not has_triton():
            raise ValueError(f"{asked}: {_NO_TRITON}")
    if not (on_tpu or (runs and has_triton())):
        return PagedAttention("reference", interpret)
    return PagedAttention(implementation, interpret, on_tpu=on_tpu)


class PackedAttention(NamedTuple):
    """Causal attention over packed rows, within segments and to the segments that they continue. Hashable.

    `choose_packed` makes one from an option; `reference.packed_attention` has the shapes and the rule. Padding (segment
    0) gets finite values, otherwise unspecified.

    `tiles` is jnp that never holds the scores of a long row (`jaxrl.kernels.packed`), `pallas` GPU kernels
    (`packed_pallas`). `invariant` and `invariant_pallas` are the files of that name, with the gradient of the tiles and
    of the kernels.
    """

    implementation: Literal["reference", "tiles", "pallas", "invariant", "invariant_pallas"]
    tiling: packed.Tiling = packed.Tiling()  # how the work of `tiles` is cut
    interpret: bool = False  # as in `PagedAttention`
    note: str = ""  # why `auto` is the tiles where the GPU kernels refuse the model
    softcap: float = 0.0  # as in `Rule`; the GPU kernels have none
    parts: int = 1  # in which `invariant` computes heads

    def tile_pairs(self, mask: MaskInputs, dtype: Any) -> packed.TilePairs | TileLists | tuple[Any, packed.Runs] | None:
        """The tiles to visit, computed once per microbatch for the `attend` calls of all layers; None if none are.

        `mask.keys` must be None with invariant numbers. `dtype`: of queries, keys and values.
        """
        match self.implementation:
            case "reference":
                return None
            case "tiles" | "invariant":
                return packed.visible_pairs(mask, self.tiling)
            case "pallas":
                from jaxrl.kernels import packed_pallas  # here for the same reasons as above

                return packed_pallas.tile_lists(mask, packed_pallas.choose_tiles(dtype))
            case "invariant_pallas":
                kernels = self._replace(implementation="pallas")
                return kernels.tile_pairs(mask, dtype), packed.runs(mask)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: MaskInputs,
        tiles: Any,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """[R, T, H, D]: `reference.packed_attention`; `tiles`: from `tile_pairs` for the same mask and dtype. Raises
        ValueError for shapes or dtypes that the GPU kernels refuse."""
        match self.implementation:
            case "reference":
                return reference.packed_attention(q, k, v, mask, self.softcap, sinks)
            case "tiles":
                return packed.attention(q, k, v, mask, tiles, self.tiling, self.softcap, sinks)
            case "invariant":
                from jaxrl.kernels import invariant

                how = (self.softcap, sinks, self._plainly, (mask, tiles), self.parts)
                return invariant.packed_attention(q, k, v, mask, *how)
            case "invariant_pallas":
                from jaxrl.kernels import invariant_pallas

                def exact(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, shared: Any) -> jax.Array:
                    _, (_, runs) = shared
                    return invariant_pallas.packed_attention(q, k, v, runs, sinks=sinks, interpret=self.interpret)

                return with_gradient_of(self._plainly, exact)(q, k, v, sinks, (mask, tiles))
            case "pallas":
                from jaxrl.kernels import packed_pallas

                how = {"sinks": sinks, "lists": tiles, "interpret": self.interpret}
                return packed_pallas.packed_attention(q, k, v, mask, **how)

    def _plainly(
        self, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, shared: tuple[MaskInputs, Any]
    ) -> jax.Array:
        """The attention whose gradient `invariant` and `invariant_pallas` take."""
        mask, tiles = shared
        plain = self._replace(implementation="tiles")
        if self.implementation == "invariant_pallas":
            plain, tiles = self._replace(implementation="pallas"), tiles[0]
        return plain.attend(q, k, v, mask, tiles, sinks)

    def num_keys(self, tokens: int) -> int:
        """About how many keys each query of a row of `tokens` is multiplied with."""
        match self.implementation:
            case "reference":
                return tokens
            case "tiles" | "invariant":
                return self.tiling.keys(tokens)
            case "pallas" | "invariant_pallas":
                return min(tokens, _KERNEL_KEYS)

    def holds_scores(self, tokens: int) -> bool:
        """Whether all scores of a row of `tokens` exist at once, [T, T] for each head."""
        return self.implementation == "reference" or (
            self.implementation in ("tiles", "invariant") and tokens <= self.tiling.longest_plain
        )


class Heads(NamedTuple):
    """A model's query heads, key/value heads, head dim, their dtype, and the cap of its scores (`Rule.softcap`)."""

    query: int
    key_value: int
    dim: int
    dtype: Any
    softcap: float = 0.0


def choose_packed(
    implementation: Implementation,
    platform: str,
    heads: Heads,
    *,
    interpret: bool = False,
    invariant_parts: int = 0,
) -> PackedAttention:
    """Resolves `actor.attention` on a platform (`cpu`, `gpu`, `tpu`) for a model's heads.

    `invariant_parts`: `PackedAttention.parts` where `actor.numerics` is invariant; else 0.

    Raises:
      ValueError: `pallas` on other platforms than GPUs, or for heads that the kernels refuse; invariant numbers on GPUs
        for such heads.
    """
    if implementation == "pallas" and platform != "gpu" and not interpret:
        raise ValueError(
            f"actor.attention (pallas) must be auto or reference on {platform}: the Pallas kernels run on GPUs alone"
        )
    tiling = packed.tiling(platform)
    if invariant_parts:
        if platform != "gpu" and not interpret:
            return PackedAttention("invariant", tiling, softcap=heads.softcap, parts=invariant_parts)
    elif implementation == "reference":
        return PackedAttention("reference", tiling, softcap=heads.softcap)
    elif implementation == "auto" and platform != "gpu":
        return PackedAttention("tiles", tiling, softcap=heads.softcap)
    reason = _NO_TRITON
    if has_triton():
        from jaxrl.kernels import paged_pallas

        q, k = (jax.ShapeDtypeStruct((1, 1, count, heads.dim), heads.dtype) for count in heads[:2])
        reason = paged_pallas.refusal(q, k, k, heads.key_value, heads.softcap)
    if invariant_parts:
        if reason is not None:
            raise ValueError(f"actor.numerics (invariant) must be fast on GPUs for this model: {reason}")
        return PackedAttention("invariant_pallas", tiling, interpret)
    if reason is None:
        return PackedAttention("pallas", tiling, interpret)
    if implementation == "pallas":
        raise ValueError(f"actor.attention (pallas) must be auto or reference for this model: {reason}")
    note = f"actor.attention: auto is jnp in tiles, not the kernels: {reason}"
    return PackedAttention("tiles", tiling, note=note, softcap=heads.softcap)
