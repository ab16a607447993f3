"""The stream trainer in a run: frees workers, and gives a stream the groups that are certain to be in the batch.

Source: RollPacker §4.4, Algorithm 1, lines 17 to 23. Requests move by recomputation, as there; with a latency profile
by KV where that is predicted to be faster (`by`), which no clock decides.

What is streamed, in which parts and in which order is decided before each turn, from what has ended by then
(`StreamPace`). A clock decides only when a part is given: once its verdicts have come and the stream has room, at the
latest when the round has ended. So a step that runs again adds up the same, and so does another run. When workers are
freed follows from the plans, and these from the clock only where layouts switch by measured times; that decision is in
the journal.

In order: `on_finished` closes workers, whose requests move to the others; their pools and weights go, and the stream
takes the trainer's weights. `look` learns which groups are certain, `before_plan` decides which of them are the next
parts. `update_begins` gives what is left, waits, gives the sums to the trainer, and opens the workers again.

A failure on the freed devices ends the run at the boundary before the step: nothing from it has reached the trainer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.mechanisms.stream_trainer.scale_down import (
    DEFAULT_PACE,
    ScaleDown,
    ScaleDownDecision,
    StreamPace,
    halves,
    load_of,
)
from jaxrl.scheduling.layouts.plan_cost import cheaper_move
from jaxrl.scheduling.layouts.relayout import SwitchFailed
from jaxrl.scheduling.mechanism import Phase, RoundEnd, RoundInfo, RoundState
from jaxrl.scheduling.rounds.events import Interrupted, PromptKey
from jaxrl.scheduling.tokens.local_workers import PREFILL_TOKENS_PER_STEP, By
from jaxrl.types import Group, Sample, StreamFailed, TrainBatch

if TYPE_CHECKING:
    from jaxrl.mechanisms.stream_trainer.gradients import TrainStream
    from jaxrl.run.run import Run
    from jaxrl.sim.trainer import SimulatedStream

    GradientStream = TrainStream | SimulatedStream  # all methods but `abandon` raise `StreamFailed` if devices fail

R = TypeVar("R")
FREED = "scale_down"
"""The kind of an entry in the journal, of the step of the update."""


class StreamSession(StreamTrainer):
    """The stream trainer of a run."""

    def __init__(self, run: Run) -> None:
        assert run.timeline is not None, "an evaluation has no update"
        options, machine = run.config.trainer.stream, run.machine
        self.gradient_source = self
        self._streams: Mapping[tuple[int, ...], GradientStream]  # by the workers whose devices they have
        self._streams = machine.gradient_streams(halves(len(run.workers.engines)))
        self.rule = ScaleDown(options, tuple(self._streams))
        self.decisions: list[ScaleDownDecision] = []  # of the round
        self._options, self._workers, self._journal = options, run.workers, run.journal
        self._release = machine.release_workers
        # tokens that a dp group's freed devices are taken to compute per decode step of the others
        self._pace_of_group = options.pace or DEFAULT_PACE.get(machine.platform, 16.0)
        self._by: By = _moves(run)
        self._is_training = False  # a round of training is under way
        self._frees = False  # and workers may be freed in it
        self._freed: tuple[int, ...] = ()
        self._num_copied = 0  # tokens whose KV moved in this round
        self._stream: GradientStream | None = None  # open
        self._step = 0  # of the update that is computed
        self._pace: StreamPace | None = None  # of the stream that is open
        self._freed_step = 0.0  # of the workers' logical time
        self._info: RoundInfo | None = None  # of the last training round
        self._round: RoundState
        self._streamed_share = 0.0  # of the prompts of the last update's batch
        self._certain: Callable[[], Sequence[Group]] = tuple
        self._offered: dict[PromptKey, Group] = {}  # scored
        self._parts: deque[list[PromptKey]] = deque()  # decided, not given yet
        self._num_given = 0
        self._tracer, self._clock = run.timeline, run.clock
        self._began_s: float | None = None  # of the call that is under way
        self._busy_s = 0.0  # of calls that ended in this round
        machine.on_wait_quiet(self.wait_quiet)

    # -- the backend's hooks -----------------------------------------------------------------------------------------

    def attach(self, state: RoundState) -> None:
        self._round = state

    def round_begins(self, info: RoundInfo) -> None:
        self.decisions, self._busy_s, self._num_copied = [], 0.0, 0
        self._is_training = info.is_training
        if not self._is_training:
            self._frees = False
            return
        assert self._stream is None, "a round begins while the stream of another is open"
        self._info, self._step = info, info.update
        # no worker is freed where nothing would be computed on it
        self._frees = info.certain is not None and (info.kind != "short" or self._options.short_rounds)
        self.rule.begin(info.kind)

    def on_finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
        """Frees workers if the rule says so."""
        if not self._is_training:
            return
        for sample in samples:
            self.rule.finished(len(sample))
        if not self._frees or is_stopping:
            return
        done, launched, running = self._round.num_finished, self._round.num_launched, self._round.running
        if self._options.counts == "prompts":
            done, launched = list(running.values()).count(0), len(running)
        if (decision := self._decision(done, launched)) is None:
            return
        self.decisions.append(decision)
        if decision.freed:
            self._free(decision.freed)

    def before_plan(self, worker: int | None) -> None:
        """Decides what is streamed by now, before a worker is chosen."""
        # without requests the plan is of rows that have all stopped
        if worker is None and self._pace is not None and self._round.requests:
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
        if not self._on_freed(self._stream.poll):
            return
        self._draw()
        if self._parts and all(key in self._offered for key in self._parts[0]):
            self._give()

    while_waiting = feed

    def wait_quiet(self) -> None:
        """Waits until the freed devices have run what they have got so far: all devices are wanted by another model."""
        if self._stream is not None:
            self._on_freed(self._stream.wait_quiet)

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        """The stream stays open until the update."""
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

    def round_cancelled(self) -> None:
        if self._is_training:
            self.rule.cancel()
        self._is_training = False
        self.abandon()

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Commands have been carried out: while workers are freed, asks which groups will be in the batch of the next
        update, scored or not. Raises Interrupted if the stream fails."""
        assert self._info is not None
        if self._info.certain is not None:
            self._certain = self._info.certain
        if self._stream is not None:
            groups = self._certain()
            self._offered = {g.prompt.key: g for g in groups if all(each.reward is not None for each in g.samples)}
            self.feed()

    def update_begins(self, groups: Sequence[Group], phase: Phase) -> list[TrainBatch]:
        """Returns batches of which the trainer has the gradients already."""
        with phase("stream"):
            begun = self.close()
        streamed = {prompt.key for batch in begun for prompt in batch.prompts}
        others = sum(group.prompt.key not in streamed for group in groups)
        self._streamed_share = 1 - others / len(groups)
        return begun

    def update_ends(self) -> dict[str, float]:
        return {"actor/streamed_share": self._streamed_share}

    def close(self) -> list[TrainBatch]:
        """Ends the stream: the trainer has its sums. Workers are open again. Raises Interrupted if the stream fails."""
        if self._stream is None:
            return []
        while self._parts:
            self._finish()
            self._give()
        self._finish()
        batches = self._on_freed(self._stream.close)
        self._reopen()
        return batches

    def abandon(self) -> None:
        """The step is dropped before its update: the trainer has not moved."""
        if self._stream is not None:
            self._stream.abandon()
        self._reopen()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
                self._num_copied += self._workers.close(worker, self._by, leaving=workers)
            except SwitchFailed as failure:
                raise Interrupted(f"step {self._step}: {failure}") from failure
            self._freed += (worker,)
        self._release(workers)
        num_groups = sum(self._workers.engines[worker].batcher.capacity.num_groups for worker in workers)
        self._pace = StreamPace(self._options.max_prompts, self._pace_of_group * num_groups)
        self._freed_step = self._step_now
        self._stream = self._streams[workers]
        self._on_freed(self._stream.open)

    def _on_freed(self, call: Callable[..., R], *arguments: Any) -> R:
        """Calls the stream. What fails on the freed devices is a reason to end the run at the last boundary."""
        try:
            return call(*arguments)
        except StreamFailed as failure:
            raise Interrupted(
                f"step {self._step}: gradients beside the rollout have failed on the devices of workers "
                f"{', '.join(map(str, self._freed))} ({failure}): run again, with trainer.stream.enable off or a lower "
                "actor.ppo_max_token_len_per_gpu if the memory was full"
            ) from failure

    def _reopen(self) -> None:
        for worker in self._freed:
            self._workers.open(worker)
        self._freed, self._stream, self._pace = (), None, None
        self._certain, self._num_given = tuple, 0
        self._offered.clear()
        self._parts.clear()
        self._began_s = None

    def _give(self) -> None:
        """Gives the next part to the stream, which has room."""
        assert self._stream is not None
        self._num_given += 1
        self._began_s = self._clock()
        self._on_freed(self._stream.give, [self._offered[key] for key in self._parts.popleft()], self._step)

    def _finish(self) -> None:
        assert self._stream is not None
        self._on_freed(self._stream.finish)
        self._draw()

    def _draw(self) -> None:
        """The running call has ended; seen between two plans, so up to a plan late."""
        if self._began_s is None:
            return
        ended_s = self._clock()
        self._busy_s += ended_s - self._began_s
        lane = f"gradients {', '.join(map(str, self._freed))}"
        self._tracer.complete(lane, f"part {self._num_given}", self._began_s, ended_s)
        self._began_s = None


def _moves(run: Run) -> By:
    """How requests move from a worker that is freed: where layouts switch as `rollout.layout.state` says of a switch,
    else their KV is computed again. A profile of one degree alone has no costs of moving KV."""
    options = run.config.rollout.layout
    predictor = run.machine.predictor() if options.switch else None
    if predictor is None or not predictor.profile.switches:
        return "recompute"
    return partial(cheaper_move, predictor) if options.state == "cheaper" else options.state
