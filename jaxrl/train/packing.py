"""TrainBatch -> microbatches of packed rows, and per-token results back to samples.

Several samples share a row and keep apart by segment id. Source: sequence packing as in Krell et al. 2021
(arXiv:2107.02027), first-fit decreasing. Departures: after first-fit has said how many rows are needed, samples are
dealt again, longest first, to the emptiest row, so that all rows (hence all devices) hold similar numbers of tokens.

**Alignment.** Every array of a `TokenBatch` is indexed by the token it speaks about: `logprobs[r, t]` is the
log-probability of `tokens[r, t]`, which the model computes at position t-1. `loss_mask` is 1 at response tokens only;
each has a predecessor in its segment, because a prompt has at least one token.

**Shapes.** A row's length and the number of rows come from small sets of buckets (`bucket_length`, `row_buckets`), so
the programs that are compiled do not follow the lengths of responses. Nothing here looks at a clock or draws at random.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from flax import struct

from jaxrl.types import TrainBatch

Array = np.ndarray | jax.Array


@struct.dataclass
class TokenBatch:
    """A microbatch of R packed rows of T tokens. All arrays are [R, T] except `num_sequences`.

    Attributes:
      tokens: int32; padding is 0.
      segment_ids: int32, 1, 2, ... within a row; 0 at padding.
      positions: int32 within the sample (prompt included); 0 at padding.
      loss_mask: float32, 1 at tokens to learn from (several spans per sample are possible), else 0.
      advantages: float32.
      rollout_logprobs, old_logprobs, ref_logprobs: float32; 0 where unknown or masked.
      versions: int32, the `policy_version` that produced each response token; 0 elsewhere.
      sequence_length: int32, how many tokens of its sample have mask 1 (the same at all tokens of a sample).
      num_sequences: int32 [R], samples in each row that have at least one token with mask 1.
    """

    tokens: Array
    segment_ids: Array
    positions: Array
    loss_mask: Array
    advantages: Array
    rollout_logprobs: Array
    old_logprobs: Array
    ref_logprobs: Array
    versions: Array
    sequence_length: Array
    num_sequences: Array

    @classmethod
    def zeros(cls, rows: int, length: int) -> TokenBatch:
        """Padding only, as numpy arrays."""

        def integers() -> np.ndarray:
            return np.zeros((rows, length), np.int32)

        def floats() -> np.ndarray:
            return np.zeros((rows, length), np.float32)

        return cls(
            tokens=integers(),
            segment_ids=integers(),
            positions=integers(),
            loss_mask=floats(),
            advantages=floats(),
            rollout_logprobs=floats(),
            old_logprobs=floats(),
            ref_logprobs=floats(),
            versions=integers(),
            sequence_length=integers(),
            num_sequences=np.zeros((rows,), np.int32),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample's response lies: columns `start` to `start + length` of a microbatch's row."""

    microbatch: int
    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Packed:
    """Microbatches (numpy), and per sample its place (None: it has no response tokens and was left out)."""

    microbatches: list[TokenBatch]
    places: list[Place | None]

    def unpack(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per-token results [R, T], one array per microbatch, as one array [T_i] per sample, in the batch's order."""
        dtype = results[0].dtype if results else np.dtype(np.float32)
        out: list[np.ndarray] = []
        for place in self.places:
            if place is None:
                out.append(np.zeros((0,), dtype))
            else:
                row = results[place.microbatch][place.row]
                out.append(np.array(row[place.start : place.start + place.length]))
        return out


def bucket_length(length: int) -> int:
    """The smallest row length that holds `length` tokens: powers of two up to 128, then four steps per octave.

    128, 160, 192, 224, 256, 320, ..., 512, 640, ...: multiples of 128 from 512 on, and at most a quarter is padding.
    """
    if length <= 128:
        return max(16, 1 << (length - 1).bit_length())
    step = (1 << (length - 1).bit_length()) // 8
    return -(-length // step) * step


def row_length(longest: int, max_model_length: int) -> int:
    """Tokens per row: the bucket of the longest sample, but never more than the longest that the config allows.

    Raises:
      ValueError: a sample is longer than `max_model_length`.
    """
    if longest > max_model_length:
        raise ValueError(
            f"a sample of {longest} tokens exceeds data.max_prompt_length + data.max_response_length "
            f"({max_model_length} tokens)"
        )
    return min(bucket_length(longest), -(-max_model_length // 16) * 16)


def row_buckets(max_rows: int) -> list[int]:
    """Numbers of rows (per device) that microbatches may have: powers of two below `max_rows`, and `max_rows`."""
    return [1 << i for i in range((max_rows - 1).bit_length())] + [max_rows]


def pack(
    batch: TrainBatch,
    *,
    max_model_length: int,
    max_tokens_per_device: int,
    num_devices: int = 1,
    loss_masks: Sequence[np.ndarray] | None = None,
) -> Packed:
    """Packs samples into microbatches whose rows split evenly over the devices.

    Args:
      batch: samples without response tokens are left out.
      max_model_length: tokens of the longest allowed sample, prompt included.
      max_tokens_per_device: tokens of a microbatch on one device, padding included (at least one row is used).
      num_devices: device d gets rows d*n to (d+1)*n of a microbatch with n rows per device.
      loss_masks: per sample [T_i] over its response tokens, 1 to learn from; default: all. Several spans are fine.

    Raises:
      ValueError: a prompt is empty, or a sample is longer than `max_model_length`.
    """
    chosen = [i for i, sample in enumerate(batch.samples) if len(sample)]
    if not chosen:
        return Packed([], [None] * len(batch))
    for i in chosen:
        if not batch.prompts[i].token_ids:
            raise ValueError(f"prompt {batch.prompts[i].key} has no tokens: a response's first token needs a context")
    lengths = {i: len(batch.prompts[i].token_ids) + len(batch.samples[i]) for i in chosen}
    width = row_length(max(lengths.values()), max_model_length)
    rows = _first_fit_decreasing(lengths, width)
    sizes = _microbatch_sizes(-(-len(rows) // num_devices), max(1, max_tokens_per_device // width))
    rows = _level(lengths, width, sum(sizes) * num_devices) or rows
    microbatches = [TokenBatch.zeros(size * num_devices, width) for size in sizes]
    places: list[Place | None] = [None] * len(batch)
    for members, (micro, row) in zip(rows, _deal(rows, lengths, sizes, num_devices), strict=True):
        column = 0
        for segment, i in enumerate(sorted(members), start=1):
            mask = np.ones(len(batch.samples[i]), np.float32) if loss_masks is None else loss_masks[i]
            start = column + len(batch.prompts[i].token_ids)
            places[i] = Place(micro, row, start, len(batch.samples[i]))
            _write(microbatches[micro], row, column, segment, batch, i, np.asarray(mask))
            column += lengths[i]
    return Packed(microbatches, places)


def _write(out: TokenBatch, row: int, column: int, segment: int, batch: TrainBatch, i: int, mask: np.ndarray) -> None:
    prompt, sample = batch.prompts[i], batch.samples[i]
    start, stop = column + len(prompt.token_ids), column + len(prompt.token_ids) + len(sample)
    whole, response = np.s_[row, column:stop], np.s_[row, start:stop]
    learned = int(np.count_nonzero(mask))

    def put(array: Array, where: tuple[int, slice], values: object) -> None:
        assert isinstance(array, np.ndarray)
        array[where] = values

    put(out.tokens, whole, np.concatenate([np.asarray(prompt.token_ids, np.int32), sample.token_ids]))
    put(out.segment_ids, whole, segment)
    put(out.positions, whole, np.arange(stop - column))
    put(out.sequence_length, whole, learned)
    put(out.loss_mask, response, mask)
    put(out.advantages, response, batch.advantages[i])
    put(out.rollout_logprobs, response, sample.rollout_logprobs)
    put(out.old_logprobs, response, sample.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs[i])
    if batch.ref_logprobs is not None:
        put(out.ref_logprobs, response, batch.ref_logprobs[i])
    put(out.versions, response, sample.versions)
    assert isinstance(out.num_sequences, np.ndarray)
    out.num_sequences[row] += learned > 0


def _longest_first(lengths: dict[int, int]) -> list[int]:
    return sorted(lengths, key=lambda i: (-lengths[i], i))


def _first_fit_decreasing(lengths: dict[int, int], width: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for i in _longest_first(lengths):
        row = next((r for r, space in enumerate(free) if space >= lengths[i]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(width)
        rows[row].append(i)
        free[row] -= lengths[i]
    return rows


def _level(lengths: dict[int, int], width: int, num_rows: int) -> list[list[int]] | None:
    """All `num_rows` rows evenly loaded: longest sample to the emptiest row. None if that does not fit."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    loads = [(0, row) for row in range(num_rows)]
    for i in _longest_first(lengths):
        load, row = loads[0]
        if load + lengths[i] > width:
            return None
        heapq.heapreplace(loads, (load + lengths[i], row))
        rows[row].append(i)
    return rows


def _microbatch_sizes(num_rows: int, max_rows: int) -> list[int]:
    """Rows per device of each microbatch, largest first.

    The cheapest way to hold `num_rows` with sizes from the buckets, where a microbatch costs one row on top of its own:
    every microbatch gathers the weights again.
    """
    buckets = row_buckets(max_rows)
    # cost of holding n rows, and the last size used
    best: list[tuple[int, int]] = [(0, 0)]
    for n in range(1, num_rows + 1):
        best.append(min((best[max(0, n - size)][0] + size + 1, -size) for size in buckets))
    sizes: list[int] = []
    while num_rows > 0:
        sizes.append(-best[num_rows][1])
        num_rows -= sizes[-1]
    return sorted(sizes, reverse=True)


@dataclass(order=True, slots=True)
class _Slot:
    """One device's rows in one microbatch; orders by tokens per row."""

    density: float
    microbatch: int
    device: int
    size: int = field(compare=False)
    used: int = field(compare=False, default=0)
    tokens: int = field(compare=False, default=0)


def _deal(rows: list[list[int]], lengths: dict[int, int], sizes: list[int], num_devices: int) -> list[tuple[int, int]]:
    """(microbatch, row) for each row, heaviest row to the lightest device."""
    loads = [sum(lengths[i] for i in members) for members in rows]
    slots = [_Slot(0.0, m, d, size) for m, size in enumerate(sizes) for d in range(num_devices)]
    places = [(0, 0)] * len(rows)
    for row in sorted(range(len(rows)), key=lambda r: (-loads[r], r)):
        slot = heapq.heappop(slots)
        places[row] = (slot.microbatch, slot.device * slot.size + slot.used)
        slot.used += 1
        slot.tokens += loads[row]
        slot.density = slot.tokens / slot.size
        if slot.used < slot.size:
            heapq.heappush(slots, slot)
    return places
