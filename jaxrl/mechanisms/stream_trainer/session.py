"""Gradients beside the rollout, in a run: frees workers in the middle of a round, and feeds the stream.

Purpose: `StreamSession` is the mechanism: the backend tells it what has ended, and the loop which groups are certain to
be in a batch. The rule (`jaxrl.mechanisms.stream_trainer.scale_down`) says when workers are freed and which; a stream
(`jaxrl.mechanisms.stream_trainer.gradients`) computes on their devices. Never imports jax.

Source: RollPacker §4.4, Algorithm 1, lines 17 to 23. Requests move by recomputation, as there; with a latency profile
by KV where that is predicted to be faster (`by`), which no clock decides.

What is streamed, in which parts and in which order is decided before each turn, from what has ended by then
(`jaxrl.mechanisms.stream_trainer.stream_pace`). A clock decides only when a part is given: once its verdicts have come
and the stream has room, at the latest when the round has ended. So a step that runs again adds up the same, and so does
another run. When workers are freed follows from the plans, and these from the clock only where layouts switch by
measured times; that decision is in the journal.

A freed worker, in order: `finished` (called where a response has ended, before the round hears of it) asks the rule,
and closes workers, whose requests move to the others; their pools and weights go, and the stream takes the trainer's
weights. `after_event` learns which groups are certain, `before_turn` decides which of them are the next parts, and both
of them and `while_waiting` give a part to the freed devices when it may go. `round_ends` reports; the stream stays
open. `update_begins` gives what is left, waits, hands the sums to the trainer, and opens the workers again, which
`enter_rollout` of the backend then fills.

What fails on the freed devices ends the run at the boundary before the step (`Interrupted`), which then runs again:
nothing of it has reached the trainer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from jaxrl.mechanisms.stream_trainer.options import StreamSection
from jaxrl.mechanisms.stream_trainer.scale_down import ScaleDown, ScaleDownDecision, load_of
from jaxrl.mechanisms.stream_trainer.stream_pace import StreamPace
from jaxrl.record.journal import Journal
from jaxrl.scheduling.layouts.relayout import SwitchFailed
from jaxrl.scheduling.mechanism import Drawing, Mechanism, Phase, RoundEnd, RoundInfo, UnderWay
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.scheduling.rounds.round import PromptKey
from jaxrl.scheduling.tokens.local_workers import PREFILL_TOKENS_PER_STEP, By, LocalWorkers
from jaxrl.types import Group, Sample, StreamFailed, TrainBatch

FREED = "scale_down"
"""The kind of an entry in the journal, of the step of the update."""


class GradientStream(Protocol):
    """`jaxrl.mechanisms.stream_trainer.gradients.TrainStream`, or a simulation. All but `abandon` raise `StreamFailed`
    if the devices fail."""

    def open(self) -> None: ...

    def give(self, groups: Sequence[Group], step: int, /) -> None: ...

    def poll(self) -> bool: ...

    def wait_quiet(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> list[TrainBatch]: ...

    def abandon(self) -> None: ...


class StreamSession(Mechanism):
    """Gradients beside the rollout, of groups that are certain to be in the next update's batch.

    Args:
      options: `trainer.stream`.
      workers: of the rollout.
      streams: by the workers whose devices they have; the sets of workers of which one may be freed.
      release: frees pools and weights of some workers' executors.
      pace: tokens that a dp group's freed devices are taken to compute per decode step of the others.
      journal: where it goes which workers were freed; None for a simulated clock, which decides the same again.
      drawing: where calls are drawn; None: nowhere. clock: its seconds.
      by: how the requests of freed workers move; a pure function, or one way for all.
    """

    name = "stream"

    def __init__(
        self,
        options: StreamSection,
        workers: LocalWorkers,
        streams: Mapping[tuple[int, ...], GradientStream],
        release: Callable[[Sequence[int]], None],
        pace: float,
        journal: Journal | None = None,
        drawing: Drawing | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        by: By = "recompute",
    ) -> None:
        self.rule = ScaleDown(options, tuple(streams))
        self.decisions: list[ScaleDownDecision] = []  # of the round
        self._options, self._workers, self._streams = options, workers, streams
        self._release, self._pace_of_group, self._journal = release, pace, journal
        self._by: By = by
        self._is_training = False  # a round of training is under way
        self._frees = False  # and workers may be freed in it
        self._freed: tuple[int, ...] = ()
        self._num_copied = 0  # tokens whose KV moved in this round
        self._stream: GradientStream | None = None  # open
        self._step = 0  # of the update that is computed
        self._pace = StreamPace(0, 1.0)  # of the stream that is open
        self._freed_step = 0.0  # of the workers' logical time
        self._info: RoundInfo | None = None  # of the last training round
        self._under_way: UnderWay | None = None
        self._streamed_share = 0.0  # of the prompts of the last update's batch
        self._certain: Callable[[], Sequence[Group]] = tuple
        self._offered: dict[PromptKey, Group] = {}  # scored
        self._parts: deque[list[PromptKey]] = deque()  # decided, not given yet
        self._num_given = 0
        self._drawing, self._clock = drawing, clock
        self._began_s: float | None = None  # of the call that is under way
        self._busy_s = 0.0  # of calls that ended in this round

    # -- the backend's hooks -----------------------------------------------------------------------------------------

    def attach(self, under_way: UnderWay) -> None:
        self._under_way = under_way

    def round_begins(self, info: RoundInfo) -> None:
        """A round begins. No worker is freed where nothing would be computed on it."""
        self.decisions, self._busy_s, self._num_copied = [], 0.0, 0
        self._is_training = info.is_training
        if not self._is_training:
            self._frees = False
            return
        assert self._stream is None, "a round begins while the stream of another is open"
        self._info, self._step = info, info.update
        self._frees = info.certain is not None and (info.kind != "short" or self._options.short_rounds)
        self.rule.begin(info.kind)

    def finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
        """Responses have ended by themselves. Frees workers if the rule says so."""
        assert self._under_way is not None
        running = self._under_way.running
        done, launched = self._under_way.num_finished, self._under_way.num_launched
        if self._options.counts == "prompts":
            done, launched = list(running.values()).count(0), len(running)
        self.ended([len(sample) for sample in samples], done, launched, is_stopping=is_stopping)

    def ended(self, lengths: Sequence[int], num_done: int, num_all: int, *, is_stopping: bool) -> None:
        """Responses have ended by themselves. Frees workers if the rule says so.

        Args:
          lengths: of these responses, in tokens.
          num_done, num_all: of the round's samples, or prompts (`trainer.stream.counts`), those that have ended and
            those launched.
          is_stopping: the round is about to end the others: no worker is freed for that.
        """
        if not self._is_training:
            return
        for length in lengths:
            self.rule.finished(length)
        if not self._frees or is_stopping:
            return
        decision = self._decision(num_done, num_all)
        if decision is None:
            return
        self.decisions.append(decision)
        if decision.freed:
            self._free(decision.freed)

    def before_turn(self) -> None:
        """A plan comes, and the round has heard of all that ended before: decides what is streamed by now."""
        assert self._under_way is not None
        if self._stream is not None and self._under_way.requests:  # else the plan is of rows that have all stopped
            tokens = {
                group.prompt.key: sum(len(group.prompt.token_ids) + len(sample) for sample in group.samples)
                for group in self._certain()
            }
            self._parts += self._pace.parts(self._step_now - self._freed_step, tokens)
            self.feed()

    def feed(self) -> None:
        """Gives the stream what it may have next, if it has room."""
        if self._stream is None:
            return
        with self._failures():
            has_room = self._stream.poll()
        if not has_room:
            return
        self._draw()
        if self._parts and all(key in self._offered for key in self._parts[0]):
            self._give()

    def wait_quiet(self) -> None:
        """Waits until the freed devices have run what they have got so far: all devices are wanted by another model."""
        if self._stream is not None:
            with self._failures():
                self._stream.wait_quiet()

    def while_waiting(self) -> None:
        self.feed()

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        """The round is over; its metrics. The stream stays open until the update."""
        if not self._is_training:
            return {}
        hidden_s = self._busy_s + (0.0 if self._began_s is None else self._clock() - self._began_s)
        self._is_training = False
        self.rule.end()
        last = self.decisions[-1] if self.decisions else None
        refusals = [each.refusal for each in self.decisions]
        measured = {f"rollout/scale_down/refused_{why}": float(refusals.count(why)) for why in ("rows", "kv")}
        measured["rollout/scale_down/freed"] = float(sum(bool(each.freed) for each in self.decisions))
        if last is not None and last.freed:
            measured["rollout/scale_down/done_share"] = last.num_done / last.num_all
            measured["rollout/scale_down/moved_samples"] = float(last.moved_requests)
            measured["rollout/scale_down/moved_tokens"] = float(last.moved_tokens)
            measured["rollout/scale_down/copied_tokens"] = float(self._num_copied)
            # to the nanosecond, which is what a simulated clock counts in: the same whenever the step began
            measured["rollout/scale_down/hidden_s"] = round(hidden_s, 9)
        return measured

    def cancelled(self) -> None:
        """The round is dropped."""
        if self._is_training:
            self.rule.cancel()
        self._is_training = False
        self.abandon()

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def after_event(self) -> None:
        """While workers are freed, asks which groups will be in the batch of the next update, scored or not. Raises
        Interrupted if the stream fails."""
        assert self._info is not None
        if self._info.certain is not None:
            self._certain = self._info.certain
        if self._stream is not None:
            groups = self._certain()
            self._offered = {g.prompt.key: g for g in groups if all(each.reward is not None for each in g.samples)}
            self.feed()

    def update_begins(self, groups: Sequence[Group], phase: Phase) -> list[TrainBatch]:
        """First finishes the streamed part of the batch, and gives the trainer its gradients."""
        with phase("stream"):
            begun = self.close()
        streamed = {prompt.key for batch in begun for prompt in batch.prompts}
        others = sum(group.prompt.key not in streamed for group in groups)
        self._streamed_share = 1 - others / len(groups)
        return begun

    def update_ends(self) -> dict[str, float]:
        return {"actor/streamed_share": self._streamed_share}

    def update_cancelled(self) -> None:
        self.abandon()

    def close(self) -> list[TrainBatch]:
        """Ends the stream: the trainer has its sums. Workers are open again. Raises Interrupted if the stream fails."""
        if self._stream is None:
            return []
        while self._parts:
            self._finish()
            self._give()
        self._finish()
        with self._failures():
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

    def _decision(self, num_done: int, num_all: int) -> ScaleDownDecision | None:
        """What the rule says, or what the journal has of it: no more than one of the two frees workers."""
        entry = None if self._journal is None else self._journal.find(self._step, FREED, ())
        earlier = None if entry is None else ScaleDownDecision.from_json(entry["decision"])
        if earlier is not None and earlier.freed in self._streams:  # else there are other workers now
            if self._freed or num_done < earlier.num_done:
                return None
            self.rule.follow(earlier)
            return earlier
        decision = self.rule.after_finish(num_done, num_all, lambda: [load_of(e) for e in self._workers.engines])
        if decision is not None and decision.freed and self._journal is not None:
            self._journal.append(self._step, FREED, (), {"decision": decision.to_json()})
        return decision

    @property
    def _step_now(self) -> float:
        """Decode steps of an open worker so far, by logical time."""
        done = self._workers.counters
        return (done.steps + done.prefill_tokens / PREFILL_TOKENS_PER_STEP) / self._workers.num_open

    def _free(self, workers: tuple[int, ...]) -> None:
        for worker in workers:
            try:
                self._num_copied += self._workers.close(worker, self._by, leaving=workers).num_moved
            except SwitchFailed as failure:
                raise Interrupted(f"step {self._step}: {failure}") from failure
            self._freed += (worker,)
        self._release(workers)
        num_groups = sum(self._workers.engines[worker].batcher.capacity.num_groups for worker in workers)
        self._pace = StreamPace(self._options.max_prompts, self._pace_of_group * num_groups)
        self._freed_step = self._step_now
        self._stream = self._streams[workers]
        with self._failures():
            self._stream.open()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What fails on the freed devices is a reason to end the run at the last boundary."""
        try:
            yield
        except StreamFailed as failure:
            raise Interrupted(
                f"step {self._step}: gradients beside the rollout have failed on the devices of workers "
                f"{', '.join(map(str, self._freed))} ({failure}): run again, with trainer.stream.enable off or a lower "
                "actor.ppo_max_token_len_per_gpu if the memory was full"
            ) from failure

    def _reopen(self) -> None:
        for worker in self._freed:
            self._workers.open(worker)
        self._freed, self._stream = (), None
        self._certain, self._num_given = tuple, 0
        self._offered.clear()
        self._parts.clear()
        self._began_s = None

    def _give(self) -> None:
        """Gives the next part to the stream, which has room."""
        assert self._stream is not None
        self._num_given += 1
        self._began_s = self._clock()
        with self._failures():
            self._stream.give([self._offered[key] for key in self._parts.popleft()], self._step)

    def _finish(self) -> None:
        assert self._stream is not None
        with self._failures():
            self._stream.finish()
        self._draw()

    def _draw(self) -> None:
        """The call that was under way has ended; seen between two plans, so up to a plan late."""
        if self._began_s is None:
            return
        ended_s = self._clock()
        self._busy_s += ended_s - self._began_s
        if self._drawing is not None:
            lane = f"gradients {', '.join(map(str, self._freed))}"
            self._drawing.complete(lane, f"part {self._num_given}", self._began_s, ended_s)
        self._began_s = None
