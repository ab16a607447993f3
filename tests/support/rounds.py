"""Rounds as tables: events that are told, the commands that they bring, and the switches of the rules across rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fake_rollout import FakePrompts, make_sample
from sim_machine import Machine, play, sizes

from jaxrl.config.rollouts import RolloutSection
from jaxrl.mechanisms.dynamic_sampling import DynamicSampling
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches, RoundResult, RoundTime
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
)
from jaxrl.scheduling.rounds.round import BatchSettings, Round
from jaxrl.types import Group, SampleKey

START = RoundStarted(0.0)
Table = list[tuple[Event, list[tuple]]]


def rule_sections() -> list[str]:
    """Sections of `rollout` that switch a batch rule on: those with an `enable`, but what only makes rounds faster."""
    names = [name for name in RolloutSection.model_fields if name not in ("speculation", "ranking_groups")]
    sections = {name: getattr(RolloutSection(), name) for name in names}
    return [name for name, section in sections.items() if hasattr(section, "enable")]


def filtering(gen_batch_size: int = 0, **options: Any) -> dict[str, Any]:
    """`BatchSettings` with dynamic sampling."""
    return {"group_filter": DynamicSampling(DynamicSampling.Options(enable=True, **options), gen_batch_size)}


def key(index: int, i: int, attempt: int = 0) -> SampleKey:
    return SampleKey(0, index, i, attempt)


def finish(k: SampleKey, tokens: int | list[int] = 2, version: int = 0) -> SampleFinished:
    """`tokens`: how many, all of `version`; or the version of each."""
    return SampleFinished(1.0, make_sample(k, _versions(tokens, version), "stop"), 1)


def aborted(k: SampleKey, tokens: int | list[int] = 1, version: int = 0) -> SampleAborted:
    """`tokens`: as for `finish`."""
    return SampleAborted(1.0, make_sample(k, _versions(tokens, version), "abort"), 1)


def verdict(k: SampleKey, reward: float | None = None, status: Any = "ok") -> Verdict:
    """`reward`: the sample's index if it is not given."""
    return Verdict(2.0, k, float(k.sample_index) if reward is None else reward, status)


def names(commands: Iterable[Command]) -> list[tuple]:
    """Commands as plain tuples. A launch: the keys, the samples that the prompt has, and the versions of the tokens of
    those that go on. "stop" is an abort that asks for the tokens."""
    out = []
    for command in commands:
        match command:
            case Launch(prompt=prompt, keys=keys, resumed=resumed, finished=ended):
                has = [("has", sample.key) for sample in ended]
                on = [("on", sample.key, sample.versions.tolist()) for sample in resumed]
                out.append(("launch", prompt.index, *keys, *has, *on))
            case Score(sample=sample):
                out.append(("score", sample.key))
            case Abort(keys=keys, keep=keep):
                out.append(("stop" if keep else "abort", *keys))
            case CancelScore(keys=keys):
                out.append(("cancel", *keys))
            case AwaitVerdict(key=k):
                out.append(("await", k))
    return out


def check_table(current: Round, table: Table) -> None:
    """Every event brings its commands; the round is done after the last one, and not before."""
    for event, commands in table:
        assert not current.done
        assert names(current.handle(event)) == commands, event
    assert current.done


def batch_keys(groups: Iterable[Group]) -> list[list[SampleKey]]:
    return [[sample.key for sample in group.samples] for group in groups]


@dataclass(frozen=True)
class Given:
    """A workload of functions; prompts have 4 tokens, and a verdict takes a second."""

    length_of: Callable[[SampleKey], int]
    reward_of: Callable[[SampleKey], float] = lambda k: float(k.sample_index)

    def length(self, key: SampleKey, step: int = 0) -> int:
        return self.length_of(key)

    def reward(self, key: SampleKey, step: int = 0) -> float:
        return self.reward_of(key)

    def reward_s(self, key: SampleKey, step: int = 0) -> float:
        return 1.0

    def kind_name(self, prompt_index: int) -> str:
        return "given"


class Steps:
    """Steps of a rule on a simulated machine with a row for every response: plan, play, settle.

    Attributes: of the last step its launches as `names` has them; results: of all.
    """

    def __init__(self, rule: BatchRule, *workload: Any, total: int | None = None, lag: int = 0) -> None:
        self.rule, self.total, self.lag = rule, total, lag
        self.prompts, self.results = FakePrompts(100), list[RoundResult]()
        given: Any = Given(*workload)
        shape = sizes(num_slots=100, num_blocks=9000, max_prefill_tokens=4000)
        self.machine = Machine(given, shape, decode_steps=1, workers=100)

    def run(self, steps: int = 1) -> list[RoundResult]:
        for step in range(len(self.results) + 1, len(self.results) + steps + 1):
            version = max(step - 1 - self.lag, 0)
            left = None if self.total is None else self.total - step + 1
            current = self.rule.plan(self.prompts, RoundTime(step, version, left))
            backend = self.machine.begin(2000, version)
            commands = current.handle(START)
            self.launches = [each for each in names(commands) if each[0] == "launch"]
            backend.apply(commands)
            play(current, backend)
            backend.end()
            self.results.append(self.rule.settle(current))
        return self.results[-steps:]


def long_every_fifth(k: SampleKey) -> int:
    """Prompts 4, 9, 14, ... are long, and those with a higher index longer; sample i has i more tokens."""
    return (100 + k.prompt_index if k.prompt_index % 5 == 4 else 10) + k.sample_index


def fresh_batches(num_groups: int, group_size: int, **shared: Any) -> FreshBatches:
    """Plain batches; `shared` is what else all rules are given."""
    return FreshBatches(BatchSettings(num_groups, group_size, **shared))


def _versions(tokens: int | list[int], version: int) -> list[int]:
    return [version] * tokens if isinstance(tokens, int) else tokens
