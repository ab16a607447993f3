"""A response from its request to its end, and the batcher's columns for responses that have a row.

Purpose: `Response` is one object for all of a response's life in the engine. While it has a row, the columns of `Rows`
hold, by seat, what changes with every plan, and the tokens that it gains: a plan of a thousand rows then costs a few
operations on arrays.

Source: nano-vllm's `Sequence` for the one object. Departures: the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.scheduling.tokens.plan import PlanResult, Request
from jaxrl.types import FinishReason, Sample, TopTokens

StopCheck = Callable[[Request, Sequence[int]], int | None]
"""(request, its response so far) -> how many tokens of it to keep if a stop string is complete, else None."""

Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids, `Sample.sampled_logprobs` and `Sample.rollout_logprobs`."""

_NONE: Tokens = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)


class Response:
    """One live response: its tokens, and where it runs.

    Attributes:
      arrival: its place in the order of arrival.
      seat: its row, dp group * slots + slot; -1: it waits, or has ended.
      has_ended: it is finished, or aborted.
      prefix: prompt and kept tokens, which the prefill runs while the response has this row.
      limit: no position at or beyond this one is ever written.
    """

    __slots__ = (
        *("_kept", "_rows", "_spans", "_top", "arrival", "has_ended", "limit", "num_prompt", "prefix"),
        *("request", "seat"),
    )

    def __init__(self, request: Request, arrival: int) -> None:
        self.request, self.arrival = request, arrival
        self.seat, self.has_ended, self.prefix = -1, False, tuple[int, ...]()
        self.num_prompt = len(request.prompt_ids)
        self.limit = self.num_prompt + request.params.max_tokens
        self._rows: Rows | None = None
        kept = request.kept
        # all tokens; while it has a row, those from before
        self._kept: Tokens = _NONE
        if kept is not None:
            self._kept = kept.token_ids, kept.sampled_logprobs, kept.rollout_logprobs
        self._spans: list[tuple[int, int]] = []  # of tokens made here: the first of a version, and the version
        self._top: list[TopTokens] | None = [] if request.params.top_logprobs else None

    # Where it runs; it must have a row

    @property
    def _own_rows(self) -> Rows:
        assert self._rows is not None, "the response has no row"
        return self._rows

    @property
    def group(self) -> int:
        return self.seat // self._own_rows.num_slots

    @property
    def slot(self) -> int:
        return self.seat % self._own_rows.num_slots

    @property
    def prefilled(self) -> int:
        """Tokens of the prefix that are in plans, or in shared blocks."""
        return len(self.prefix) - int(self._own_rows.unfilled[self.seat])

    @property
    def is_resident(self) -> bool:
        return not self._own_rows.unfilled[self.seat]

    @property
    def pending(self) -> int:
        """The most tokens that plans in flight may add."""
        return self.num_written + 1 - self.num_prompt - self.num_tokens

    @property
    def num_written(self) -> int:
        """Positions that may be written once all plans so far have run, for a row with all of its prefill in plans.

        One less than its tokens: the newest has been sampled but not run through the model.
        """
        return int(self._own_rows.written[self.seat])

    def take_row(self, rows: Rows, seat: int, prefix: tuple[int, ...], unfilled: int, table: int) -> None:
        """Goes to a free row of `rows`; for the rest see there."""
        self._rows, self.seat, self.prefix = rows, seat, prefix
        rows.add(self, seat, unfilled, table)

    def leave_row(self) -> None:
        """Waits, or has ended; its tokens stay."""
        ids, sampled, rollout = self._arrays()
        if not self._own_rows.lends(self.seat):
            ids, sampled, rollout = ids.copy(), sampled.copy(), rollout.copy()
        self._kept = ids, sampled, rollout
        self._own_rows.remove(self.seat)
        self._rows, self.seat = None, -1

    # Its tokens

    @property
    def num_kept(self) -> int:
        """Tokens from before it had its row."""
        return len(self._kept[0])

    @property
    def num_tokens(self) -> int:
        return self.num_kept if self._rows is None else int(self._rows.lengths[self.seat]) - self.num_prompt

    @property
    def tokens(self) -> list[int]:
        return self._arrays()[0].tolist()

    @property
    def last_token(self) -> int:
        return int(self._arrays()[0][-1])

    def _arrays(self) -> Tokens:
        count, kept = self.num_tokens, self.num_kept
        if self._rows is None or count <= kept:
            return self._kept[0][:count], self._kept[1][:count], self._kept[2][:count]
        gained = self._rows.tokens(self.seat, kept, count)
        if not kept:
            return gained
        (ids, sampled, rollout), (more_ids, more_sampled, more_rollout) = self._kept, gained
        return np.append(ids, more_ids), np.append(sampled, more_sampled), np.append(rollout, more_rollout)

    def made_by(self, version: int) -> None:
        """The tokens from here on are made by weights of this version."""
        self._spans.append((self.num_tokens, version))

    def append(self, result: PlanResult, row: int) -> None:
        """Takes what a plan has brought to a row that the response has left."""
        assert self._rows is None
        self.made_by(result.policy_version)
        ids, sampled, rollout = self._kept
        more = result.tokens(row, len(ids))
        self._kept = np.append(ids, more[0]), np.append(sampled, more[1]), np.append(rollout, more[2])

    def append_top(self, result: PlanResult, row: int) -> None:
        """Takes the likeliest tokens that a plan tells, where they are wanted."""
        if self._top is not None:
            assert result.top is not None, "a plan with such a row tells the likeliest tokens"
            part, count = result.part(row), self.request.params.top_logprobs
            self._top.append(TopTokens(result.top.token_ids[part, :count], result.top.logprobs[part, :count]))

    def finish_reason(self, *, stopped: bool, stop_check: StopCheck | None) -> FinishReason | None:
        """Why it is finished, having just gained tokens; None if it is not. A stop string cuts what follows it.

        Args:
          stopped: the device ended its row.
        """
        params = self.request.params
        if stop_check is not None and params.stop_strings:
            keep, count = stop_check(self.request, self.tokens), self.num_tokens
            if keep is not None:
                assert 0 <= keep <= count, f"stop_check keeps {keep} of {count} tokens"
                if self._rows is not None:
                    self._rows.lengths[self.seat] = self.num_prompt + keep
                self._kept = self._kept[0][:keep], self._kept[1][:keep], self._kept[2][:keep]
                return "stop"
        if not stopped:
            return None
        return "stop" if self.last_token in params.stop_token_ids else "length"

    def sample(self, reason: FinishReason) -> Sample:
        """Its sample. The arrays are copies only where it has no row."""
        ids, sampled, rollout = self._arrays()
        firsts = [min(first, len(ids)) for first, _ in self._spans]
        own = np.repeat(np.array([version for _, version in self._spans], np.int32), np.diff([*firsts, len(ids)]))
        kept = self.request.kept
        return Sample(
            key=self.request.key,
            token_ids=ids,
            rollout_logprobs=rollout,
            sampled_logprobs=sampled,
            versions=own if kept is None else np.append(kept.versions, own)[: len(ids)],
            finish_reason=reason,
            top=None if self._top is None else self._top_tokens(),
            episode=None if kept is None else kept.episode,
        )

    def _top_tokens(self) -> TopTokens:
        assert self._top is not None
        none = np.zeros((0, self.request.params.top_logprobs))
        ids, logprobs = zip((none.astype(np.int32), none.astype(np.float32)), *self._top, strict=True)
        return TopTokens(np.concatenate(ids)[: self.num_tokens], np.concatenate(logprobs)[: self.num_tokens])


class Rows:
    """The batcher's state of the responses that have a row: columns, each [seats].

    Attributes:
      responses: None: the row is free.
      ids: request ids, -1: free. arrivals, limits: as in `Response`.
      lengths: tokens so far, the prompt's among them.
      written: `Response.num_written`; during its prefill, one less than `lengths`.
      enough: as long as `written` is no more than this, the next plan can name the row as it is.
      unfilled: tokens of its prefix that no plan has yet.
      tables: its row of `BlockManager.tables`.
      is_new: its prefill ends in the plan that is being made.
      is_watched: what it gains must be looked at, for stop strings or the likeliest tokens.
      has_history, tells_top: bool, whether its request asks for proposals, and for the likeliest tokens.
    """

    def __init__(self, num_groups: int, num_slots: int) -> None:
        num_seats = num_groups * num_slots
        self.num_slots = num_slots
        self.responses: list[Response | None] = [None] * num_seats
        self.ids, self.arrivals = np.full((2, num_seats), -1, np.int64)
        self.lengths, self.limits, self.written, self.enough = np.zeros((4, num_seats), np.int64)
        self.unfilled, self.tables = np.zeros((2, num_seats), np.int64)
        self.is_new, self.is_watched, self.has_history, self.tells_top = np.zeros((4, num_seats), bool)
        self._first = np.zeros(num_seats, np.int64)  # tokens that it had when it got its row, the prompt's among them
        self._no_logprobs = np.zeros(0, np.float32)  # of tokens that were known before
        self._version = -1  # that made the newest tokens
        self._of_others = set[int]()  # seats of rows that have gained no token of this version
        self._known = np.full(num_seats, None, object)  # of a simulation: `PlanResult.responses`
        self._room = 1
        self._gained: Tokens | None = None  # [seats, room] each, made when the first tokens come
        self._taken: np.ndarray | None = None
        self.num_free = [num_slots] * num_groups  # of each dp group

    def taken(self) -> np.ndarray:
        """The seats of rows that are not free, ascending."""
        if self._taken is None:
            self._taken = np.flatnonzero(self.ids >= 0)
        return self._taken

    def __getitem__(self, seat: int) -> Response:
        response = self.responses[seat]
        assert response is not None, f"seat {seat} is free"
        return response

    def youngest(self, group: int) -> Response:
        """The response of a dp group that arrived last."""
        first = group * self.num_slots
        return self[first + int(np.argmax(self.arrivals[first : first + self.num_slots]))]

    def add(self, response: Response, seat: int, unfilled: int, table: int) -> None:
        assert self.responses[seat] is None
        params = response.request.params
        self.responses[seat], self._taken = response, None
        self.ids[seat], self.arrivals[seat] = response.request.request_id, response.arrival
        self.lengths[seat] = self._first[seat] = length = response.num_prompt + response.num_kept
        self.limits[seat], self.written[seat], self.enough[seat] = response.limit, length - 1, -1
        self.unfilled[seat], self.tables[seat] = unfilled, table
        self._of_others.add(seat)
        self.num_free[seat // self.num_slots] -= 1
        self.tells_top[seat] = bool(params.top_logprobs)
        self.is_watched[seat] = bool(params.top_logprobs or params.stop_strings)
        self.has_history[seat] = response.request.history is not None
        self._make_room(response.limit - response.num_prompt - response.num_kept)

    def remove(self, seat: int) -> None:
        self.ids[seat] = self.arrivals[seat] = -1
        self.responses[seat] = self._known[seat] = self._taken = None
        self._of_others.discard(seat)
        self.num_free[seat // self.num_slots] += 1

    def _make_room(self, count: int) -> None:
        """Lets rows gain tokens."""
        if count <= self._room:
            return
        self._room, had = 1 << (count - 1).bit_length(), self._room
        self._no_logprobs = np.zeros(self._room, np.float32)
        if self._gained is not None:
            grown = self._empty()
            for old, new in zip(self._gained, grown, strict=True):
                new[self.taken(), :had] = old[self.taken()]
            self._gained = grown

    def _empty(self) -> Tokens:
        shape = len(self.ids), self._room
        return np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(shape, np.float32)

    def gain(self, result: PlanResult, seats: np.ndarray, is_there: np.ndarray | None) -> None:
        """Takes in what rows have gained.

        Args:
          seats: of the result's rows.
          is_there: bool, which of these rows still have the plan's responses; None: all.
        """
        counts = result.counts
        if result.policy_version != self._version:
            self._version, self._of_others = result.policy_version, set(self.taken().tolist())
        for seat in [*self._of_others]:
            row = int(seats.searchsorted(seat))
            if row < len(seats) and seats[row] == seat and counts[row] and (is_there is None or is_there[row]):
                self[seat].made_by(result.policy_version)
                self._of_others.remove(seat)
                if result.responses is not None:
                    self._known[seat] = result.responses[row]
        if result.responses is None and len(result.token_ids):
            self._gained = self._gained or self._empty()
            before = np.cumsum(counts) - counts
            first = seats * self._room + self.lengths[seats] - self._first[seats] - before
            places = np.repeat(first, counts) + np.arange(len(result.token_ids))
            new = result.token_ids, result.sampled_logprobs, result.rollout_logprobs
            whose = ... if is_there is None else np.repeat(is_there, counts)
            for into, tokens in zip(self._gained, new, strict=True):
                into.reshape(-1)[places[whose]] = tokens[whose]
        own = slice(None) if is_there is None else is_there
        self.lengths[seats[own]] += counts[own]

    def lends(self, seat: int) -> bool:
        """Whether the tokens of a row stay as they are when another response takes it: they were known before."""
        return self._known[seat] is not None

    def tokens(self, seat: int, first: int, last: int) -> Tokens:
        """Tokens of a response that came while it had its row; `first`: those that it had before."""
        if (known := self._known[seat]) is not None:
            return known[first:last], self._no_logprobs[: last - first], self._no_logprobs[: last - first]
        assert self._gained is not None
        ids, sampled, rollout = self._gained
        return ids[seat, : last - first], sampled[seat, : last - first], rollout[seat, : last - first]
