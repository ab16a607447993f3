"""The draft indexes that lie on an executor's devices (`jaxrl.scheduling.tokens.draft_index`), and which of them do.

Purpose: a plan's rows name the index of their prompt's earlier responses. `DraftBooks` uploads those that are not there
yet, into the places of such that the plan does not name, and `jaxrl.rollout.verify` looks drafts up in them without the
host. Every dp group has its own places; inside a group all devices hold the same.

Source: none published; RhymeRL (§5.3) keeps its suffix trees in host memory, and drafts between two steps.

Dims: G dp groups (sharded), B places of a group, N text entries, H bounds of hash buckets, E places in a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.scheduling.tokens.draft_index import END, DraftIndex, DraftLengths, num_buckets
from jaxrl.scheduling.tokens.draft_rule import Window


@dataclass(frozen=True, slots=True)
class Drafting:
    """What an executor that verifies drafts is built for.

    Attributes:
      num_responses, num_tokens: the most responses, and the most tokens of them together, that an index is made of.
      verify_tokens: drafted tokens that a step verifies per dp group, all rows together.
      lengths: of contexts and drafts, those of every index.
      window: of every row.
      num_indexes: places for indexes per dp group; 0: as many as it has rows.

    Raises:
      ValueError: windows that are longer than the drafts of an index.
    """

    num_responses: int
    num_tokens: int
    verify_tokens: int
    lengths: DraftLengths = field(default_factory=DraftLengths)
    window: Window = field(default_factory=Window)
    num_indexes: int = 0

    def __post_init__(self) -> None:
        if self.window.most > self.lengths.max_draft:
            raise ValueError(
                f"drafts of {self.window.most} tokens (rollout.speculation.max_window) from indexes that tell "
                f"{self.lengths.max_draft} tokens apart"
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Entries of a place's three arrays: text, bounds of buckets, and places in the text."""
        places = max(self.lengths.num_places(self.num_tokens), 1)
        text = max(self.lengths.text_size(self.num_responses, self.num_tokens), 1)
        return text, num_buckets(places) + 1, places

    def num_books(self, num_slots: int) -> int:
        """Places of a dp group with so many rows."""
        return self.num_indexes or num_slots

    def refusal(self, index: DraftIndex) -> str | None:
        """Why an index has no room in a place; None if it has."""
        arrays = (index.text, index.first, index.places)
        if index.lengths != self.lengths:
            return f"its lengths ({index.lengths}) must be those of the programs ({self.lengths})"
        if any(len(array) > size for array, size in zip(arrays, self.sizes, strict=True)):
            return (
                f"it has {index.num_tokens} tokens, and there is room for {self.num_responses} responses of "
                f"{self.num_tokens} tokens together"
            )
        return None


def book_bytes(drafting: Drafting, num_slots: int) -> int:
    """Bytes that the places of a dp group take on each of its devices."""
    return drafting.num_books(num_slots) * 4 * (sum(drafting.sizes) + 2)


class Books(NamedTuple):
    """The places: texts int32 [G, B, N], firsts int32 [G, B, H], places int32 [G, B, E]; salts uint32 [G, B], and masks
    uint32 [G, B], the number of an index's hash buckets less one. Or their shapes, or one place of each group."""

    texts: Any
    firsts: Any
    places: Any
    salts: Any
    masks: Any


def book_shapes(drafting: Drafting, *dims: int) -> Books:
    """The dtypes and shapes of `Books` with these leading dims."""
    text, first, places = drafting.sizes

    def of(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*dims, *rest), dtype)

    whole, word = jnp.int32, jnp.uint32
    return Books(of(whole, text), of(whole, first), of(whole, places), of(word), of(word))


@lru_cache(maxsize=16)
def _blank(drafting: Drafting, groups: int, num_books: int, sharding: NamedSharding) -> Callable[[], Books]:
    shapes = book_shapes(drafting, groups, num_books)
    return jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=sharding)


def allocate(drafting: Drafting, groups: int, num_books: int, sharding: NamedSharding) -> Books:
    """Blank places, each device allocating its own; compiled once for each layout."""
    return _blank(drafting, groups, num_books, sharding)()


def upload(books: Books, book: jax.Array, new: Books) -> Books:
    """The places with one index of each group, `new` [G, ...], written to place `book` [G]; B: to none."""

    def write(x: jax.Array, i: jax.Array, one: jax.Array) -> jax.Array:
        return x.at[i].set(one, mode="drop")

    return jax.tree.map(lambda x, one: jax.vmap(write)(x, book, one), books, new)


class DraftBooks:
    """Which index lies in which place of each dp group.

    Args:
      drafting: sizes.
      arrays: the places, on the devices, blank.

    Attributes:
      arrays: as they are now. num_books: places per group.
      uploads: indexes uploaded so far; unplaced: rows of plans whose index found no place.
    """

    def __init__(self, drafting: Drafting, arrays: Books) -> None:
        self.drafting, self.arrays = drafting, arrays
        self.num_groups, self.num_books = map(int, arrays.salts.shape)
        self.uploads = self.unplaced = 0
        # by group; the least recently named first
        self._places: list[dict[DraftIndex, int]] = [{} for _ in range(self.num_groups)]

    def place(
        self, named: Iterable[tuple[int, DraftIndex]], write: Callable[[Books, np.ndarray, Books], Books]
    ) -> list[int]:
        """Sees to it that the indexes of a plan's rows are there, and returns the place of each.

        Args:
          named: (dp group, index) of every row that has one. Where a group names more than it has places, the last
            ones get none: their number is `num_books`, which no row is looked up in.
          write: the compiled `upload`.
        """
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
        found: list[int] = [self._places[group].get(index, self.num_books) for group, index in pairs]
        self.unplaced += found.count(self.num_books)
        return found

    def forget(self) -> None:
        """Lets go of all indexes: another rollout names others."""
        for held in self._places:
            held.clear()

    def delete(self) -> None:
        """Deletes the arrays."""
        for array in jax.tree.leaves(self.arrays):
            array.delete()

    def _make_room(self, group: int, wanted: list[DraftIndex]) -> list[tuple[int, DraftIndex]]:
        """Gives the indexes of a group places; returns those that are to be uploaded."""
        held, named = self._places[group], set(wanted)
        for index in wanted:
            if index in held:
                held[index] = held.pop(index)  # named last
        taken = set(held.values())
        spare = [index for index in held if index not in named]
        free = [place for place in range(self.num_books) if place not in taken]
        filled = []
        for index in [index for index in wanted if index not in held]:
            if not free and not spare:
                break
            held[index] = free.pop(0) if free else held.pop(spare.pop(0))
            filled.append((held[index], index))
        return filled

    def _filled(self, wave: list[tuple[int, int, DraftIndex]]) -> tuple[np.ndarray, Books]:
        """The arguments of `upload` for at most one index of each group."""
        groups = self.num_groups
        book = np.full(groups, self.num_books, np.int32)
        new = Books(*(np.zeros(x.shape, x.dtype) for x in book_shapes(self.drafting, groups)))
        new.texts[:] = END
        for group, place, index in wave:
            refused = self.drafting.refusal(index)
            assert refused is None, f"a draft index that `check` should have refused: {refused}"
            book[group] = place
            for rows, own in zip(new, (index.text, index.first, index.places), strict=False):
                rows[group, : len(own)] = own
            new.salts[group], new.masks[group] = index.salt, len(index.first) - 2
        return book, new
