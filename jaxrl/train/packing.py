"""TrainBatch -> microbatches of packed rows, and per-token results back to samples.

Several samples share a row, told apart by segment ids, and the samples of a prompt share its tokens. Source: sequence
packing as in Krell et al. 2021 (arXiv:2107.02027), by best-fit decreasing. Departures: groups of samples are packed,
not single samples. Best-fit only finds the number of rows; the groups are then dealt again, longest first, to the
emptiest row, so that all rows (hence all devices) hold similar numbers of tokens.

**Shared prompts.** Samples of a prompt that lie in the same row follow one copy of it: a segment with the prompt except
for its last token (the shared prefix), then per sample a segment with the prompt's last token and the response. The
last token is repeated because each sample's first log-probability is read from its hidden state. A token sees its own
segment and, by `prefix_ids`, the prefix: the same tokens as if the prompt stood before each sample, so the same
numbers. A group that does not fit is split over rows, each with a copy of the prefix; a single sample is one segment,
prompt included.

**Alignment.** Every array of a `TokenBatch` is indexed by the token that it is about: `logprobs[r, t]` is the
log-probability of `tokens[r, t]`, which the model computes at column t-1. `loss_mask` is 1 at response tokens only;
each has a predecessor in its segment, because a prompt has at least one token.

**Shapes.** A row's length and the number of rows come from small sets, so the compiled programs do not depend on the
lengths of single responses. The shortest allowed row is the bucket W of the longest sample (`bucket_length`; always the
same in a run with some responses near the limit). Others are 2W, 4W, ... up to the token budget of a microbatch;
`_plan` takes the cheapest. With numbers of rows from `row_buckets`, a budget of b·W tokens has at most (log2 b + 2)² /
2 shapes. Nothing here looks at a clock or draws at random.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
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
      prefix_ids: int32, the segment that this token sees besides its own; its own if there is none.
      positions: int32 within the sample (prompt included); 0 at padding.
      loss_mask: float32, 1 at tokens to learn from (several spans per sample are possible), else 0.
      advantages: float32.
      rollout_logprobs, old_logprobs, ref_logprobs: float32; 0 where unknown or masked.
      versions: int32, the `policy_version` that produced each response token; 0 elsewhere.
      sequence_length: int32, how many tokens of its segment have mask 1 (the same at all tokens of a segment).
      num_sequences: int32 [R], samples in each row that have at least one token with mask 1.
    """

    tokens: Array
    segment_ids: Array
    prefix_ids: Array
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
        """Arrays of padding only, as numpy arrays."""

        def integers() -> np.ndarray:
            return np.zeros((rows, length), np.int32)

        def floats() -> np.ndarray:
            return np.zeros((rows, length), np.float32)

        return cls(
            tokens=integers(),
            segment_ids=integers(),
            prefix_ids=integers(),
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
    share_prompts: bool = True,
    row_cost: Callable[[int], float] = float,
) -> Packed:
    """Packs samples into microbatches with rows that split evenly over the devices.

    Args:
      batch: samples without response tokens are left out. Prompts are the same if their keys and tokens are. Its loss
        masks may have several spans per sample.
      max_model_length: tokens of the longest allowed sample, prompt included.
      max_tokens_per_device: tokens of a microbatch on one device, padding included (at least one row is used).
      num_devices: device d gets rows d*n to (d+1)*n of a microbatch with n rows per device.
      share_prompts: whether samples of a prompt share its tokens; if not, `prefix_ids` equals `segment_ids`.
      row_cost: the cost of a row of so many tokens, in units of a token that attends to nothing; it decides between few
        long rows, which share more, and many short ones.

    Raises:
      ValueError: a prompt is empty, or a sample is longer than `max_model_length`.
    """
    chosen = [i for i, sample in enumerate(batch.samples) if len(sample)]
    if not chosen:
        return Packed([], [None] * len(batch))
    groups: dict[object, _Family] = {}
    for i in chosen:
        prompt = batch.prompts[i]
        if not prompt.token_ids:
            raise ValueError(f"prompt {prompt.key} has no tokens: a response's first token needs a context")
        # a prompt of one token has nothing to share: its last token is repeated anyhow
        shared = share_prompts and len(prompt.token_ids) > 1
        family = groups.setdefault((prompt.key, prompt.token_ids) if shared else i, _Family(len(prompt.token_ids), {}))
        family.responses[i] = len(batch.samples[i])
    families = list(groups.values())
    longest = max(family.prompt + max(family.responses.values()) for family in families)
    plan = _plan(families, row_length(longest, max_model_length), max_tokens_per_device, num_devices, row_cost)
    microbatches = [TokenBatch.zeros(size * num_devices, plan.width) for size in plan.sizes]
    places: list[Place | None] = [None] * len(batch)
    for pieces, (micro, row) in zip(plan.rows, _deal(plan.rows, plan.sizes, num_devices), strict=True):
        writer = _RowWriter(microbatches[micro], row, batch)
        for piece in sorted(pieces, key=lambda piece: piece.members):
            if piece.prefix:
                writer.prefix(batch.prompts[piece.members[0]].token_ids[: piece.prefix])
            for i in piece.members:
                mask = np.ones(len(batch.samples[i]), np.float32) if batch.loss_masks is None else batch.loss_masks[i]
                start = writer.sample(i, piece.prefix, np.asarray(mask))
                places[i] = Place(micro, row, start, len(batch.samples[i]))
    return Packed(microbatches, places)


class _RowWriter:
    """Writes segments into a row of a microbatch, from left to right."""

    def __init__(self, out: TokenBatch, row: int, batch: TrainBatch) -> None:
        self._out, self._row, self._batch = out, row, batch
        self._column, self._segment, self._prefix = 0, 0, 0

    def prefix(self, token_ids: tuple[int, ...]) -> None:
        """Writes the tokens that the following samples share."""
        self._begin(np.asarray(token_ids, np.int32), first_position=0)
        self._prefix = self._segment

    def sample(self, i: int, shared: int, mask: np.ndarray) -> int:
        """Writes the prompt after its `shared` prefix tokens, and the response; returns the response's column."""
        batch, out = self._batch, self._out
        old_logprobs = batch.samples[i].rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs[i]
        prompt, sample = batch.prompts[i].token_ids[shared:], batch.samples[i]
        whole = self._begin(np.concatenate([np.asarray(prompt, np.int32), sample.token_ids]), first_position=shared)
        response = (self._row, slice(whole.start + len(prompt), whole.stop))
        learned = int(np.count_nonzero(mask))
        if shared:
            _put(out.prefix_ids, (self._row, whole), self._prefix)
        _put(out.sequence_length, (self._row, whole), learned)
        _put(out.loss_mask, response, mask)
        _put(out.advantages, response, batch.advantages[i])
        _put(out.rollout_logprobs, response, sample.rollout_logprobs)
        _put(out.old_logprobs, response, old_logprobs)
        if batch.ref_logprobs is not None:
            _put(out.ref_logprobs, response, batch.ref_logprobs[i])
        _put(out.versions, response, sample.versions)
        assert isinstance(out.num_sequences, np.ndarray)
        out.num_sequences[self._row] += learned > 0
        return whole.start + len(prompt)

    def _begin(self, tokens: np.ndarray, first_position: int) -> slice:
        self._segment += 1
        columns = slice(self._column, self._column + len(tokens))
        self._column = columns.stop
        where = (self._row, columns)
        _put(self._out.tokens, where, tokens)
        _put(self._out.segment_ids, where, self._segment)
        _put(self._out.prefix_ids, where, self._segment)
        _put(self._out.positions, where, np.arange(first_position, first_position + len(tokens)))
        return columns


def _put(array: Array, where: tuple[int, slice], values: object) -> None:
    assert isinstance(array, np.ndarray)
    array[where] = values


# ---------------------------------------------------------------- what goes where


# The cost of a microbatch beside its rows, in tokens: gathering the weights and adding up their gradients.
_MICROBATCH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Family:
    """Samples that may share a prompt of `prompt` tokens: tokens of each response by sample index."""

    prompt: int
    responses: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Samples of a family that lie in one row, and how many tokens of their prompt they share (0: alone)."""

    members: tuple[int, ...]
    prefix: int
    length: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Pieces of each row, tokens of a row, and rows per device of each microbatch."""

    rows: list[list[_Piece]]
    width: int
    sizes: list[int]


def _plan(
    families: list[_Family], shortest: int, max_tokens: int, num_devices: int, row_cost: Callable[[int], float]
) -> _Plan:
    """The cheapest plan over all allowed widths and all limits on the samples that share a row."""
    best: tuple[float, _Plan, list[_Piece]] | None = None
    for width in _widths(shortest, max_tokens):
        for most in _halvings(max(len(family.responses) for family in families)):
            pieces = [piece for family in families for piece in _split(family, width, most)]
            rows = _best_fit_decreasing(pieces, width)
            sizes = _microbatch_sizes(-(-len(rows) // num_devices), max(1, max_tokens // width), width)
            cost = sum(sizes) * row_cost(width) + len(sizes) * _MICROBATCH_TOKENS
            if best is None or cost < best[0]:
                best = cost, _Plan(rows, width, sizes), pieces
    assert best is not None
    _, plan, pieces = best
    level = _level(pieces, plan.width, sum(plan.sizes) * num_devices)
    return plan if level is None else _Plan(level, plan.width, plan.sizes)


def _widths(shortest: int, max_tokens: int) -> Iterator[int]:
    width = shortest
    yield width
    while (width := 2 * width) <= max_tokens:
        yield width


def _halvings(count: int) -> Iterator[int]:
    yield count
    while count > 1:
        count = -(-count // 2)
        yield count


def _split(family: _Family, width: int, most: int) -> list[_Piece]:
    """A family cut into pieces of at most `most` samples that fit `width`: longest sample first, into the first."""
    order = sorted(family.responses, key=lambda i: (-family.responses[i], i))
    if most == 1:
        return [_Piece((i,), 0, family.prompt + family.responses[i]) for i in order]
    members: list[list[int]] = []
    loads: list[int] = []
    prefix = family.prompt - 1
    for i in order:
        need = 1 + family.responses[i]
        row = next((r for r, load in enumerate(loads) if load + need <= width and len(members[r]) < most), len(loads))
        if row == len(loads):
            members.append([])
            loads.append(prefix)
        members[row].append(i)
        loads[row] += need
    return [_Piece(tuple(sorted(m)), prefix if len(m) > 1 else 0, load) for m, load in zip(members, loads, strict=True)]


def _longest_first(pieces: list[_Piece]) -> list[_Piece]:
    return sorted(pieces, key=lambda piece: (-piece.length, piece.members))


def _best_fit_decreasing(pieces: list[_Piece], width: int) -> list[list[_Piece]]:
    rows: list[list[_Piece]] = []
    free: list[tuple[int, int]] = []  # (tokens, row), sorted
    for piece in _longest_first(pieces):
        at = bisect.bisect_left(free, (piece.length, -1))
        if at == len(free):
            rows.append([])
            space, row = width, len(rows) - 1
        else:
            space, row = free.pop(at)
        rows[row].append(piece)
        bisect.insort(free, (space - piece.length, row))
    return rows


def _level(pieces: list[_Piece], width: int, num_rows: int) -> list[list[_Piece]] | None:
    """All `num_rows` rows evenly loaded: each piece, longest first, to the emptiest row. None if that does not fit."""
    rows: list[list[_Piece]] = [[] for _ in range(num_rows)]
    loads = [(0, row) for row in range(num_rows)]
    for piece in _longest_first(pieces):
        load, row = loads[0]
        if load + piece.length > width:
            return None
        heapq.heapreplace(loads, (load + piece.length, row))
        rows[row].append(piece)
    return rows


def _microbatch_sizes(num_rows: int, max_rows: int, width: int) -> list[int]:
    """Rows per device of each microbatch, largest first: the cheapest way to hold `num_rows` in sizes of buckets."""
    buckets = row_buckets(max_rows)
    # cost of holding n rows, and the last size used
    best: list[tuple[float, int]] = [(0.0, 0)]
    extra = _MICROBATCH_TOKENS / width
    for n in range(1, num_rows + 1):
        best.append(min((best[max(0, n - size)][0] + size + extra, -size) for size in buckets))
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


def _deal(rows: list[list[_Piece]], sizes: list[int], num_devices: int) -> list[tuple[int, int]]:
    """(microbatch, row) for each row, heaviest row to the lightest device."""
    loads = [sum(piece.length for piece in pieces) for pieces in rows]
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
