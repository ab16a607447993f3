"""The token-level seam (docs/architecture.md): plans that the engine gives to an executor, and their results.

A `Plan` is one dispatch: prefill chunks first, then up to `num_steps` decode steps over the named rows. The device is
always one plan ahead of the host, so a plan rests on the state of one plan ago: a row that it names may have stopped
already. The device knows that and takes no step for the row, and its result is empty.

Rows live in slots. A *slot* is an index into the executor's per-row state, local to a dp group; the last chunk of a
request's prefill writes the slot's state (`PrefillChunk.is_last`), decode advances it, and a later request may
overwrite it at any time. Block numbers are local to the dp group's pool; block 0 belongs to no request (rows that must
not write are pointed at it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks
from jaxrl.types import ENVIRONMENT, Sample, SampleKey, SamplingParams, TopTokens

TRASH_BLOCK = 0

TOKENS_PER_STEP = 4
"""The tokens per step that a plan that verifies reserves for a row, if there are blocks."""


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate.

    Attributes:
      request_id: unique within an engine's life.
      key: identity of the sample; the random bits of its tokens derive from it.
      prompt_ids: the prompt.
      params: how to sample.
      share: requests with equal `share` (not None) have the same prompt and share its full KV blocks; so do
        conversations, also while they have no turn.
      kept: the response up to where it was aborted; None: it begins. Its tokens are part of the new sample, and its
        episode is the sample's.
      history: what its next tokens may be proposed from, as the executor takes it; None: nothing.
      session: the conversation that it is a turn of: what the one before it has left in the cache is not run again, as
        long as nobody needed the room; None: none.
    """

    request_id: int
    key: SampleKey
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    share: object | None = None
    kept: Sample | None = field(default=None, compare=False)
    history: Any = None
    session: object | None = None


def resume(request: Request, sample: Sample) -> Request:
    """The request that resumes an aborted sample, with its tokens kept as part of the response."""
    if sample.key != request.key:
        raise ValueError(f"resume: the sample ({sample.key}) is not of this request ({request.key})")
    return replace(request, kept=sample)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run `tokens` at positions `start`, `start + 1`, ... of a request through the model, writing their KV.

    Attributes:
      request: the request.
      dp_group, slot: the row that it fills.
      tokens: the chunk, a piece of prompt + kept tokens.
      start: position of the chunk's first token; everything before it is in the cache (or is written by an earlier
        chunk of the same plan, when a prompt's blocks are shared).
      block_table: the request's blocks so far, in order (`jaxrl.scheduling.tokens.stacks`).
      is_last: the chunk ends the prefill: sample the next token from its last position and activate the row.
      num_generated: tokens of the response that are part of the prefill (kept over an abort or a preemption): the token
        sampled next is the response's token number `num_generated`.
    """

    request: Request
    dp_group: int
    slot: int
    tokens: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    is_last: bool
    num_generated: int


Tables = tuple[np.ndarray, np.ndarray]
"""Block tables, filled up with the trash block, int32 [R, widest], and how many blocks each has, int64 [R]."""


class ScheduledRows:
    """The rows that may gain tokens in a plan, in the order of their seats: columns, each [R].

    Attributes:
      request_ids: int64.
      seats: int64, dp group * `num_slots` + slot.
      num_slots: slots of a dp group.
      is_new: bool, its prefill ends in this plan, which brings it a token before it decodes.
      max_new: int64, the most tokens that decode may bring it in this plan; after them it waits for the end of the
        plan. 0 everywhere in a plan that decodes nothing.
      histories: in a plan that verifies, what its tokens may be proposed from (`Request.history`); None: of no row.
    """

    __slots__ = ("_tables", "histories", "is_new", "max_new", "num_slots", "request_ids", "seats")

    def __init__(
        self,
        request_ids: np.ndarray,
        seats: np.ndarray,
        num_slots: int,
        is_new: np.ndarray,
        max_new: np.ndarray,
        tables: Tables | Callable[[], Tables],
        histories: Sequence[Any] | None = None,
    ) -> None:
        self.request_ids, self.seats, self.num_slots = request_ids, seats, num_slots
        self.is_new, self.max_new, self.histories = is_new, max_new, histories
        self._tables = tables

    def __len__(self) -> int:
        return len(self.request_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self.request_ids, self.seats, self.num_slots, self.is_new, self.max_new
        return ScheduledRows, (*columns, self.tables, self.histories)

    @property
    def dp_groups(self) -> np.ndarray:
        return self.seats // self.num_slots

    @property
    def slots(self) -> np.ndarray:
        return self.seats % self.num_slots

    @property
    def tables(self) -> Tables:
        """Block tables that cover every position that this plan may write. A simulation reads none, so they are made
        when they are first asked for: before the next plan."""
        if callable(self._tables):
            self._tables = self._tables()
        return self._tables


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One dispatch.

    Attributes:
      index: dispatch number, from 0: the engine's logical time.
      prefill: chunks, which run first, those of similar lengths in one program.
      rows: those that end their prefill, and those that decode, except while prefill goes first.
      num_steps: the most decode steps before the host looks again; 0: no row decodes.
      leave_after: leave the decode loop early once this many of the plan's rows have stopped in it (a stopped row lets
        a waiting request in); the loop also ends when no row is active.
      verifies: each step verifies tokens that are proposed for the rows that have a history.
      tells_top: it returns its rows' likeliest tokens (`SamplingParams.top_logprobs`); it then verifies nothing.
    """

    index: int
    prefill: tuple[PrefillChunk, ...]
    rows: ScheduledRows
    num_steps: int = 0
    leave_after: int = 1 << 30
    verifies: bool = False
    tells_top: bool = False

    @property
    def num_decoding(self) -> int:
        return len(self.rows) if self.num_steps else 0


@dataclass(frozen=True, slots=True)
class VerifyCounts:
    """What verification did for a row in one plan, or for several rows.

    Attributes:
      steps: steps in which the row gained tokens.
      proposed, accepted: tokens.
      proposing_steps: steps with a proposal; matched: the tokens of context that they were found by, summed.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    proposing_steps: int = 0
    matched: int = 0

    def __add__(self, other: VerifyCounts) -> VerifyCounts:
        return VerifyCounts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class PlanResult:
    """The outcome of one plan: what each of its rows gained, in the order of `Plan.rows`.

    Attributes:
      request_ids: of the rows, int64 [R].
      counts: tokens that each gained, int64 [R]: the first token of a prefill that ended, then decoded ones.
      stopped: the device ended the row: a stop token, or the limit of `SamplingParams.max_tokens`; bool [R].
      token_ids, sampled_logprobs, rollout_logprobs: of all rows, one after another, [sum of `counts`].
      num_steps: decode steps really taken. policy_version: of the weights. duration_s: seconds charged.
      verified: in a plan that verifies, the fields of `VerifyCounts` of each row, int64 [5, R]; None: each decoded
        token is a step's.
      top: in a plan that tells them, the likeliest tokens, of all rows one after another.
      responses: of a simulation, which knows them beforehand: each row's response from its first token to its last.
        They stand in place of `token_ids`, and log-probabilities are 0.
    """

    index: int
    request_ids: np.ndarray
    counts: np.ndarray
    stopped: np.ndarray
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    sampled_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    rollout_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    num_steps: int = 0
    policy_version: int = 0
    duration_s: float = 0.0
    verified: np.ndarray | None = None
    top: TopTokens | None = None
    responses: np.ndarray | None = None

    def part(self, row: int) -> slice:
        end = int(self.counts[: row + 1].sum())
        return slice(end - int(self.counts[row]), end)

    def tokens(self, row: int, before: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ids and both log-probabilities of the tokens that a row gained; its response had `before` tokens."""
        if self.responses is not None:
            ids = self.responses[row][before : before + int(self.counts[row])]
            return ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
        part = self.part(row)
        return self.token_ids[part], self.sampled_logprobs[part], self.rollout_logprobs[part]


@dataclass(frozen=True, slots=True)
class Capacity:
    """An executor's sizes.

    Attributes:
      num_groups: dp groups, each with its own pool and slots. The rest is per dp group.
      num_blocks: KV blocks, `TRASH_BLOCK` included; block_size: positions of each.
      max_prefill_tokens: the most that one plan may carry.
      stacks: the layers, by what their windows leave behind.
    """

    num_groups: int
    num_slots: int
    num_blocks: int
    block_size: int
    max_prefill_tokens: int
    stacks: KvStacks = WHOLE


def check_request(request: Request, capacity: Capacity, max_model_len: int | None) -> None:
    """Raises ValueError for a request that is malformed, or can never run with so much room and so long a model."""
    which = f"request {request.request_id} ({request.key})"
    num_prompt, num_max = len(request.prompt_ids), request.params.max_tokens
    if not num_prompt:
        raise ValueError(f"{which}: the prompt must have at least one token")
    if request.kept:
        _check_kept(which, request.kept, request.params)
    length = f"prompt ({num_prompt}) + max_tokens ({num_max})"
    if max_model_len is not None and num_prompt + num_max > max_model_len:
        raise ValueError(
            f"{which}: {length} exceeds max_model_len ({max_model_len}): lower data.max_prompt_length or "
            "data.max_response_length"
        )
    need = capacity.stacks.most_blocks(num_prompt + num_max, capacity.block_size)
    if need > capacity.num_blocks - 1:
        raise ValueError(
            f"{which}: {length} takes {need} blocks of {capacity.block_size} positions, and a pool has "
            f"{capacity.num_blocks - 1}: raise rollout.num_blocks ({capacity.num_blocks}), or lower "
            "data.max_prompt_length or data.max_response_length"
        )


def _check_kept(which: str, kept: Sample, params: SamplingParams) -> None:
    count = len(kept)
    if any(len(values) != count for values in (kept.sampled_logprobs, kept.rollout_logprobs, kept.versions)):
        raise ValueError(f"{which}: kept tokens ({count}) need as many log-probabilities and versions")
    if params.top_logprobs:
        raise ValueError(f"{which}: the likeliest tokens of the {count} kept tokens are not known (top_logprobs)")
    has_stopped = kept.token_ids[-1] in params.stop_token_ids and kept.versions[-1] != ENVIRONMENT
    if count >= params.max_tokens or has_stopped:
        raise ValueError(f"{which}: finished already: {count} kept tokens, max_tokens {params.max_tokens}")


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a request runs: its dp group, its slot there, and how many leading positions have their KV in its blocks.

    `decodes`: its prefill is complete; the newest of its tokens has no KV yet.
    """

    dp_group: int
    slot: int
    num_written: int
    decodes: bool


class VerifyRule(Protocol):
    """Decides plan by plan whether its steps verify proposed tokens; a mechanism's."""

    def decides(self, rows: int, context: int) -> bool:
        """Whether the next plan verifies; its fullest dp group has `rows` rows with `context` tokens in total. Called
        once for each plan that could."""
        ...

    def saw(self, counts: VerifyCounts) -> None:
        """Takes in what a plan that verified has brought, all rows together."""
        ...


class Ticket(Protocol):
    """A plan that was submitted and not yet collected."""

    @property
    def index(self) -> int: ...


class Executor(Protocol):
    """Runs plans, in order, one ahead of the host: a mesh (`jaxrl.rollout.executor`) or a simulation."""

    sizes: Capacity

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that this executor cannot run; asked before the request is queued."""
        ...

    def submit(self, plan: Plan) -> Ticket:
        """Dispatches a plan; returns at once."""
        ...

    def collect(self, ticket: Ticket) -> PlanResult:
        """Waits for a plan's result. Tickets are collected in the order in which they were submitted."""
        ...
