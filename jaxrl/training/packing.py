"""TrainBatch -> microbatches of packed rows, and per-token results back to samples.

Several samples share a row, separated by segment ids, and the samples of a prompt share its tokens. Source: sequence
packing as in Krell et al. 2021 (arXiv:2107.02027), by best-fit decreasing. Departures: groups of samples are packed,
not single samples; and they are dealt evenly where that fits (longest first, to the row with most room), so that all
rows, hence all devices, attend to similar numbers of tokens.

**Shared prompts.** Samples of a prompt in the same row follow one copy of it: a segment with the prompt except for its
last token (the shared prefix), then per sample a segment with the prompt's last token and the response. The last token
is repeated because each sample's first log-probability is read from its hidden state. A token sees its own segment and,
by `prefix_ids`, the prefix, as if the prompt preceded each sample. A group that does not fit is split over rows, each
with a copy of the prefix; a single sample is one segment, prompt included.

**Alignment.** A response token's data is where the model predicts the token, one column before it: `targets[r, t]` is
`tokens[r, t + 1]`, and `logprobs[r, t]` its log-probability. `loss_mask` is 1 at such columns only. They are in the
token's own segment, because a prompt has at least one token. So no column needs its neighbour, and a row may be cut
anywhere.

**Rows of several devices** (`actor.context_parallel_size`). A row is cut into twice as many pieces as devices share it,
and each device has one from the beginning and one from the end (`dealt`). Under a causal mask all devices then have
equal work, as in Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). Rows in this file are uncut.

**Shapes.** A run has at most four microbatch shapes (`microbatch_shapes`): a full one, and three quarters, half and a
quarter of it. They follow from the options, the model and the mesh alone, so all programs can be compiled before there
is a batch. Rows are as long as attention allows: it skips other segments, so a row of the full token budget costs no
more per token than a short one.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct

from jaxrl.config import Config
from jaxrl.kernels.attention import PackedAttention
from jaxrl.models.config import ModelConfig
from jaxrl.types import TrainBatch

Array = np.ndarray | jax.Array


class TokenBatch(struct.PyTreeNode):
    """A microbatch of R packed rows of T tokens. All arrays are [R, T] except `num_sequences` and a teacher's. The
    first four are about the column's own token; the others, from `targets` on, about the one that it predicts."""

    tokens: Array  # int32; padding is 0
    segment_ids: Array  # int32, 1, 2, ... within a row; 0 at padding
    prefix_ids: Array  # int32, the segment that this token sees besides its own; its own if there is none
    positions: Array  # int32 within the sample (prompt included); 0 at padding
    targets: Array  # int32, the response's token that is predicted; 0 where there is none
    loss_mask: Array  # float32, 1 at tokens to learn from (several spans per sample are possible), else 0
    advantages: Array  # float32, as all up to `returns`; 0 where unknown or masked
    rollout_logprobs: Array
    old_logprobs: Array
    ref_logprobs: Array
    values: Array  # the critic's before the update
    returns: Array  # what it is to learn
    sequence_length: Array  # int32, how many columns of a segment have mask 1 (the same at all of them)
    num_sequences: Array  # int32 [R], samples in each row that have at least one token with mask 1
    teacher_ids: Array | None = None  # int32 [R, T, K], those that it finds likeliest; None where no loss reads them
    teacher_logprobs: Array | None = None  # float32 [R, T, K + 1], of those, and of all others together; likewise

    @classmethod
    def zeros(cls, rows: int, length: int, top_k: int = 0) -> TokenBatch:
        """Arrays of padding only, as numpy arrays; with `top_k` a teacher's among them."""
        integers = "tokens", "segment_ids", "prefix_ids", "positions", "targets", "sequence_length"
        floats = "loss_mask", "advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns"
        return cls(
            **{name: np.zeros((rows, length), np.int32) for name in integers},
            **{name: np.zeros((rows, length), np.float32) for name in floats},
            num_sequences=np.zeros((rows,), np.int32),
            teacher_ids=np.zeros((rows, length, top_k), np.int32) if top_k else None,
            teacher_logprobs=np.zeros((rows, length, top_k + 1), np.float32) if top_k else None,
        )

    def with_columns(self, order: np.ndarray) -> TokenBatch:
        """The same with the columns of every row in another order; of numpy arrays."""
        return jax.tree.map(lambda x: x[:, order] if x.ndim > 1 else x, self)


def dealt(length: int, count: int) -> np.ndarray:
    """The columns of a row of `length` tokens, a multiple of 2 `count`, in the order in which `count` devices hold
    them, one after another."""
    pieces = np.arange(length).reshape(2 * count, -1)
    return np.stack([pieces[:count], pieces[: -count - 1 : -1]], axis=1).reshape(-1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample's response is predicted: at columns `start` to `start + length` of a microbatch's row."""

    microbatch: int
    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Packed:
    """Microbatches (numpy), and per sample its place; None for samples without response tokens."""

    microbatches: list[TokenBatch]
    places: list[Place | None]

    def unpack(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per-token results [R, T, ...], one array per microbatch, as one array [T_i, ...] per sample, in the batch's
        order; [0] where no sample has tokens."""
        nothing = results[0][0, :0] if results else np.zeros((0,), np.float32)

        def one(place: Place | None) -> np.ndarray:
            if place is None:
                return np.array(nothing)
            return np.array(results[place.microbatch][place.row][place.start : place.start + place.length])

        return [one(place) for place in self.places]


_PARTS = 4  # a full microbatch, and three quarters, half and a quarter of it
_DEARER = 1.1  # how much dearer a token of a longer row may be


class BatchShape(NamedTuple):
    """A microbatch on one device, or on those that share its rows: rows, and tokens of a row."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def row_length(num_tokens: int) -> int:
    """The shortest row for this many tokens: a multiple of 16, beyond 512 of 128."""
    return -(-num_tokens // _step(num_tokens)) * _step(num_tokens)


def _step(num_tokens: int) -> int:
    return 128 if num_tokens > 512 else 16


def microbatch_shapes(
    config: Config, model_config: ModelConfig, num_devices: int, attention: PackedAttention
) -> tuple[BatchShape, ...]:
    """The shapes that a run's microbatches may have, ascending; the last one is a full microbatch.

    A full one has as many tokens as `actor.ppo_max_token_len_per_gpu` allows (at least one row of the longest sample),
    but no more than a minibatch can have. Its rows are as long as possible without making a token more than a tenth
    dearer than in rows of one sample, and without holding a longer row's scores.
    """
    data, group = config.data, config.rollout.n
    longest_group = data.max_prompt_length + group * (data.max_response_length + 1)
    most = config.mini_batch_prompts * longest_group
    sharers = config.actor.context_parallel_size  # all sizes are of one of them, until the end
    longest = -(-config.max_model_length // sharers)
    shortest, budget = row_length(longest), config.actor.ppo_max_token_len_per_gpu
    if shortest > budget:
        shortest = -(-longest // 16) * 16
    full = max(min(budget // _step(budget) * _step(budget), row_length(-(-most // num_devices))), shortest)
    # the work of attention per token and key, over that of the products with weights
    m = model_config
    per_key = 2 * m.num_layers * m.num_heads * m.head_dim / m.num_active_params()

    def cost(length: int) -> float:
        return 1 + per_key * attention.num_keys(sharers * length)

    rows, length = full // shortest, shortest
    for fewer in range(1, rows + 1):
        longer = max(full // fewer // _step(full // fewer) * _step(full // fewer), shortest)
        if not attention.holds_scores(sharers * longer) and cost(longer) <= _DEARER * cost(shortest):
            rows, length = fewer, longer
            break
    parts = range(1, _PARTS + 1)
    if rows > 1:
        counts = sorted({-(-rows * part // _PARTS) for part in parts})
        return tuple(BatchShape(count, sharers * length) for count in counts)
    lengths = {min(row_length(-(-length * part // _PARTS)), length) for part in parts}
    return tuple(BatchShape(1, sharers * shorter) for shorter in sorted(lengths))


def pack(
    batch: TrainBatch,
    *,
    shapes: Sequence[BatchShape],
    max_model_length: int,
    num_row_groups: int = 1,
    top_k: int = 0,
) -> Packed:
    """Packs samples into microbatches with rows that split evenly over groups of devices that share rows.

    Args:
      batch: samples without response tokens are left out. Prompts are the same if their keys and tokens are.
      shapes: of a group's microbatches, ascending; rows of the last one hold the longest allowed sample.
      max_model_length: tokens of the longest allowed sample, prompt included.
      num_row_groups: group g gets rows g*n to (g+1)*n of a microbatch with n rows per group.
      top_k: a teacher's tokens in each column; 0 leaves the batch's out.
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
        key = (prompt.key, prompt.token_ids) if len(prompt.token_ids) > 1 else i
        family = groups.setdefault(key, _Family(len(prompt.token_ids), {}))
        family.responses[i] = len(batch.samples[i])
    families = list(groups.values())
    longest = max(family.prompt + max(family.responses.values()) for family in families)
    if longest > max_model_length:
        raise ValueError(
            f"a sample of {longest} tokens exceeds data.max_prompt_length + data.max_response_length "
            f"({max_model_length} tokens)"
        )
    plan = _plan(families, shapes, num_row_groups)
    microbatches = [TokenBatch.zeros(shape.rows * num_row_groups, shape.length, top_k) for shape in plan.shapes]
    places: list[Place | None] = [None] * len(batch)
    for (micro, row), pieces in sorted(plan.rows.items()):
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
        self._row: dict[str, Any] = {name: x[row : row + 1] for name, x in vars(out).items() if x is not None}
        self._batch = batch
        self._column, self._segment, self._prefix = 0, 0, 0

    def prefix(self, token_ids: tuple[int, ...]) -> None:
        """Writes the tokens that the following samples share."""
        self._begin(np.asarray(token_ids, np.int32), first_position=0)
        self._prefix = self._segment

    def sample(self, i: int, shared: int, mask: np.ndarray) -> int:
        """Writes the prompt after its `shared` prefix tokens, and the response; returns the column that predicts the
        response's first token."""
        batch, sample = self._batch, self._batch.samples[i]
        prompt = batch.prompts[i].token_ids[shared:]
        whole = self._begin(np.concatenate([np.asarray(prompt, np.int32), sample.token_ids]), first_position=shared)
        response = slice(whole.start + len(prompt) - 1, whole.stop - 1)
        learned = int(np.count_nonzero(mask))
        self._put(whole, sequence_length=learned)
        if shared:
            self._put(whole, prefix_ids=self._prefix)
        self._put(
            response,
            targets=sample.token_ids,
            loss_mask=mask,
            advantages=batch.advantages[i],
            rollout_logprobs=sample.rollout_logprobs,
            old_logprobs=sample.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs[i],
        )
        known = {
            **{"ref_logprobs": batch.ref_logprobs, "values": batch.values, "returns": batch.returns},
            **{"teacher_ids": batch.teacher_ids, "teacher_logprobs": batch.teacher_top_logprobs},
        }
        self._put(response, **{n: x[i] for n, x in known.items() if x is not None and n in self._row})
        self._row["num_sequences"] += learned > 0
        return response.start

    def _begin(self, tokens: np.ndarray, first_position: int) -> slice:
        """Begins a segment; returns its columns."""
        self._segment += 1
        columns = slice(self._column, self._column + len(tokens))
        self._column = columns.stop
        positions = np.arange(first_position, first_position + len(tokens))
        self._put(columns, tokens=tokens, segment_ids=self._segment, prefix_ids=self._segment, positions=positions)
        return columns

    def _put(self, columns: slice, **values: Any) -> None:
        for name, value in values.items():
            self._row[name][0, columns] = value


# ---------------------------------------------------------------- what goes where


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
    """Shapes of the microbatches, and the pieces in each (microbatch, row)."""

    shapes: list[BatchShape]
    rows: dict[tuple[int, int], list[_Piece]]


def _plan(families: list[_Family], shapes: Sequence[BatchShape], num_row_groups: int) -> _Plan:
    """The plan of fewest columns; limits on the samples that share a row are tried in halves."""
    most = max(len(family.responses) for family in families)
    limits = [most]
    while most > 1:
        most = -(-most // 2)
        limits.append(most)
    plans: list[_Plan] = []
    for most in limits:
        pieces = [piece for family in families for piece in _split(family, shapes[-1].length, most)]
        pieces.sort(key=lambda piece: (-piece.length, piece.members))
        plans.append(_fill(pieces, shapes, num_row_groups))
    return min(plans, key=lambda plan: sum(shape.tokens for shape in plan.shapes))


def _fill(pieces: list[_Piece], shapes: Sequence[BatchShape], num_row_groups: int) -> _Plan:
    """Full microbatches and at most one smaller one, as few columns as the pieces (longest first) fit into.

    Sizes are counted in steps: `len(shapes)` steps are a full microbatch, and what is left of them a smaller one.
    """
    full, lengths = shapes[-1], [piece.length for piece in pieces]

    def sizes(steps: int) -> list[BatchShape]:
        whole, rest = divmod(steps, len(shapes))
        return [full] * whole + ([shapes[rest - 1]] if rest else [])

    def filled(steps: int) -> _Plan | None:
        chosen = sizes(steps)
        places = [(m, row) for m, shape in enumerate(chosen) for row in range(shape.rows * num_row_groups)]
        room = [chosen[m].length for m, _ in places]
        found = _deal(lengths, room) or _best_fit(lengths, room)
        if found is None:
            return None
        rows: dict[tuple[int, int], list[_Piece]] = {}
        for piece, at in zip(pieces, found, strict=True):
            rows.setdefault(places[at], []).append(piece)
        return _Plan(chosen, rows)

    alone = _best_fit(lengths, [full.length] * len(pieces))
    assert alone is not None, "no piece is longer than a row"
    high = len(shapes) * -(-len(set(alone)) // (full.rows * num_row_groups))  # this many fit for certain
    # the smallest that do; of sizes where they fit and do not by turns, any that is followed by one where they do
    least = bisect.bisect_left(
        range(high), sum(lengths), key=lambda n: num_row_groups * sum(s.tokens for s in sizes(n))
    )
    steps = bisect.bisect_left(range(high), True, lo=least, key=lambda steps: filled(steps) is not None)
    plan = filled(steps)
    assert plan is not None
    return plan


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


def _best_fit(lengths: list[int], room: list[int]) -> list[int] | None:
    """A row for each piece, longest first: the one with least room that holds it. None if one does not fit."""
    free = sorted((tokens, row) for row, tokens in enumerate(room))
    found: list[int] = []
    for length in lengths:
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            return None
        tokens, row = free.pop(at)
        bisect.insort(free, (tokens - length, row))
        found.append(row)
    return found


def _deal(lengths: list[int], room: list[int]) -> list[int] | None:
    """A row for each piece, longest first: the one with most room, so all are filled alike. None if one does not
    fit."""
    free = [(-tokens, row) for row, tokens in enumerate(room)]
    heapq.heapify(free)
    found: list[int] = []
    for length in lengths:
        tokens, row = free[0]
        if length > -tokens:
            return None
        heapq.heapreplace(free, (tokens + length, row))
        found.append(row)
    return found
