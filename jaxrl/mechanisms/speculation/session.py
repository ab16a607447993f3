"""A run's history: a round's groups enter the store, and requests draft from indexes over it.

A thread builds a prompt's index beside the update once its rollout has ended. Only the responses are part of a
checkpoint: a resumed run builds the indexes again.

Source: RhymeRL §5.3: history workers build indexes asynchronously, because a prompt comes again only an epoch later.

Departure: one thread rather than processes. numpy sorts without the interpreter's lock, and an index need not be sent
anywhere; docs/performance.md has both measured.

Logical time: a request's index holds the groups of all rounds before its own, and of no other. A request that comes
before its index is ready waits (`rollout/spec/build_wait_s`). A build that fails ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from jaxrl.mechanisms.speculation.index import DraftIndex, DraftLengths, num_buckets
from jaxrl.mechanisms.speculation.options import SpeculationSection
from jaxrl.scheduling.mechanism import Mechanism, RoundEnd, RoundInfo
from jaxrl.scheduling.rounds.history import HistoryStore, PromptHistory
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.types import Group, Prompt

TRACK = "history"
"""Of the timeline."""


class Drawing(Protocol):
    """Traces builds (`jaxrl.record.timeline.Timeline`); called from a thread of its own."""

    def span(self, track: str, name: str, /, **args: Any) -> AbstractContextManager[None]: ...


def draft_lengths(options: SpeculationSection) -> DraftLengths:
    return DraftLengths(options.min_prefix, options.max_prefix, options.max_window)


def index_bytes(lengths: DraftLengths, num_responses: int, num_tokens: int) -> int:
    """The largest size of an index over responses with `num_tokens` together."""
    places = lengths.num_places(num_tokens)
    return 4 * (lengths.text_size(num_responses, num_tokens) + places + num_buckets(places) + 1)


def history_store(options: SpeculationSection) -> HistoryStore:
    """An empty store for `rollout.speculation`; where that is off, of lengths alone."""
    if not options.enable:
        return HistoryStore(0)
    lengths = draft_lengths(options)
    return HistoryStore(
        options.epochs, options.max_bytes, lambda responses, tokens: index_bytes(lengths, responses, tokens)
    )


def build_index(history: PromptHistory, options: SpeculationSection) -> DraftIndex:
    """The index over a prompt's last responses, weighted by their rewards."""
    responses = [response for rollout in history.rollouts for response in rollout.responses()]
    rewards = np.concatenate([rollout.rewards for rollout in history.rollouts])
    return DraftIndex.build(responses, rewards.tolist(), draft_lengths(options))


class Building:
    """An index that is being built (`IndexBuilder.begin`)."""

    __slots__ = ("_at_once", "_future", "_index")

    def __init__(self, future: Future[DraftIndex], at_once: Callable[[], DraftIndex]) -> None:
        self._future, self._at_once = future, at_once
        self._index: DraftIndex | None = None

    @property
    def is_done(self) -> bool:
        return self._index is not None or self._future.done()

    def take(self) -> DraftIndex:
        """The index; waits for it, or builds it here if the thread has not begun. Raises what its build has raised."""
        if self._index is None:
            self._index = self._at_once() if self._future.cancel() else self._future.result()
        return self._index

    def drop(self) -> None:
        self._future.cancel()


class IndexBuilder:
    """Builds indexes in a thread, first come, first served.

    Attributes:
      build_s: seconds of builds in the thread.
      wait_s: seconds in which `take` has blocked.
    """

    def __init__(
        self,
        options: SpeculationSection,
        drawing: Drawing | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.build_s = self.wait_s = 0.0
        self._options, self._drawing, self._clock = options, drawing, clock
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=TRACK)

    def begin(self, index: int, history: PromptHistory) -> Building:

        def beside() -> DraftIndex:
            began = self._clock()
            history.pack()  # else a checkpoint would do it between two steps
            built = self._built(TRACK, index, history)
            self.build_s += self._clock() - began
            return built

        return Building(self._threads.submit(beside), lambda: self._built(f"{TRACK} at once", index, history))

    def take(self, building: Building) -> DraftIndex:
        """As `Building.take`."""
        if building.is_done:
            return building.take()
        began = self._clock()
        try:
            return building.take()
        finally:
            self.wait_s += self._clock() - began

    def close(self) -> None:
        """Ends the thread; builds that have not begun are dropped."""
        self._threads.shutdown(cancel_futures=True)

    def _built(self, track: str, index: int, history: PromptHistory) -> DraftIndex:
        drawn = {"prompt": index, "tokens": history.num_tokens}
        with nullcontext() if self._drawing is None else self._drawing.span(track, "build", **drawn):
            try:
                return build_index(history, self._options)
            except Exception as error:
                error.add_note(f"while the draft index of prompt {index} was built ({history.num_tokens} tokens)")
                raise


class HistorySession(Mechanism):
    """The mechanism: history of earlier rounds, and drafts from it.

    Args:
      store: other mechanisms may read it.
      builder: None: only lengths are kept.
    """

    name = "history"

    def __init__(self, store: HistoryStore, builder: IndexBuilder | None = None) -> None:
        self.store = store
        self._builder = builder
        self._indexes: dict[int, Building] = {}  # of the prompts that the store keeps
        self._begun: dict[int, Building] = {}  # of those, the ones that may still fail
        self._is_training = False  # the round under way is one of training
        self._measured = (0.0, 0.0, 0)  # build_s, wait_s, num_evicted when the last round ended

    # -- the backend's hooks -----------------------------------------------------------------------------------------

    def round_begins(self, info: RoundInfo) -> None:
        """Evaluations neither draft nor are remembered. Raises what a build has raised that ended in the meantime, also
        where no request would need its index."""
        self._is_training = info.is_training
        for index in [index for index, building in self._begun.items() if building.is_done]:
            self._begun.pop(index).take()

    def request(self, request: Request, prompt: Prompt) -> Request:
        index = self.index_of(prompt)
        return request if index is None else replace(request, history=index)

    def index_of(self, prompt: Prompt) -> DraftIndex | None:
        """The index that a new request of a prompt drafts from, if any."""
        if self._builder is None or not self._is_training:
            return None
        building = self._indexes.get(prompt.index)
        return None if building is None else self._builder.take(building)

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        return self.end(end.scored, end.done)

    def end(self, groups: Sequence[Group], counts: Counters) -> dict[str, float]:
        """Takes in the scored groups of a round (trained on, or filtered), and begins their indexes. Returns its
        metrics."""
        if not self._is_training:
            return {}
        self._is_training = False
        if self._builder is not None:  # those of the round before: there since an update ago
            for index in self.store.unsettled():
                self.store.settle(index, self._builder.take(self._indexes[index]).num_bytes)
        changed = self.store.add(groups)
        if self._builder is None:
            return {}
        self._begin(changed)
        before = self._measured
        self._measured = now = (self._builder.build_s, self._builder.wait_s, self.store.num_evicted)
        return spec_metrics(counts) | {
            "rollout/spec/index_bytes": float(self.store.num_bytes),
            "rollout/spec/evicted_prompts": float(now[2] - before[2]),
            "rollout/spec/build_s": now[0] - before[0],
            "rollout/spec/build_wait_s": now[1] - before[1],
        }

    def cancelled(self) -> None:
        self._is_training = False

    def close(self) -> None:
        if self._builder is not None:
            self._builder.close()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.store.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a damaged state."""
        self.store.load_state_dict(state)
        self._begin(self.store.prompts())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, changed: Sequence[int]) -> None:
        """Begins the indexes of these prompts, and drops those of prompts that the store no longer keeps."""
        if self._builder is None:
            return
        kept = {*self.store.prompts()}.difference(changed)
        for index in [index for index in self._indexes if index not in kept]:
            self._begun.pop(index, None)
            self._indexes.pop(index).drop()
        for index in changed:
            history = self.store.history(index)
            assert history is not None, "an index of responses that are not kept"
            self._indexes[index] = self._begun[index] = self._builder.begin(index, history)


def spec_metrics(counts: Counters) -> dict[str, float]:
    """Of a round: `plans_share`, plans that verified drafts; `accept_rate`, drafted tokens that were accepted;
    `drafted_share`, decoded tokens that came from drafts; `tokens_per_step`, the gain of a row in a step of a plan that
    verifies (1 where none did); `match_length`, tokens of the context by which a draft was found."""
    steps, accepted = counts.verifying_row_steps, counts.accepted_tokens
    return {
        "rollout/spec/plans_share": counts.verifying_plans / max(counts.plans, 1),
        "rollout/spec/accept_rate": accepted / max(counts.proposed_tokens, 1),
        "rollout/spec/drafted_share": accepted / max(counts.busy_row_steps + accepted, 1),
        "rollout/spec/tokens_per_step": 1.0 + accepted / max(steps, 1),
        "rollout/spec/match_length": counts.matched_tokens / max(counts.proposed_row_steps, 1),
    }
