"""Builds the indexes that requests draft from, in a thread beside the update.

Source: RhymeRL §5.3: history workers build indexes asynchronously, because a prompt comes again only an epoch later.

Departure: one thread rather than processes. numpy sorts without the interpreter's lock, and an index need not be sent
anywhere; docs/performance.md has both measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.mechanisms.speculation.index import DraftIndex, DraftLengths, num_buckets
from jaxrl.scheduling.rounds.history import HistoryStore, PromptHistory

if TYPE_CHECKING:
    from jaxrl.mechanisms.speculation import Speculation
    from jaxrl.record.timeline import Timeline

TRACK = "history"
"""Of the timeline."""


def draft_lengths(options: Speculation.Options) -> DraftLengths:
    return DraftLengths(options.min_prefix, options.max_prefix, options.max_window)


def index_bytes(lengths: DraftLengths, num_responses: int, num_tokens: int) -> int:
    """The most that an index over so many responses with so many tokens together takes."""
    places = lengths.num_places(num_tokens)
    return 4 * (lengths.text_size(num_responses, num_tokens) + places + num_buckets(places) + 1)


def history_store(options: Speculation.Options) -> HistoryStore:
    """An empty store for `rollout.speculation`; where that is off, of lengths alone."""
    if not options.enable:
        return HistoryStore(0)
    lengths = draft_lengths(options)
    return HistoryStore(
        options.epochs, options.max_bytes, lambda responses, tokens: index_bytes(lengths, responses, tokens)
    )


def build_index(history: PromptHistory, options: Speculation.Options) -> DraftIndex:
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
        options: Speculation.Options,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.build_s = self.wait_s = 0.0
        self._options, self._timeline, self._clock = options, timeline, clock
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
        with nullcontext() if self._timeline is None else self._timeline.span(track, "build", **drawn):
            try:
                return build_index(history, self._options)
            except Exception as error:
                error.add_note(f"while the draft index of prompt {index} was built ({history.num_tokens} tokens)")
                raise
