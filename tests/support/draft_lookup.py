"""Looks drafts up in a `DraftIndex` on the host: the oracle of what devices do (`Drafting.propose`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.mechanisms.speculation.index import END, START, DraftIndex, context_hashes


def find(index: DraftIndex, context: Sequence[int]) -> tuple[int, int]:
    """(place, m): the draft for a response whose last tokens are `context` begins at `text[place]`, and m tokens of the
    context were found; (-1, 0) where there is none. A context shorter than `max_prefix` is the whole response so
    far."""
    lengths = index.lengths
    recent = np.asarray([*[START] * lengths.max_prefix, *context], np.int32)[-lengths.max_prefix :]
    hashes = context_hashes(recent[None], np.uint32(index.salt))[0]
    for m in range(lengths.max_prefix, lengths.min_prefix - 1, -1):
        bucket = int(hashes[m - 1]) & (len(index.first) - 2)
        for entry in index.places[index.first[bucket] : index.first[bucket + 1]].tolist():
            place, kind = divmod(entry, lengths.num_prefixes)
            if kind == m - lengths.min_prefix and np.array_equal(index.text[place - m : place], recent[-m:]):
                return place, m
    return -1, 0


def draft(index: DraftIndex, context: Sequence[int], num_tokens: int) -> list[int]:
    """The next tokens after `context`, at most `num_tokens` and at most up to the end of their response."""
    place, _ = find(index, context)
    piece = index.text[place : place + num_tokens] if place >= 0 else index.text[:0]
    ends = np.flatnonzero(piece == END)
    return (piece[: ends[0]] if len(ends) else piece).tolist()
