"""What simulated devices hold of their rows, and what rows gain in a plan: arrays by row, read when they are asked for.

Purpose: a plan of a large machine names thousands of rows. `SteadyRows` and `SteadyPlan` name them without an object
each, `SimulatedRows` is the state that devices would hold, and `Gains` the outcome of a plan, with tokens made when
they are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from jaxrl.scheduling.layouts.relayout import ResidentRow
from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import DecodeRow, Plan, Request, RowResult, VerifyCounts
from jaxrl.sim.replay import VOCABULARY
from jaxrl.sim.verification import counts_of

_SEQUENCE = np.tile((np.arange(VOCABULARY) * 17 % VOCABULARY).astype(np.int32), 4)  # for all but very long responses
_PLACE_OF_ONE = pow(17, -1, VOCABULARY)  # a token t stands at t * _PLACE_OF_ONE, modulo VOCABULARY
_ZEROS = np.zeros((1 << 16,), np.float32)
_ZEROS.flags.writeable = False


class SteadyRows(Sequence[DecodeRow]):
    """The rows of a steady batch's plan, each made when it is asked for; to be read before the next plan is made,
    because block tables are those of that moment.

    Args:
      ids, seats: see `SteadyPlan`. num_slots: of a dp group. blocks: has the tables. max_new: of every row.
    """

    def __init__(self, ids: np.ndarray, seats: np.ndarray, num_slots: int, blocks: BlockManager, max_new: int) -> None:
        self._ids, self._seats, self._num_slots, self._blocks = ids, seats, num_slots, blocks
        self._max_new = max_new

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> DecodeRow: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[DecodeRow, ...]: ...

    def __getitem__(self, place: int | slice) -> DecodeRow | tuple[DecodeRow, ...]:
        if isinstance(place, slice):
            return tuple(self[i] for i in range(len(self))[place])
        request_id, (group, slot) = int(self._ids[place]), divmod(int(self._seats[place]), self._num_slots)
        return DecodeRow(request_id, group, slot, self._blocks.table(request_id), self._max_new)


@dataclass(frozen=True, slots=True)
class SteadyPlan(Plan):
    """A plan that also has the rows of `decode` as arrays, each [rows] and int64, by ascending seat.

    Attributes:
      ids: request ids.
      seats: dp group * num_slots + slot.
    """

    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), compare=False)
    seats: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), compare=False)


class Gains(Mapping[int, RowResult]):
    """What the rows of a plan gained, by request id: counts, and tokens when they are asked for.

    Args, each [rows that gained something] and in the order of seats:
      ids: request ids, int64.
      responses: each row's whole response, int32 [tokens].
      first, last: the positions that the plan brought, `last` excluded.
      stopped: bool, whether the row stopped.
      verified: in a plan that verifies, `Verified.counts` of these rows, int64 [5, rows].
    """

    def __init__(
        self,
        ids: np.ndarray,
        responses: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        stopped: np.ndarray,
        verified: np.ndarray | None = None,
    ) -> None:
        self._ids, self._responses, self._first, self._last, self._stopped = ids, responses, first, last, stopped
        self._verified = verified
        self._places: dict[int, int] | None = None  # made when all rows are asked for

    def __getitem__(self, request_id: int) -> RowResult:
        if self._places is None:
            self._places = {each: place for place, each in enumerate(self._ids.tolist())}
        return self._row(self._places[request_id])

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together."""
        return int((self._last - self._first).sum())

    def count(self, request_id: int) -> int:
        """Tokens that a request gained."""
        return int((self._last - self._first)[self._ids == request_id].sum())

    def stopped(self) -> list[tuple[int, RowResult]]:
        """The rows that stopped, with their request ids."""
        return [(int(self._ids[place]), self._row(place)) for place in np.flatnonzero(self._stopped).tolist()]

    def tokens(self, request_id: int, first: int, last: int) -> RowResult:
        """Positions [first, last) of a row's response, also those that other plans brought."""
        return _row_result(self._responses[np.flatnonzero(self._ids == request_id)[0]][first:last], False)

    def _row(self, place: int) -> RowResult:
        tokens = self._responses[place][self._first[place] : self._last[place]]
        verified = None if self._verified is None else counts_of(self._verified[:, place])
        return _row_result(tokens, bool(self._stopped[place]), verified)


class SimulatedRows:
    """The state that the devices would hold of their rows: arrays by seat, which is dp group * num_slots + slot. A row
    that comes to a seat has a window of `first_window` tokens."""

    def __init__(self, num_seats: int, first_window: int = 0) -> None:
        self.first_window = first_window
        self.ids = np.full(num_seats, -1, np.int64)
        self.responses = np.empty(num_seats, object)  # int32 [tokens] each, from the first token to the last
        self.context = np.zeros(num_seats, np.int64)  # prompt and response tokens so far
        self.generated = np.zeros(num_seats, np.int64)
        self.left = np.zeros(num_seats, np.int64)  # tokens until it stops
        self.keys = np.empty(num_seats, object)  # `SampleKey` of each
        self.acceptance = np.empty(num_seats, object)  # of the response; None: not asked for yet
        self.windows = np.full(num_seats, first_window)  # the most tokens of its next proposal

    def take(self, seat: int, other: SimulatedRows, other_seat: int) -> None:
        """Copies a row from a seat of `other`."""
        for mine, theirs in zip(self._arrays(), other._arrays(), strict=True):
            mine[seat] = theirs[other_seat]

    def seat_of(self, row: ResidentRow) -> int:
        """The seat of a row with these tokens, or -1."""
        seats = np.flatnonzero((self.ids == row.request.request_id) & (self.context == row.position + 1))
        return int(seats[0]) if len(seats) else -1

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.ids, self.responses, self.context, self.generated, self.left, self.keys, self.acceptance

    def advance(self, seats: np.ndarray, count: np.ndarray | int) -> None:
        if len(seats):
            self.context[seats] += count
            self.generated[seats] += count
            self.left[seats] -= count

    def gains(
        self, filled: np.ndarray, seats: np.ndarray, tokens: np.ndarray, verified: np.ndarray | None = None
    ) -> Gains:
        """The gains of the plan just run: one token for each of `filled`, and `tokens` for `seats`, of which
        `verified` are `Verified.counts`."""
        if len(filled):
            gained = np.zeros(len(self.ids), np.int64)
            gained[filled] = 1
            gained[seats] += tokens
            if verified is not None:
                of_all = np.zeros((len(verified), len(self.ids)), np.int64)
                of_all[:, seats] = verified
                verified = of_all[:, gained > 0]
            seats = np.flatnonzero(gained)
            tokens = gained[seats]
        last = self.generated[seats]
        return Gains(self.ids[seats], self.responses[seats], last - tokens, last, self.left[seats] == 0, verified)


def _row_result(tokens: np.ndarray, stopped: bool, verified: VerifyCounts | None = None) -> RowResult:
    zeros = _ZEROS[: len(tokens)] if len(tokens) <= len(_ZEROS) else np.zeros(len(tokens), np.float32)
    return RowResult(tokens, zeros, zeros, stopped, verified)


def fillers(request: Request, length: int) -> np.ndarray:
    """The tokens of a response, int32 [length], read-only: `jaxrl.sim.replay.filler` of every position at once."""
    key, stops = request.key, request.params.stop_token_ids
    first = key.prompt_index * 7919 + key.sample_index * 104_729 + key.attempt * 31
    entry = first * _PLACE_OF_ONE % VOCABULARY
    sequence = _SEQUENCE
    if entry + length > len(sequence):
        sequence = np.resize(sequence, entry + length)
    tokens = sequence[entry : entry + length].copy()
    for stop in stops:
        if 0 <= stop < VOCABULARY:
            instead = next(token for token in itertools.count(stop + 1) if token not in stops)
            tokens[(stop * _PLACE_OF_ONE - entry) % VOCABULARY :: VOCABULARY] = instead
    if stops and length < request.params.max_tokens:
        tokens[-1] = stops[0]
    tokens.flags.writeable = False
    return tokens
