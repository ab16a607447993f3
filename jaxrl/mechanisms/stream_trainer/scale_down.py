"""Decides when half of the rollout's workers are freed to compute gradients while the others decode. `StreamPace`
decides which prompts' gradients begin when.

`ScaleDown` decides on every finish of a round, and returns, at most once per round, the workers to free; or why not.

Source: RollPacker §4.4 and Algorithm 1, lines 13 to 21. `min_done`, `max_done` and `DONE_STEP` are its 0.2, 0.5 and
0.05: the first finish with a share done of at least `min_done` is a milestone, and then each that is `DONE_STEP` beyond
the one before, up to `max_done`. The two criteria are line 17's: whole TP groups and replicas are freed, half of all,
or none; and the projected peak of KV must fit what stays.

The projection (`projected_kv`): all requests that are left decode side by side, a token each per step. A request of n
tokens is still there after t more steps with a probability from earlier responses: of those longer than n, the share
longer than n + t. The expected KV is the sum over requests of that share times (context + t). `DEVIATIONS` times its
standard deviation is added, up to the KV of all requests together. The largest value over t must fit.

Departures:

- The paper names no formula for the projection, and no margin. With the default margin free, the real peak exceeds the
  expected KV alone in up to 29 % of the checks, and in 1 % with the deviations. Responses to a prompt are taken to
  continue all together or not at all, the worst case: taken as independent they would give up to 15 %
  (docs/mechanisms/stream_trainer.md).
- `kv_margin` is kept free for what the projection does not see: blocks that are filled in part, and pools that are not
  filled alike.
- Earlier lengths are kept by kind of round. A short round of tail batching ends its longest responses early, so its
  lengths say little of a long round. A round's own lengths count from the next round on: in the middle of a round those
  that have ended are the short ones. A response that is longer than all earlier ones is expected to reach its limit.
- The paper frees GPUs "without splitting communication groups" and leaves open which. Here it is the half of the mesh
  with fewer tokens to move, or the first of equal halves. Half of the mesh is a factored mesh itself, to which weights
  pass by slices, and programs are compiled for two sets of devices, not for all.
- What stays must also have a row for each request that is left, so that none waits for others to end.
- The paper writes of requests (Algorithm 1) and of prompts (§6.6), and its authors' code counts prompts
  (Farrrrland/RollPacker, multi_async_generate_scheduler.py): `counts` chooses. Where a fifth of the samples has ended,
  few prompts may be complete, and the freed devices wait for them.
- With `trigger` fixed the projection is not asked: the paper's baseline of Table 3.

Everything here is logical; a decision is journalled because the order of finishes may hold decisions of a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxrl.scheduling.rounds.round import PromptKey
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.lengths import LengthHistory
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks
from jaxrl.types import check_schema

if TYPE_CHECKING:
    from jaxrl.mechanisms.stream_trainer import StreamTrainer

SCHEMA = 1
DONE_STEP = 0.05  # the share of a round's samples between two looks at whether to free workers
MAX_POINTS = 128  # points in time at which the projection is worked out
DEVIATIONS = 2.0  # how far above the expected KV the projection is: at about the 98th percentile

Refusal = Literal["", "rows", "kv"]


@dataclass(frozen=True, slots=True)
class LeftRequest:
    """A request that has not ended, in tokens."""

    num_prompt: int
    num_response: int  # so far
    max_response: int  # the most that its response may have
    prompt_index: int = 0

    @property
    def num_tokens(self) -> int:
        """The tokens of its context, which move."""
        return self.num_prompt + self.num_response


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    requests: tuple[LeftRequest, ...]
    kv_tokens: int  # that its pools hold; in stacks of layers, those of each count (`KvStacks.num_positions`)
    num_rows: int  # requests that it can decode at once
    stacks: KvStacks = WHOLE  # of its layers

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


def load_of(engine: Engine) -> WorkerLoad:
    """The state of a worker's engine, without what the plans in flight will bring."""
    batcher, capacity = engine.batcher, engine.batcher.capacity
    requests = tuple(
        LeftRequest(each.num_prompt, each.num_tokens, each.request.params.max_tokens, each.request.key.prompt_index)
        for each in map(batcher.progress, batcher.live())
    )
    blocks = capacity.num_groups * (capacity.num_blocks - 1)
    rooms = blocks * capacity.block_size, capacity.num_groups * capacity.num_slots
    return WorkerLoad(requests, *rooms, capacity.stacks)


@dataclass(frozen=True, slots=True)
class ScaleDownDecision:
    num_done: int  # of the round's requests, or prompts (`counts`)
    num_all: int
    freed: tuple[int, ...] = ()  # workers, ascending; none where `refusal` says why
    refusal: Refusal = ""  # rows: too few stay; kv: the projection does not fit
    num_left: int = 0  # requests that have not ended
    num_rows: int = 0  # of the workers that would stay
    moved_requests: int = 0  # of the workers that are, or would be, freed
    moved_tokens: int = 0  # of their contexts
    projected_tokens: int = 0  # the largest KV projected; 0 where it was not asked for
    kv_tokens: int = 0  # that may be used on the workers that would stay: their pools, less `kv_margin`
    counts: str = "samples"  # `trainer.stream.counts`

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA} | asdict(self) | {"freed": list(self.freed)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ScaleDownDecision:
        """Reads the output of `to_json`. Raises ValueError for another schema."""
        check_schema("journalled scale-down", entry, SCHEMA)
        fields: dict[str, Any] = {name: value for name, value in entry.items() if name != "schema"}
        fields["freed"] = tuple(int(worker) for worker in entry["freed"])
        return cls(**fields)


def halves(num_workers: int) -> tuple[tuple[int, ...], ...]:
    """The first and the second half of the workers, an even number: halves of the mesh, which is cut along its major
    axes."""
    middle = num_workers // 2
    return tuple(range(middle)), tuple(range(middle, num_workers))


def projected_kv(requests: Sequence[LeftRequest], history: LengthHistory, stacks: KvStacks = WHOLE) -> int:
    """The largest projected number of tokens in KV while these requests decode (see the module). Between two points in
    time the first gives the shares, the second the contexts. Tokens count once for each stack that still holds them."""
    if not requests:
        return 0
    ordered = sorted(requests, key=lambda request: request.prompt_index)
    first_P = np.flatnonzero(np.diff([request.prompt_index for request in ordered], prepend=-1))
    prompt_R, response_R, most_R = np.array([(r.num_prompt, r.num_response, r.max_response) for r in ordered]).T
    context_R, left_R = prompt_R + response_R, most_R - response_R
    step_T = np.unique(np.linspace(0, left_R.max(), MAX_POINTS + 1).astype(np.int64))
    next_T = np.append(step_T[1:], step_T[-1])
    longer_R = history.num_longer(response_R)
    longer_TR = history.num_longer(response_R + step_T[:, None])
    share_TR = np.where(longer_R > 0, longer_TR / np.maximum(longer_R, 1), 1.0)
    held_TR = stacks.num_positions(context_R + np.minimum(next_T[:, None], left_R)) * (step_T[:, None] < left_R)
    deviation_TP = np.add.reduceat(np.sqrt(share_TR * (1 - share_TR)) * held_TR, first_P, axis=1)
    projected_T = (share_TR * held_TR).sum(axis=1) + DEVIATIONS * np.sqrt((deviation_TP**2).sum(axis=1))
    now = int(stacks.num_positions(context_R).sum())
    return max(int(np.ceil(np.minimum(projected_T, held_TR.sum(axis=1)).max())), now)


class ScaleDown:
    """The rule of one run. `candidates`: sets of workers of which one may be freed (`halves`)."""

    def __init__(self, options: StreamTrainer.Options, candidates: Sequence[Sequence[int]]) -> None:
        self.options = options
        self.candidates = tuple(tuple(sorted(workers)) for workers in candidates)
        self._histories: dict[str, LengthHistory] = {}
        self._kind: str | None = None  # of the round under way
        self._lengths: list[int] = []  # of the round under way
        self._looked_at = 0  # requests that were done at the last milestone
        self._is_over = False  # nothing more is decided in this round

    def begin(self, kind: str = "plain") -> None:
        assert self._kind is None, "a round begins before the one before it has ended"
        self._kind, self._lengths, self._looked_at, self._is_over = kind, [], 0, False

    def finished(self, length: int) -> None:
        self._lengths.append(length)

    def end(self) -> None:
        """The round has ended: its lengths count from now on."""
        assert self._kind is not None, "no round has begun"
        history = self._histories.setdefault(self._kind, LengthHistory())
        for length in self._lengths:
            history.add(length)
        self._kind = None

    def cancel(self) -> None:
        """The round is dropped, and its lengths with it."""
        self._kind = None

    def after_finish(
        self, num_done: int, num_all: int, workers: Callable[[], Sequence[WorkerLoad]]
    ) -> ScaleDownDecision | None:
        """The decision when a request has ended: None unless this is a milestone. `num_done`, `num_all`: of the round's
        requests, or prompts (`trainer.stream.counts`); `workers`: gives the state of each, asked at milestones only."""
        assert self._kind is not None, "no round has begun"
        # shares are quotients, correctly rounded: they compare with an option as the decimal numbers would
        options = self.options
        in_time = options.min_done <= num_done / num_all <= options.max_done
        if self._is_over or not in_time or (num_done - self._looked_at) / num_all < DONE_STEP:
            return None
        self._looked_at = num_done
        decision = self._decide(num_done, num_all, workers())
        self._is_over = bool(decision.freed)
        return decision

    def follow(self, decision: ScaleDownDecision) -> None:
        self._looked_at, self._is_over = decision.num_done, bool(decision.freed)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The earlier lengths by kind of round, the oldest first."""
        return {
            "schema": SCHEMA,
            "lengths": {kind: np.asarray(known.lengths(), np.int64) for kind, known in self._histories.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema("scale-down", state, SCHEMA)
        self._histories = {}
        for kind, lengths in state["lengths"].items():
            history = self._histories.setdefault(str(kind), LengthHistory())
            for length in lengths:
                history.add(int(length))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _decide(self, num_done: int, num_all: int, workers: Sequence[WorkerLoad]) -> ScaleDownDecision:
        requests = [request for worker in workers for request in worker.requests]
        freed = min(self.candidates, key=lambda each: (sum(workers[i].num_tokens for i in each), each))
        stays = [worker for i, worker in enumerate(workers) if i not in freed]
        num_rows, pools = sum(worker.num_rows for worker in stays), sum(worker.kv_tokens for worker in stays)
        kv_tokens = int((1 - self.options.kv_margin) * pools)
        projected, refusal = 0, ""
        if self.options.trigger == "adaptive":
            assert self._kind is not None
            history = self._histories.get(self._kind, LengthHistory())
            projected = projected_kv(requests, history, workers[0].stacks)
            refusal = "rows" if len(requests) > num_rows else "kv" if projected > kv_tokens else ""
        return ScaleDownDecision(
            num_done,
            num_all,
            () if refusal else freed,
            refusal,
            len(requests),
            num_rows,
            sum(len(workers[i].requests) for i in freed),
            sum(workers[i].num_tokens for i in freed),
            projected,
            kv_tokens,
            self.options.counts,
        )


DEFAULT_PACE = {"cpu": 4.0}  # else 16
"""A decode step of one copy of the weights waits for them to be read, 2 P bytes for P parameters. The gradient of a
token takes 6 P operations on the same devices, 12 P with the passes for log-probabilities and recomputation. An H100
has 990e12 FLOP/s and 3.35e12 bytes/s. With a quarter to a third of the former reached and all of the latter, that is 12
to 33 tokens per step and copy. A late start is lost to the stream, and an early one delays the update: 16. A CPU reads
no faster than it computes; 4 is what it did in docs/performance.md."""


class StreamPace:
    """Which prompts' gradients begin beside a round, and which of them together: by logical time, never by a clock.

    It knows what has ended, and assumes a pace of the freed devices, in tokens per decode step of the others. How fast
    they really are, and when verdicts come, decides only when the parts are computed.

    Source: RollPacker §4.4. Departure: its trainer takes what is there whenever it has room, so that a clock decides in
    which parts gradients add up, and two runs differ in their last bits.

    Args:
      max_prompts: of a part; 0: all that wait.
      tokens_per_step: that the freed devices are taken to compute in a decode step of the others (`DEFAULT_PACE`).
    """

    def __init__(self, max_prompts: int, tokens_per_step: float) -> None:
        self._max_prompts, self._tokens_per_step = max_prompts, tokens_per_step
        self._waiting: dict[PromptKey, float] = {}  # since that step
        self._chosen: set[PromptKey] = set()
        self._free_at = 0.0  # the step at which the parts so far should be done

    def parts(self, step: float, tokens: Mapping[PromptKey, int]) -> list[list[PromptKey]]:
        """The parts that have begun since the last look. `step`: decode steps since the devices were freed, by logical
        time; `tokens`: of all prompts that are certain to be in the batch, chosen before or not, in its order."""
        for key in tokens:
            if key not in self._chosen:
                self._waiting.setdefault(key, step)
        found: list[list[PromptKey]] = []
        while self._waiting and (begins := max(self._free_at, next(iter(self._waiting.values())))) <= step:
            part = [key for key, since in self._waiting.items() if since <= begins][: self._max_prompts or None]
            self._free_at = begins + sum(tokens[key] for key in part) / self._tokens_per_step
            self._chosen.update(part)
            for key in part:
                del self._waiting[key]
            found.append(part)
        return found
