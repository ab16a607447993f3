"""A small rollout for tests of scheduling rules: responses of given lengths on a given number of slots, no clock.

A plan gives every row up to `plan_tokens` tokens; rows that end in one plan end in the order of their slots. Verdicts
come `delay` ticks after their sample was sent, a plan being one tick, and are handed over in the order of sending.
"""

from __future__ import annotations

import io
import json
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxrl.scheduling.rounds.batches import BatchRule, RoundResult, RoundTime
from jaxrl.scheduling.rounds.events import (
    Abort,
    AwaitVerdict,
    CancelScore,
    Command,
    Event,
    Launch,
    RoundStarted,
    SampleAborted,
    SampleFinished,
    Score,
    Verdict,
    VerdictStatus,
)
from jaxrl.scheduling.rounds.round import Departures, PromptKey, Round
from jaxrl.types import Prompt, Sample, SampleKey


def make_sample(key: SampleKey, versions: list[int], reason: Any) -> Sample:
    """Tokens and log-probabilities that encode their sample, their position, and the version that wrote them."""
    places = np.arange(len(versions))
    ids = (1000 * key.prompt_index + 100 * key.sample_index + 10 * key.attempt + places).astype(np.int32)
    wrote = np.asarray(versions, np.int32)
    return Sample(key, ids, (-wrote - 0.5).astype(np.float32), (-wrote - 0.25).astype(np.float32), wrote, reason)


class FakePrompts:
    """`num_prompts` per epoch, each epoch in an order of its own, without end."""

    def __init__(self, num_prompts: int, position: int = 0) -> None:
        self.num_prompts, self.position = num_prompts, position

    def next(self, num_prompts: int) -> list[Prompt]:
        places = range(self.position, self.position + num_prompts)
        self.position += num_prompts
        return [self.get(p // self.num_prompts, (p + 7 * (p // self.num_prompts)) % self.num_prompts) for p in places]

    def get(self, epoch: int, index: int) -> Prompt:
        return Prompt(epoch, index, (1, 2), f"prompt {index}", "test")


class FakeRollout:
    """Plays rounds.

    Args:
      length: tokens of a response.
      reward: of a response, and the status of its verdict.
      num_slots: rows; responses beyond them wait, first in, first out.
      plan_tokens: tokens per row and plan.
      delay: ticks until a verdict is there.
      eager: whether a verdict that is there overtakes responses that ended and have not been told.
      asks_certain: whether the groups that are certain are looked at after each event, which large rounds spend most
        of their time on.
    """

    def __init__(
        self,
        length: Callable[[SampleKey], int],
        reward: Callable[[SampleKey], tuple[float, VerdictStatus]] = lambda key: (float(key.sample_index), "ok"),
        num_slots: int = 8,
        plan_tokens: int = 1,
        delay: Callable[[SampleKey], int] = lambda key: 0,
        eager: bool = False,
        asks_certain: bool = True,
    ) -> None:
        self.length, self.reward, self.delay = length, reward, delay
        self.num_slots, self.plan_tokens, self.eager = num_slots, plan_tokens, eager
        self.asks_certain = asks_certain
        self.draws_anew = True  # of the rule: whether no sample may begin twice
        self.version = 0
        self.commands: list[Command] = []
        self._rows: list[SampleKey | None] = [None] * num_slots
        self._waiting: deque[SampleKey] = deque()
        self._versions: dict[SampleKey, list[int]] = {}
        self._begun: set[SampleKey] = set()  # those that have drawn tokens, in any round
        self._events: deque[SampleFinished | SampleAborted] = deque()
        self._due: deque[tuple[SampleKey, int]] = deque()
        self._awaited: SampleKey | None = None
        self._tick = self._dispatch = 0
        self.num_launched = 0
        self.max_live = 0  # responses under way at once, of all rounds
        self.num_drawn = 0  # tokens

    def play(self, current: Round, version: int) -> None:
        """Plays until the round is done. Fails if nothing can happen any more, if something is left over, or if a group
        that was certain is not in what the round yields."""
        assert not self._versions
        self.version, self.commands = version, []
        self.certain: list[list[PromptKey]] = []  # after each event
        event: Event = RoundStarted(0.0)
        while True:
            for command in current.handle(event):
                self.commands.append(command)
                self._apply(command)
            if self.asks_certain:
                self._note_certain(current)
            if current.done:
                break
            event = self._wait()
        assert not self._versions, "a round ended while responses were running"
        assert not self._events
        assert not self._due
        assert self._awaited is None

    def _note_certain(self, current: Round) -> None:
        groups = current.certain()
        self.certain.append([group.prompt.key for group in groups])
        if len(self.certain) > 1:
            assert {*self.certain[-2]} <= {*self.certain[-1]}, "what was certain stays so"
        for group in groups:
            assert len(group.samples) == current.group_size
            for sample in group.samples:
                verdict = current.ledger.verdicts.get(sample.key)
                assert sample.reward == (None if verdict is None else verdict.reward)
        if current.done:
            assert groups == current.groups()

    def _wait(self) -> Event:
        while True:
            verdict_is_there = bool(self._due) and self._due[0][1] <= self._tick
            if verdict_is_there and (self.eager or not self._events):
                key, _ = self._due.popleft()
                if key == self._awaited:
                    self._awaited = None
                reward, status = self.reward(key)
                return Verdict(float(self._tick), key, reward, status)
            if self._events:
                return self._events.popleft()
            self._tick += 1
            if self._versions and self._awaited is None:
                self._run_plan()
            else:
                assert self._due, "the round waits, and nothing is running or being scored"

    def _run_plan(self) -> None:
        for slot, holder in enumerate(self._rows):
            if holder is None and self._waiting:
                self._rows[slot] = self._waiting.popleft()
        self._advance()

    def _advance(self) -> None:
        self._dispatch += 1
        for slot, key in enumerate(self._rows):
            if key is None:
                continue
            written = self._versions[key]
            gain = min(self.plan_tokens, self.length(key) - len(written))
            written += [self.version] * gain
            self._begun.add(key)
            self.num_drawn += gain
            if len(written) == self.length(key):
                self._rows[slot] = None
                sample = make_sample(key, self._versions.pop(key), "stop")
                self._events.append(SampleFinished(float(self._tick), sample, self._dispatch))

    def _apply(self, command: Command) -> None:
        match command:
            case Launch(keys=keys, resumed=resumed):
                begun = {sample.key: sample for sample in resumed}
                for key in keys:
                    self.num_launched += 1
                    assert key in begun or key not in self._begun or not self.draws_anew, (
                        f"{key} starts from scratch, and has drawn tokens before: a prompt that is launched again "
                        "needs a higher `attempt`, or its responses draw the same tokens once more"
                    )
                    self._versions[key] = begun[key].versions.tolist() if key in begun else []
                    if key in begun:
                        expected = make_sample(key, self._versions[key], "abort")
                        assert np.array_equal(begun[key].token_ids, expected.token_ids)
                        assert np.array_equal(begun[key].rollout_logprobs, expected.rollout_logprobs)
                        assert np.array_equal(begun[key].sampled_logprobs, expected.sampled_logprobs)
                    self._waiting.append(key)
                self.max_live = max(self.max_live, len(self._versions))
            case Score(sample=sample):
                self._due.append((sample.key, self._tick + self.delay(sample.key)))
            case CancelScore(keys=keys):
                self._due = deque(entry for entry in self._due if entry[0] not in keys)
            case AwaitVerdict(key=key):
                self._awaited = key
            case Abort(keys=keys, keep=keep):
                self._abort(keys, keep)

    def _abort(self, keys: tuple[SampleKey, ...], keep: bool) -> None:
        if keep:
            self._advance()  # the plan in flight
        else:
            untold = [event.sample for event in self._events if event.sample.key in keys]
            self._events = deque(event for event in self._events if event.sample.key not in keys)
            for sample in untold:
                self._tell_abort(make_sample(sample.key, sample.versions.tolist(), "abort"))
        for key in keys:
            if key in self._versions:
                self._tell_abort(make_sample(key, self._versions.pop(key), "abort"))
        self._rows = [key if key in self._versions else None for key in self._rows]
        self._waiting = deque(key for key in self._waiting if key in self._versions)

    def _tell_abort(self, sample: Sample) -> None:
        self._events.append(SampleAborted(float(self._tick), sample, self._dispatch))


class FakeTraining:
    """Steps of a run: plan, play, settle, and a record of the prompts that left; `state` and `load` save and restore a
    checkpoint.

    The weights change every `steps_per_version` steps. With `version_lag` 1 a round draws before the update of the step
    before it, as with one-step-off.
    """

    def __init__(
        self,
        rule: BatchRule,
        prompts: FakePrompts,
        rollout: FakeRollout,
        total_steps: int | None,
        steps_per_version: int = 1,
        version_lag: int = 0,
    ) -> None:
        self.rule, self.prompts, self.rollout = rule, prompts, rollout
        self.total_steps, self.steps_per_version, self.version_lag = total_steps, steps_per_version, version_lag
        self.step = 0
        self.departures = Departures()
        self.results: list[RoundResult] = []

    def run_step(self) -> RoundResult:
        self.step += 1
        left = None if self.total_steps is None else self.total_steps - self.step + 1
        version = max(self.step - 1 - self.version_lag, 0) // self.steps_per_version
        current = self.rule.plan(self.prompts, RoundTime(self.step, version, left))
        self.rollout.draws_anew = self.rule.draws_anew
        self.rollout.play(current, version)
        _, max_samples = self.rule.max_under_way
        assert self.rollout.max_live <= max_samples, f"{self.rule.name} had more under way than it says"
        result = self.rule.settle(current)
        for prompt_key, outcome in result.left.items():
            self.departures.leave(prompt_key, outcome)
        for group in result.groups:
            self.departures.leave(group.prompt.key, "trained")
        self.results.append(result)
        return result

    def carried(self) -> list[tuple[int, int]]:
        """Keys of the prompts that the rule carries."""
        return [(int(epoch), int(index)) for epoch, index, _ in self.rule.state()["queue"]["groups"]]

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "position": self.prompts.position,
            "departures": self.departures.state_dict(),
            "rule": self.rule.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.prompts.position = state["step"], state["position"]
        self.departures.load_state_dict(state["departures"])
        self.rule.load_state(state["rule"], self.prompts)


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint brings it back: JSON values as JSON, arrays as numpy files."""
    arrays: list[np.ndarray] = []

    def take_out(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {"array": len(arrays) - 1}
        return {k: take_out(v) for k, v in value.items()} if isinstance(value, dict) else value

    def put_back(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return found[value["array"]] if set(value) == {"array"} else {k: put_back(v) for k, v in value.items()}

    text = json.dumps(take_out(state))
    found = []
    for array in arrays:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        found.append(np.load(io.BytesIO(file.getvalue()), allow_pickle=False))
    return put_back(json.loads(text))


def fingerprint(result: RoundResult) -> Any:
    """A round's decisions and the samples that it would train on."""
    samples = [
        (sample.key, sample.token_ids.tolist(), sample.versions.tolist(), sample.reward)
        for group in result.groups
        for sample in group.samples
    ]
    return result.kind, samples, sorted(result.left.items()), sorted(result.metrics.items())


def tangled(seed: int, *numbers: int) -> int:
    """A number that does not follow simply from its arguments."""
    value = seed
    for number in numbers:
        value = (value * 1103515245 + number * 12345 + 99991) % (1 << 31)
        value ^= value >> 7
    return value


def run_with_crashes(
    make: Callable[[], FakeTraining], num_steps: int, crashes: dict[int, Literal["boundary", "round"]]
) -> FakeTraining:
    """Runs a training that is killed after or in the middle of some steps, and goes on from the last boundary.

    Checks after each step that every prompt drawn has left once or is carried.
    """
    training = make()
    results: list[RoundResult] = []
    while training.step < num_steps:
        state = through_disk(training.state())
        crash = crashes.get(training.step + 1)
        result = training.run_step()
        if crash == "round":  # what the step did is lost with the process
            training = make()
            training.load(state)
            again = training.run_step()
            assert fingerprint(again) == fingerprint(result)
            result = again
        results.append(result)
        check_book(training)
        if crash == "boundary":
            state = through_disk(training.state())
            training = make()
            training.load(state)
    training.results = results
    return training


def check_book(training: FakeTraining) -> None:
    """Checks that each prompt drawn has left once or is carried once."""
    departures, position = training.departures, training.prompts.position
    drawn = [prompt.key for prompt in FakePrompts(training.prompts.num_prompts).next(position)]
    carried = training.carried()
    assert len(set(carried)) == len(carried) == training.rule.num_carried
    waiting = [key for key in drawn if not departures.has_left(key)]
    assert sorted(waiting) == sorted(carried)
    assert sum(departures.counts.values()) + len(carried) == len(drawn)


def count_tokens(training: FakeTraining) -> dict[str, float]:
    """Counts all tokens that a run without crashes has drawn, by what became of them."""
    results = training.results
    return {
        "trained": sum(len(sample) for result in results for group in result.groups for sample in group.samples),
        "filtered": sum(result.metrics["rollout/filtered_tokens"] for result in results),
        "thrown": sum(result.metrics["rollout/thrown_tokens"] for result in results),
    }
