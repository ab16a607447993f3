"""Gradients beside the rollout, in a run: frees workers in the middle of a round, and feeds the stream.

Purpose: `StreamSession` stands between the backend, which tells it what has ended (`Freeing`), and the loop, which
offers it groups (`jaxrl.loop.Stream`). The rule (`jaxrl.scheduling.rounds.scale_down`) says when workers are freed and
which; a stream (`jaxrl.train.stream`) computes on their devices. Never imports jax.

Source: RollPacker §4.4, Algorithm 1, lines 17 to 23. Requests move by recomputation, as there, unless `by` says
otherwise.

What a clock decides: when verdicts arrive and when the stream has room, so which groups it is given together, and so
in which order gradients add up. Each call is in the journal before it takes effect, and so is the end of the stream. A
step that runs again makes the same calls, each as soon as its groups are certain, then goes on as it likes; if the end
is there as well, it makes no more. When workers are freed follows from the plans, so it needs no journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl.config.options import StreamSection
from jaxrl.record.journal import Journal
from jaxrl.runtime.layout_session import Drawing
from jaxrl.scheduling.rounds.round import PromptKey
from jaxrl.scheduling.rounds.scale_down import ScaleDown, ScaleDownDecision, load_of
from jaxrl.scheduling.tokens.workers import By, Workers
from jaxrl.types import Group, TrainBatch

KIND = "stream"


class GradientStream(Protocol):
    """`jaxrl.train.stream.TrainStream`, or a simulation."""

    def open(self) -> None: ...

    def give(self, groups: Sequence[Group], step: int, /) -> None: ...

    def poll(self) -> bool: ...

    def finish(self) -> None: ...

    def close(self) -> list[TrainBatch]: ...

    def abandon(self) -> None: ...


class StreamSession:
    """Implements `jaxrl.loop.Stream`, and the backend's hooks.

    Args:
      options: `trainer.stream`.
      workers: of the rollout.
      streams: by the workers whose devices they have; the sets of workers of which one may be freed.
      release: frees pools and weights of some workers' executors.
      journal: where calls go; None for a simulated clock, which decides the same again.
      drawing: where calls are drawn; None: nowhere. clock: its seconds.
      by: how the requests of freed workers move.
    """

    def __init__(
        self,
        options: StreamSection,
        workers: Workers,
        streams: Mapping[tuple[int, ...], GradientStream],
        release: Callable[[Sequence[int]], None],
        journal: Journal | None = None,
        drawing: Drawing | None = None,
        clock: Callable[[], float] = time.perf_counter,
        by: By = "recompute",
    ) -> None:
        self.rule = ScaleDown(options, tuple(streams))
        self.decisions: list[ScaleDownDecision] = []  # of the round
        self._options, self._workers, self._streams = options, workers, streams
        self._release, self._journal = release, journal
        self._is_training = False  # a round of training is under way
        self._frees = False  # and workers may be freed in it
        self._freed: tuple[int, ...] = ()
        self._stream: GradientStream | None = None  # open
        self._step = 0  # of the update that is computed
        self._offered: dict[PromptKey, Group] = {}  # not given yet
        self._num_calls = 0
        self._given: set[PromptKey] = set()
        self._drawing, self._clock = drawing, clock
        self._by: By = by
        self._began_s: float | None = None  # of the call that is under way
        self._busy_s = 0.0  # of calls that ended in this round

    # -- the backend's hooks -----------------------------------------------------------------------------------------

    def begin(self, kind: str) -> None:
        """A round begins; `kind` as in `Backend.begin`."""
        self.decisions, self._busy_s = [], 0.0
        self._is_training = kind != "eval"
        self._frees = self._is_training and (kind != "short" or self._options.short_rounds)
        if self._is_training:
            self.rule.begin(kind)

    def ended(self, lengths: Sequence[int], num_done: int, num_all: int, *, is_stopping: bool) -> None:
        """Responses have ended by themselves. Frees workers if the rule says so.

        Args:
          lengths: of these responses, in tokens.
          num_done, num_all: of the round's samples, or prompts (`counts`), those that have ended and those launched.
          is_stopping: the round is about to end the others: no worker is freed for that.
        """
        if not self._is_training:
            return
        for length in lengths:
            self.rule.finished(length)
        if not self._frees or is_stopping:
            return
        decision = self.rule.after_finish(num_done, num_all, lambda: [load_of(e) for e in self._workers.engines])
        if decision is None:
            return
        self.decisions.append(decision)
        if decision.freed:
            self._free(decision.freed)

    @property
    def counts(self) -> str:
        """What `ended` is told the numbers of: "samples" or "prompts"."""
        return self._options.counts

    def after_plan(self) -> None:
        """A plan has been handed over: goes on with what the stream has."""
        self._feed()

    def end(self) -> dict[str, float]:
        """The round is over; its metrics. The stream stays open until the update."""
        if not self._is_training:
            return {}
        hidden_s = self._busy_s + (0.0 if self._began_s is None else self._clock() - self._began_s)
        self._is_training = False
        self.rule.end()
        last = self.decisions[-1] if self.decisions else None
        measured = {"rollout/scale_down/freed": float(bool(self._freed))}
        if last is not None and last.freed:
            measured["rollout/scale_down/done_share"] = last.num_done / last.num_all
            measured["rollout/scale_down/moved_samples"] = float(last.moved_requests)
            measured["rollout/scale_down/moved_tokens"] = float(last.moved_tokens)
            # to the nanosecond, which is what a simulated clock counts in: the same whenever the step began
            measured["rollout/scale_down/hidden_s"] = round(hidden_s, 9)
        return measured

    def cancel(self) -> None:
        """The round is dropped."""
        if self._is_training:
            self.rule.cancel()
        self._is_training = False
        self.abandon()

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def offer(self, groups: Sequence[Group], step: int) -> None:
        """Scored groups that will be in the batch of update `step`."""
        self._step = step
        if self._stream is not None:
            self._offered |= {g.prompt.key: g for g in groups if g.prompt.key not in self._given}
            self._feed()

    def close(self) -> list[TrainBatch]:
        """Ends the stream: the trainer has its sums. Workers are open again."""
        if self._stream is None:
            return []
        while (keys := self._recorded()) is not None:  # the calls that an earlier run of the step made by now
            self._finish()
            self._call(keys)
        if self._journal is not None and not self._has_ended():
            self._journal.append(self._step, KIND, (self._num_calls,), {"end": True})
        self._finish()
        batches = self._stream.close()
        self._reopen()
        return batches

    def abandon(self) -> None:
        """Drops what the stream has."""
        if self._stream is not None:
            self._stream.abandon()
            self._reopen()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint."""
        return self.rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another run was; without a state, where it starts."""
        if state:
            self.rule.load_state_dict(state)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _free(self, workers: tuple[int, ...]) -> None:
        for worker in workers:
            self._workers.close(worker, self._by)
        self._release(workers)
        self._freed, self._stream = workers, self._streams[workers]
        self._stream.open()

    def _reopen(self) -> None:
        for worker in self._freed:
            self._workers.open(worker)
        self._freed, self._stream = (), None
        self._offered, self._given, self._num_calls = {}, set(), 0
        self._began_s = None

    def _feed(self) -> None:
        """Gives the stream what it may have next, if it has room."""
        if self._stream is None or not self._stream.poll():
            return
        self._draw()
        keys = self._recorded()
        if keys is None and not self._has_ended():
            keys = list(self._offered)[: self._options.max_prompts or None]
            if keys and self._journal is not None:
                self._journal.append(self._step, KIND, (self._num_calls,), {"prompts": [list(key) for key in keys]})
        if keys and all(key in self._offered for key in keys):
            self._call(keys)

    def _call(self, keys: Sequence[PromptKey]) -> None:
        assert self._stream is not None
        self._num_calls += 1
        self._given |= set(keys)
        self._began_s = self._clock()
        self._stream.give([self._offered.pop(key) for key in keys], self._step)

    def _finish(self) -> None:
        assert self._stream is not None
        self._stream.finish()
        self._draw()

    def _draw(self) -> None:
        """The call that was under way has ended; seen between two plans, so up to a plan late."""
        if self._began_s is None:
            return
        ended_s = self._clock()
        self._busy_s += ended_s - self._began_s
        if self._drawing is not None:
            self._drawing.complete("gradients", f"part {self._num_calls}", self._began_s, ended_s)
        self._began_s = None

    def _entry(self) -> Mapping[str, Any] | None:
        """What the journal has of the next call."""
        return None if self._journal is None else self._journal.find(self._step, KIND, (self._num_calls,))

    def _recorded(self) -> list[PromptKey] | None:
        """The prompts of the next call, if the journal has it."""
        entry = self._entry()
        return None if entry is None or "end" in entry else [(epoch, index) for epoch, index in entry["prompts"]]

    def _has_ended(self) -> bool:
        entry = self._entry()
        return entry is not None and "end" in entry
