"""Drafts from indexes that lie on an executor's devices (`jaxrl.mechanisms.speculation.index`).

A plan's rows name the index of their prompt's earlier responses. `DeviceIndexes` uploads those that are missing, in
place of indexes that the plan does not name, and `Drafting.propose` looks drafts up in them without the host. Every dp
group has its own places; inside a group all devices hold the same.

Source: RhymeRL §5 (HistoSpec): drafts from earlier responses, and the AIMD window (§5.4).

Departure: the paper (§5.3) keeps its suffix trees in host memory, and drafts between two steps.

Dims: G dp groups (sharded), B places of a group, N text entries, H bounds of hash buckets, E places in a text; R rows,
P tokens of a longest context, M lengths of contexts, X entries of a bucket, W drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.mechanisms.speculation.index import (
    END,
    MAX_PROBES,
    START,
    DraftIndex,
    DraftLengths,
    context_hashes,
    num_buckets,
)
from jaxrl.mechanisms.speculation.rule import DraftWindow, draft_width
from jaxrl.rollout.verify import Proposed, leading


class IndexArrays(NamedTuple):
    """The places: texts int32 [G, B, N], firsts int32 [G, B, H], places int32 [G, B, E]; salts uint32 [G, B], and masks
    uint32 [G, B], the number of an index's hash buckets less one. Or their shapes, or one place of each group."""

    texts: Any
    firsts: Any
    places: Any
    salts: Any
    masks: Any


@dataclass(frozen=True, slots=True)
class Drafting:
    """How an executor drafts (`jaxrl.rollout.verify`). Equal ones make equal programs."""

    num_responses: int  # the most that an index is made of
    num_tokens: int  # the most of them together
    verify_tokens: int  # drafted tokens that a step verifies per dp group, all rows together
    lengths: DraftLengths = field(default_factory=DraftLengths)  # those of every index
    window: DraftWindow = field(default_factory=DraftWindow)  # of every row; at most `lengths.max_draft`
    num_indexes: int = 0  # places for indexes per dp group; 0: as many as it has rows

    @property
    def num_recent(self) -> int:
        return self.lengths.max_prefix

    @property
    def blank(self) -> int:
        return START

    @property
    def first_window(self) -> int:
        return self.window.least

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Entries of a place's three arrays: text, bounds of buckets, and places in the text."""
        places = max(self.lengths.num_places(self.num_tokens), 1)
        text = max(self.lengths.text_size(self.num_responses, self.num_tokens), 1)
        return text, num_buckets(places) + 1, places

    @property
    def upload_sizes(self) -> tuple[int, int]:
        return self.sizes[0], self.sizes[2]

    def width(self, rows: int) -> int:
        return draft_width(rows, self.verify_tokens, self.window.most)

    def next_window(self, window: Any, proposed: Any, accepted: Any) -> Any:
        return self.window.after(window, proposed, accepted)

    def num_places(self, num_slots: int) -> int:
        return self.num_indexes or num_slots

    def num_bytes(self, num_slots: int) -> int:
        """Bytes of the places of a dp group with `num_slots` rows, on each of its devices."""
        return self.num_places(num_slots) * 4 * (sum(self.sizes) + 2)

    def refusal(self, history: DraftIndex) -> str | None:
        arrays = (history.text, history.first, history.places)
        if history.lengths != self.lengths:
            return f"its lengths ({history.lengths}) must be the programs' lengths ({self.lengths})"
        if any(len(array) > size for array, size in zip(arrays, self.sizes, strict=True)):
            return (
                f"it has {history.num_tokens} tokens, and there is room for {self.num_responses} responses of "
                f"{self.num_tokens} tokens together"
            )
        return None

    def array_shapes(self, *dims: int) -> IndexArrays:
        text, first, places = self.sizes

        def of(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*dims, *rest), dtype)

        whole, word = jnp.int32, jnp.uint32
        return IndexArrays(of(whole, text), of(whole, first), of(whole, places), of(word), of(word))

    def on_devices(self, arrays: IndexArrays) -> DeviceIndexes:
        return DeviceIndexes(self, arrays)

    def upload(self, arrays: IndexArrays, place: jax.Array, new: IndexArrays) -> IndexArrays:
        def write(x: jax.Array, i: jax.Array, one: jax.Array) -> jax.Array:
            return x.at[i].set(one, mode="drop")

        return jax.tree.map(lambda x, one: jax.vmap(write)(x, place, one), arrays, new)

    def propose(self, arrays: IndexArrays, place: jax.Array, recent: jax.Array, width: int) -> Proposed:
        """Drafts for rows of one dp group: what followed the longest context that the index has, up to the end of its
        response. A context that is shorter than `max_prefix` is the whole response so far."""
        lengths, index_R, recent_RP = self.lengths, place, recent
        text_BN, first_BH, places_BE = arrays.texts, arrays.firsts, arrays.places
        is_there_R, index_R = index_R < text_BN.shape[0], jnp.minimum(index_R, text_BN.shape[0] - 1)
        sizes_M = jnp.arange(lengths.max_prefix, lengths.min_prefix - 1, -1)
        hashes_RM = context_hashes(recent_RP, arrays.salts[index_R])[:, sizes_M - 1]
        bucket_RM = (hashes_RM & arrays.masks[index_R][:, None]).astype(jnp.int32)
        begin_RM, end_RM = first_BH[index_R[:, None], bucket_RM], first_BH[index_R[:, None], bucket_RM + 1]
        # all that share a bucket, of every length of the context
        at_RMX = begin_RM[..., None] + jnp.arange(MAX_PROBES)
        entry_RMX = places_BE.at[index_R[:, None, None], at_RMX].get(mode="clip")
        place_RMX, kind_RMX = entry_RMX // lengths.num_prefixes, entry_RMX % lengths.num_prefixes
        is_hit_RMX = (at_RMX < end_RM[..., None]) & (kind_RMX == (sizes_M - lengths.min_prefix)[:, None])
        back = jnp.arange(1, lengths.max_prefix + 1)
        behind_RMXP = text_BN.at[index_R[:, None, None, None], place_RMX[..., None] - back].get(mode="clip")
        same_RMXP = (behind_RMXP == recent_RP[:, None, None, ::-1]) | (back > sizes_M[:, None, None])
        is_hit_RMX &= jnp.all(same_RMXP, axis=-1)
        hits_RX = is_hit_RMX.reshape(len(index_R), -1)
        first_R = jnp.argmax(hits_RX, axis=1)  # the longest context comes first
        place_R = jnp.take_along_axis(place_RMX.reshape(hits_RX.shape), first_R[:, None], axis=1)
        found_R = jnp.any(hits_RX, axis=1) & is_there_R
        tokens_RW = text_BN.at[index_R[:, None], place_R + jnp.arange(width)].get(mode="clip")
        length_R = jnp.where(found_R, leading(tokens_RW >= 0), 0)
        matched_R = jnp.where(length_R > 0, sizes_M[first_R // MAX_PROBES], 0)
        return Proposed(tokens_RW, length_R, matched_R)


class DeviceIndexes:
    """Which index is in which place of each dp group. `arrays`: the places, on the devices, blank at first; `uploads`:
    indexes uploaded so far; `unplaced`: rows of plans whose index found no place."""

    def __init__(self, drafting: Drafting, arrays: IndexArrays) -> None:
        self.drafting, self.arrays = drafting, arrays
        self.num_groups, self.num_places = map(int, arrays.salts.shape)
        self.uploads = self.unplaced = 0
        # by group; the least recently named first
        self._places: list[dict[DraftIndex, int]] = [{} for _ in range(self.num_groups)]

    def place(
        self,
        named: Iterable[tuple[int, DraftIndex]],
        write: Callable[[IndexArrays, np.ndarray, IndexArrays], IndexArrays],
    ) -> list[int]:
        """Uploads the indexes of a plan's rows that are missing, and returns the place of each."""
        wanted: list[dict[DraftIndex, None]] = [{} for _ in range(self.num_groups)]
        pairs = list(named)
        for group, index in pairs:
            wanted[group][index] = None
        waves: list[list[tuple[int, int, DraftIndex]]] = []
        for group, own in enumerate(wanted):
            missing = self._make_room(group, list(own))
            for nth, (place, index) in enumerate(missing):
                if nth == len(waves):
                    waves.append([])
                waves[nth].append((group, place, index))
        for wave in waves:
            self.arrays = write(self.arrays, *self._filled(wave))
            self.uploads += len(wave)
        found: list[int] = [self._places[group].get(index, self.num_places) for group, index in pairs]
        self.unplaced += found.count(self.num_places)
        return found

    def forget(self) -> None:
        """Forgets all indexes: another rollout names others."""
        for held in self._places:
            held.clear()

    def delete(self) -> None:
        for array in jax.tree.leaves(self.arrays):
            array.delete()

    def _make_room(self, group: int, wanted: list[DraftIndex]) -> list[tuple[int, DraftIndex]]:
        """Gives the indexes of a group places; returns those to upload."""
        held, named = self._places[group], set(wanted)
        for index in wanted:
            if index in held:
                held[index] = held.pop(index)  # named last
        taken = set(held.values())
        spare = [index for index in held if index not in named]
        free = [place for place in range(self.num_places) if place not in taken]
        filled = []
        for index in [index for index in wanted if index not in held]:
            if not free and not spare:
                break
            held[index] = free.pop(0) if free else held.pop(spare.pop(0))
            filled.append((held[index], index))
        return filled

    def _filled(self, wave: list[tuple[int, int, DraftIndex]]) -> tuple[np.ndarray, IndexArrays]:
        """The arguments of `upload` for at most one index of each group."""
        groups = self.num_groups
        places = np.full(groups, self.num_places, np.int32)
        new = IndexArrays(*(np.zeros(x.shape, x.dtype) for x in self.drafting.array_shapes(groups)))
        new.texts[:] = END
        for group, place, index in wave:
            refused = self.drafting.refusal(index)
            assert refused is None, f"a draft index that `check` should have refused: {refused}"
            places[group] = place
            for rows, own in zip(new, (index.text, index.first, index.places), strict=False):
                rows[group, : len(own)] = own
            new.salts[group], new.masks[group] = index.salt, len(index.first) - 2
        return places, new
