"""One interface to attention over a paged KV cache, and to attention over packed rows.

Prefill, decode and verification are the same operation with a different number of queries per row: `PagedAttention`
takes C queries a row and masks by position. On GPUs a decode step's attention can also be the kernel that begins with
the layer's product and writes the new keys and values (`decode_pallas`). An option chooses the implementation of an
operation: `rollout.attention` for the cache and `actor.attention` for packed rows:

- `"reference"`: plain jnp (`jaxrl.kernels.reference`), on any platform; what everything else is tested against;
- `"pallas"`: our GPU kernels (`paged_pallas`, `decode_pallas`, `packed_pallas`); a ValueError for shapes or dtypes that
  they refuse;
- `"auto"`, over the cache: the kernels where the devices that the program is compiled for are GPUs and the kernels take
  these shapes and dtypes; the reference otherwise. On packed rows: the kernels on GPUs where they take the model's
  heads and the dtype; jnp in tiles (`packed`) otherwise. All of this is known while tracing; nothing is tried and
  caught.

docs/kernels.md says what the kernels are, why these, and what has been measured.

Dims: R rows, C queries per row, H query heads, K key/value heads, D head dim, N blocks, P positions per block,
W blocks per table, T tokens of a packed row. All of it is local to one device: callers run it inside `shard_map`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax

from jaxrl.kernels import packed, reference
from jaxrl.kernels.reference import PLAIN, Rule

if TYPE_CHECKING:
    from jaxrl.kernels.packed_pallas import TileLists

Implementation = Literal["auto", "reference", "pallas"]
_KERNEL_KEYS = 128  # two tiles of keys: the kernels skip most other tiles, so packing may count on about as much


class PagedAttention(NamedTuple):
    """Attention over the paged cache on devices of one platform. Hashable; `choose_paged` makes one from an option.

    Attributes:
      implementation: `reference`; `pallas`; `auto`: the GPU kernels where they take the shapes and dtypes.
      interpret: run the GPU kernels as plain JAX, on any device (slow; for tests).
    """

    implementation: Implementation
    interpret: bool = False

    def attend(
        self,
        q_RCHD: jax.Array,
        k_KNPD: jax.Array,
        v_KNPD: jax.Array,
        tables_RW: jax.Array,
        positions_RC: jax.Array,
        rule: Rule = PLAIN,
    ) -> jax.Array:
        """[R, C, H, D]: query (r, c) sees the row's cached positions 0 .. positions[r, c], its own included, as far
        back as the layer's rule has it.

        Raises:
          ValueError: `pallas`, for shapes or dtypes that the kernels refuse.
        """
        arrays = (q_RCHD, k_KNPD, v_KNPD, tables_RW, positions_RC)
        if self.implementation == "reference" or (self.implementation == "auto" and rule.softcap):
            return reference.paged_attention(*arrays, rule)
        # Imported here: a run on CPU need not wait for it, and works with a JAX that lacks this backend of Pallas.
        from jaxrl.kernels import paged_pallas

        if self.implementation == "auto" and paged_pallas.refusal(q_RCHD, k_KNPD, v_KNPD, k_KNPD.shape[0]):
            return reference.paged_attention(*arrays, rule)
        return paged_pallas.paged_attention(*arrays, rule=rule, interpret=self.interpret)

    def decodes(self, heads: int, kv_heads: int, dim: int, dtype: Any) -> bool:
        """Whether a decode step's attention can be the kernel that takes a layer's merged product
        (`decode_pallas.decode_attention`), for so many heads on a device."""
        if self.implementation == "reference":
            return False
        from jaxrl.kernels import decode_pallas

        return decode_pallas.decode_refusal(heads, kv_heads, dim, dtype) is None


def choose_paged(
    implementation: Implementation, platform: str, softcap: float = 0.0, *, interpret: bool = False
) -> PagedAttention:
    """What `rollout.attention` means on devices of a platform (`cpu`, `gpu`, `tpu`).

    Args:
      softcap: of the model's scores (`Rule`). interpret: as in `PagedAttention`.

    Raises:
      ValueError: an unknown implementation; `pallas` on a platform that the kernels are not made for, or with a cap.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"attention: implementation ({implementation!r}) must be one of {get_args(Implementation)}")
    runs = platform == "gpu" or interpret
    if implementation == "pallas" and not runs:
        raise ValueError(
            f"rollout.attention (pallas) must be auto or reference on {platform}: the Pallas kernels run on GPUs alone"
        )
    if implementation == "pallas" and softcap:
        raise ValueError("rollout.attention (pallas) must be auto or reference for a model whose scores are capped")
    return PagedAttention(implementation if runs else "reference", interpret)


class PackedAttention(NamedTuple):
    """Causal attention over packed rows, within segments and to the segments that they continue. Hashable.

    `choose_packed` makes one from an option; `reference.packed_attention` has the shapes and the rule. A prefix of 0,
    or equal to the segment, means none. Padding (segment 0) gets finite values, otherwise unspecified.

    Attributes:
      implementation: `reference`; `tiles`, jnp that never holds the scores of a long row (`jaxrl.kernels.packed`);
        `pallas`, GPU kernels (`jaxrl.kernels.packed_pallas`).
      tiling: how the work of `tiles` is cut.
      interpret: run the GPU kernels as plain JAX, on any device (slow; for tests).
      note: where `auto` would be the kernels and they refuse: why it is the tiles.
      softcap: as in `Rule`; the GPU kernels have none.
    """

    implementation: Literal["reference", "tiles", "pallas"]
    tiling: packed.Tiling = packed.Tiling()
    interpret: bool = False
    note: str = ""
    softcap: float = 0.0

    def tile_pairs(
        self,
        segment_ids: jax.Array,
        positions: jax.Array,
        prefix_ids: jax.Array,
        dtype: Any,
        first: jax.Array | None = None,
    ) -> packed.TilePairs | TileLists | None:
        """What the layers share, worked out once per microbatch for all `attend` calls; None if nothing.

        Args:
          segment_ids, positions, prefix_ids: int32 [R, T].
          dtype: of queries, keys and values.
          first: int32 [R, T], the lowest position that each token sees; None: there is no window.
        """
        match self.implementation:
            case "reference":
                return None
            case "tiles":
                return packed.visible_pairs(segment_ids, prefix_ids, self.tiling, positions, first)
            case "pallas":
                from jaxrl.kernels import packed_pallas  # here for the same reasons as above

                tiles = packed_pallas.choose_tiles(dtype)
                return packed_pallas.tile_lists(segment_ids, prefix_ids, positions, tiles, first)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        positions: jax.Array,
        prefix_ids: jax.Array,
        tiles: Any,
        first: jax.Array | None = None,
    ) -> jax.Array:
        """[R, T, H, D]; `tiles`: from `tile_pairs` for the same integers and dtype.

        Raises:
          ValueError: for shapes or dtypes that the GPU kernels refuse.
        """
        match self.implementation:
            case "reference":
                rows = (segment_ids, positions, prefix_ids, first)
                return reference.packed_attention(q, k, v, *rows, self.softcap)
            case "tiles":
                rows = (segment_ids, positions, prefix_ids)
                return packed.attention(q, k, v, *rows, tiles, self.tiling, first, self.softcap)
            case "pallas":
                from jaxrl.kernels import packed_pallas

                how = {"first": first, "lists": tiles, "interpret": self.interpret}
                return packed_pallas.packed_attention(q, k, v, segment_ids, positions, prefix_ids=prefix_ids, **how)

    def num_keys(self, tokens: int) -> int:
        """About how many keys each query of a row of so many tokens is multiplied with."""
        match self.implementation:
            case "reference":
                return tokens
            case "tiles":
                return self.tiling.keys(tokens)
            case "pallas":
                return min(tokens, _KERNEL_KEYS)

    def holds_scores(self, tokens: int) -> bool:
        """Whether the scores of a whole row of so many tokens exist at once, [T, T] for each head."""
        return self.implementation == "reference" or (
            self.implementation == "tiles" and tokens <= self.tiling.longest_plain
        )


class Heads(NamedTuple):
    """What a model asks of attention: query heads, key/value heads, head dim, the dtype of all three arrays, and the
    cap of its scores (`Rule.softcap`)."""

    query: int
    key_value: int
    dim: int
    dtype: Any
    softcap: float = 0.0


def choose_packed(
    implementation: Implementation, platform: str, heads: Heads, *, interpret: bool = False
) -> PackedAttention:
    """What `actor.attention` means on a platform (`cpu`, `gpu`, `tpu`) for a model's heads.

    Args:
      interpret: as in `PackedAttention`.

    Raises:
      ValueError: `pallas` on a platform that the kernels are not made for, or for heads that they refuse.
    """
    if implementation == "pallas" and platform != "gpu" and not interpret:
        raise ValueError(
            f"actor.attention (pallas) must be auto or reference on {platform}: the Pallas kernels run on GPUs alone"
        )
    tiling = packed.tiling(platform)
    if implementation == "reference":
        return PackedAttention("reference", tiling, softcap=heads.softcap)
    if implementation == "auto" and platform != "gpu":
        return PackedAttention("tiles", tiling, softcap=heads.softcap)
    from jaxrl.kernels import paged_pallas

    q, k = (jax.ShapeDtypeStruct((1, 1, count, heads.dim), heads.dtype) for count in heads[:2])
    reason = paged_pallas.refusal(q, k, k, heads.key_value, heads.softcap)
    if reason is None:
        return PackedAttention("pallas", tiling, interpret)
    if implementation == "pallas":
        raise ValueError(f"actor.attention (pallas) must be auto or reference for this model: {reason}")
    note = f"actor.attention: auto is jnp in tiles, not the kernels: {reason}"
    return PackedAttention("tiles", tiling, note=note, softcap=heads.softcap)
