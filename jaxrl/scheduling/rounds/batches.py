"""The seam for rules across rounds: what a round launches, and what becomes of what it leaves over.

Purpose: a `BatchRule` makes each training step's `Round` (which prompts, how many responses each, which attempt, what
is resumed) and takes in what is left of it. What it carries from round to round is part of a checkpoint. The loop asks
for it without knowing which rule it is::

    current = rule.plan(prompts, RoundTime(step, policy_version, steps_left))
    while not current.done:
        for command in current.handle(backend.wait()):
            backend.apply(command)
    result = rule.settle(current)         # result.groups is the batch

Here are the seam, the two baselines, the refusals of design §9, and how carried samples are packed for a checkpoint.
The rules that the project is about are in `tail_batching.py` and `partial_rollout.py`.

Source: the baselines of RollPacker §6.1 and §3: plain synchronous batches, optionally with all rewards after the
rollout, and over-provisioning whose losers are discarded (what tail batching's queue exists to repair: it trains on
fewer long responses than the data holds).

Departures: a rule keeps prompt *keys* between rounds, and asks the source for the prompts when it launches them again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, Protocol

import numpy as np

from jaxrl.scheduling.rounds.race import DynamicSampling, PlannedGroup, Race, RaceLimits, ScoreWhen
from jaxrl.scheduling.rounds.round import Outcome, PromptKey, Round, RoundKind, RoundLedger
from jaxrl.types import FinishReason, Group, Prompt, Sample, SampleKey

AtEnd = Literal["flush", "leave"]
"""Whether prompts that wait when training ends have been trained on by then (the rounds before see to it), or not."""

_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort")


class PromptStream(Protocol):
    """What rules ask of the data (`jaxrl.data.prompts.PromptSource`)."""

    def next(self, num_prompts: int, /) -> list[Prompt]:
        """Prompts not handed out before; never fewer than asked for."""
        ...

    def get(self, epoch: int, index: int, /) -> Prompt:
        """A prompt that was handed out before, by its key."""
        ...


@dataclass(frozen=True, slots=True)
class RoundTime:
    """When a round is: the training step it is for (from 1), the weights' version it draws with, and the training steps
    that are left, this one included (None: not known)."""

    step: int
    policy_version: int
    steps_left: int | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round has come to.

    Attributes:
      kind: of the round.
      groups: to train on, sorted by prompt key.
      left: prompts that leave the system now without being trained on, and how.
      metrics: of the round; counts are of prompts or samples as their names say.
    """

    kind: RoundKind
    groups: list[Group]
    left: dict[PromptKey, Outcome]
    metrics: dict[str, float]


class BatchRule(Protocol):
    """Decides across rounds; has no effects but drawing prompts from the source that it is given."""

    @property
    def name(self) -> str:
        """What people call it; a checkpoint names the rule that carries prompts."""
        ...

    @property
    def num_carried(self) -> int:
        """Prompts that have been drawn from the source and have not left: what a run that ends now leaves behind."""
        ...

    def plan(self, prompts: PromptStream, time: RoundTime) -> Round:
        """The next round. It draws prompts from `prompts` as it launches them."""
        ...

    def settle(self, current: Round) -> RoundResult:
        """Takes in a round that is done, the one planned last."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint, between rounds: JSON values and arrays. A copy."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# -- the baselines -----------------------------------------------------------------------------------------------------


class FreshBatches:
    """New prompts every round, and nothing carried over: with both factors 1 (the default) plain synchronous batches,
    all responses waited for; above 1 over-provisioning, whose losers are discarded.

    ceil(prompt_factor · P0) prompts × ceil(response_factor · R0) responses are launched, and the first P0 × R0 are the
    batch. Prompts that lose leave the system as `filtered`, for good.

    Args:
      num_groups: prompts per batch, P0 (`data.train_batch_size`).
      group_size: samples per prompt, R0 (`rollout.n`).
      prompt_factor, response_factor: >= 1.
      score_when: "rollout" scores only when the last response has ended, as older systems do.
      dynamic_sampling: leave out groups whose rewards are all equal, and draw others.
      max_active_requests: the most samples under way; 0: no limit.

    Raises ValueError for limits that cannot be.
    """

    SCHEMA = 1

    def __init__(
        self,
        num_groups: int,
        group_size: int,
        *,
        prompt_factor: float = 1.0,
        response_factor: float = 1.0,
        score_when: ScoreWhen = "sample",
        dynamic_sampling: DynamicSampling | None = None,
        max_active_requests: int = 0,
    ) -> None:
        self.limits = RaceLimits(
            num_groups=num_groups,
            group_size=group_size,
            num_responses=provisioned("rollout.over_provisioning.response_factor", response_factor, group_size),
            num_spare=provisioned("rollout.over_provisioning.prompt_factor", prompt_factor, num_groups) - num_groups,
            score_when=score_when,
            dynamic_sampling=dynamic_sampling,
            max_active=max_active_requests,
        )
        self._open: OpenRound | None = None

    @property
    def name(self) -> str:
        return "over-provisioning" if self.limits.is_race else "plain batches"

    @property
    def num_carried(self) -> int:
        return 0

    def plan(self, prompts: PromptStream, time: RoundTime) -> Round:
        assert self._open is None, "a round is planned before the one before it is settled"
        race = Race(self.limits, lambda: new_group(prompts, self.limits.num_responses, time.step))
        self._open = open_round(race, "plain", time)
        return self._open.round

    def settle(self, current: Round) -> RoundResult:
        opened, self._open = close_round(self._open, current), None
        groups = current.groups()
        left: dict[PromptKey, Outcome] = dict(opened.race.filtered)
        discarded = [group.planned.prompt.key for group in opened.race.unfinished]
        for prompt_key in discarded:
            left[prompt_key] = "filtered"
        metrics = opened.metrics(groups, thrown_tokens=opened.tokens_lost())
        return RoundResult(current.kind, groups, left, metrics | {"rollout/discarded_prompts": float(len(discarded))})

    def state_dict(self) -> dict[str, Any]:
        assert self._open is None, "state between rounds only"
        return {"schema": self.SCHEMA}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema("batches of new prompts", state, self.SCHEMA)


# -- what rules share --------------------------------------------------------------------------------------------------


def provisioned(option: str, factor: float, count: int) -> int:
    """ceil(factor · count), the factor taken as it is written (1.1 · 50 is 55); raises ValueError below 1."""
    if not (factor >= 1 and math.isfinite(factor)):
        raise ValueError(f"{option} ({factor}) must be a finite number >= 1: a round launches no less than it needs")
    return math.ceil(Fraction(str(factor)) * count)


def new_group(prompts: PromptStream, num_responses: int, step: int, round_index: int = 0) -> PlannedGroup:
    """The next prompt of the source, with fresh responses."""
    (prompt,) = prompts.next(1)
    keys = tuple(SampleKey(prompt.epoch, prompt.index, i) for i in range(num_responses))
    return PlannedGroup(prompt, keys, first_step=step, first_round=round_index)


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round that was planned and is not settled."""

    round: Round
    race: Race
    time: RoundTime

    @property
    def ledger(self) -> RoundLedger:
        return self.round.ledger

    def tokens_lost(self, carried: Collection[SampleKey] = frozenset()) -> int:
        """Tokens of responses that ended or were aborted in this round, and are neither in the batch, nor of a filtered
        group, nor carried on."""
        kept = {*self.race.chosen(self.ledger), *carried}
        for prompt_key in self.race.filtered:
            kept |= self.race.groups[prompt_key].kept.keys()
        ended = (*self.ledger.finished.values(), *self.ledger.aborted.values())
        return sum(len(sample) for sample in ended if sample.key not in kept)

    def metrics(self, groups: Sequence[Group], thrown_tokens: int) -> dict[str, float]:
        """What every rule reports of a round; `groups` is its batch."""
        race = self.race
        samples = [sample for group in groups for sample in group.samples]
        started = [key for group in race.groups.values() for key in group.planned.keys]
        # not the ledger's: one that ended while a verdict was awaited, and did not count, may be told either way
        counted = {key for group in race.groups.values() for key in group.kept}
        outcomes = list(race.filtered.values())
        filtered = [s for key in race.filtered for s in race.groups[key].kept.values()]
        ages = [self.time.step - race.groups[group.prompt.key].planned.first_step for group in groups]
        return {
            "rollout/long_round": float(self.round.kind == "long"),
            "rollout/launched_prompts": float(len(race.groups)),
            "rollout/launched_samples": float(len(started)),
            "rollout/kept_prompts": float(len(groups)),
            "rollout/kept_samples": float(len(samples)),
            "rollout/aborted_samples": float(sum(key not in counted for key in started)),
            "rollout/filtered_prompts": float(outcomes.count("filtered")),
            "rollout/failed_prompts": float(outcomes.count("failed")),
            "rollout/filtered_tokens": float(sum(len(sample) for sample in filtered)),
            "rollout/thrown_tokens": float(thrown_tokens),
            "rollout/trained_age_steps/mean": float(np.mean(ages)),
            "rollout/trained_age_steps/max": float(max(ages)),
            "rollout/resumed_share": off_policy_share(samples, self.time.policy_version),
        }


def open_round(race: Race, kind: RoundKind, time: RoundTime) -> OpenRound:
    return OpenRound(Round((), race.limits.group_size, race, kind=kind), race, time)


def close_round(opened: OpenRound | None, current: Round) -> OpenRound:
    assert opened is not None, "a round is settled that was not planned"
    assert opened.round is current, "a round is settled that is not the one planned last"
    assert current.done, "a round is settled before it is done"
    return opened


def spread_of_ages(name: str, ages: Sequence[int]) -> dict[str, float]:
    """Mean and maximum; zeros where nobody waits."""
    return {f"{name}/mean": float(np.mean(ages)) if ages else 0.0, f"{name}/max": float(max(ages, default=0))}


def off_policy_share(samples: Iterable[Sample], policy_version: int) -> float:
    """The share of tokens that versions before `policy_version` produced; 0 of no tokens."""
    versions = [sample.versions for sample in samples]
    flat = np.concatenate(versions) if versions else np.zeros(0, np.int32)
    return float(np.mean(flat < policy_version)) if flat.size else 0.0


def check_schema(what: str, state: Mapping[str, Any], schema: int) -> None:
    """Raises ValueError for a state that this version does not read."""
    if state["schema"] != schema:
        raise ValueError(f"{what}: state of schema {state['schema']}; this version reads schema {schema}")


def as_carried(sample: Sample) -> Sample:
    """A sample as it is carried on: without a verdict, which may have come or not by the time the round ended."""
    return replace(sample, reward=None, reward_info={})


def pack_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Unscored samples as flat arrays with offsets: keys int64 [N, 4], offsets int64 [N + 1], finish reasons int8 [N];
    token_ids, versions int32 [T], rollout_logprobs, sampled_logprobs float32 [T]; texts as a list."""
    assert all(sample.reward is None for sample in samples)

    def flat(name: str, dtype: Any) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(s, name), dtype) for s in samples)])

    keys = [(s.key.epoch, s.key.prompt_index, s.key.sample_index, s.key.attempt) for s in samples]
    return {
        "keys": np.asarray(keys, np.int64).reshape(-1, 4),
        "offsets": np.cumsum([0, *map(len, samples)], dtype=np.int64),
        "finish_reasons": np.asarray([_REASONS.index(s.finish_reason) for s in samples], np.int8),
        "token_ids": flat("token_ids", np.int32),
        "versions": flat("versions", np.int32),
        "rollout_logprobs": flat("rollout_logprobs", np.float32),
        "sampled_logprobs": flat("sampled_logprobs", np.float32),
        "texts": [sample.text for sample in samples],
    }


def unpack_samples(packed: Mapping[str, Any]) -> list[Sample]:
    """The reverse of `pack_samples`. Raises ValueError if the pieces do not fit together."""
    offsets, names = packed["offsets"], ("token_ids", "rollout_logprobs", "sampled_logprobs", "versions")
    count, total = len(packed["keys"]), int(offsets[-1])
    lengths = {name: len(packed[name]) for name in names}
    if len(offsets) != count + 1 or set(lengths.values()) != {total} or len(packed["texts"]) != count:
        raise ValueError(
            f"carried samples: {count} keys, {len(offsets)} offsets up to {total}, {len(packed['texts'])} texts and "
            f"{lengths} must fit together"
        )
    samples: list[Sample] = []
    for i, (row, reason, text) in enumerate(
        zip(packed["keys"], packed["finish_reasons"], packed["texts"], strict=True)
    ):
        start, stop = int(offsets[i]), int(offsets[i + 1])
        tokens, rollout, sampled, versions = (np.array(packed[name][start:stop]) for name in names)
        key = SampleKey(*(int(value) for value in row))
        samples.append(Sample(key, tokens, rollout, sampled, versions, _REASONS[int(reason)], text))
    return samples


def pack_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Scored groups for a checkpoint: prompt keys and sizes int64 [N, 3], samples as `pack_samples` has them, rewards
    float64, and why a scorer failed (empty if it did not); the rest of what scorers say is dropped."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        "groups": np.asarray([(*g.prompt.key, len(g.samples)) for g in groups], np.int64).reshape(-1, 3),
        "samples": pack_samples([as_carried(sample) for sample in samples]),
        "rewards": np.asarray([sample.reward for sample in samples], np.float64),
        "errors": [str(sample.reward_info.get("error", "")) for sample in samples],
    }


def unpack_groups(packed: Mapping[str, Any], prompts: PromptStream) -> list[Group]:
    """The reverse of `pack_groups`. Raises ValueError if the pieces do not fit together."""
    samples, errors = unpack_samples(packed["samples"]), packed["errors"]
    sizes = [int(size) for *_, size in packed["groups"]]
    if not len(samples) == len(packed["rewards"]) == len(errors) == sum(sizes):
        raise ValueError(
            f"a batch that waits: {len(samples)} samples, {len(packed['rewards'])} rewards, {len(errors)} errors and "
            f"groups of {sizes} must fit together"
        )
    scored = iter(
        replace(sample, reward=float(reward), reward_info={"error": error} if error else {})
        for sample, reward, error in zip(samples, packed["rewards"], errors, strict=True)
    )
    return [
        Group(prompts.get(int(epoch), int(index)), [next(scored) for _ in range(int(size))])
        for epoch, index, size in packed["groups"]
    ]


# -- what composes with what (design §9) -------------------------------------------------------------------------------


def check_composition(
    *,
    tail_batching: bool = False,
    partial_rollout: bool = False,
    over_provisioning: bool = False,
    one_step_off: bool = False,
    dynamic_sampling: bool = False,
    streaming: bool = False,
    ranking_groups: bool = False,
    score_when: ScoreWhen = "sample",
    group_size: int = 2,
    max_staleness: int | None = None,
    needs_whole_batch: str | None = None,
) -> str | None:
    """Why settings do not go together, as a sentence, or None if they do.

    Args:
      tail_batching ... ranking_groups: which mechanisms are on.
      score_when: when samples are scored.
      group_size: samples per prompt (`rollout.n`).
      max_staleness: partial rollout's cap in versions; None: no cap.
      needs_whole_batch: the advantage estimator, if its statistics span the batch.
    """
    switches = {
        "tail batching": tail_batching,
        "partial rollout": partial_rollout,
        "over-provisioning": over_provisioning,
    }
    racing = [name for name, is_on in switches.items() if is_on]
    if len(racing) > 1:
        return f"{' and '.join(racing)} exclude each other: each decides what becomes of unfinished responses"
    if ranking_groups and not one_step_off:
        return "ranking groups need one-step-off: groups of one step's prompts run while the step before trains"
    if partial_rollout and one_step_off and max_staleness is not None and max_staleness < 1:
        return (
            f"rollout.partial_rollout.max_staleness ({max_staleness} versions) must be >= 1 with one-step-off, "
            "which adds one version to every token"
        )
    if score_when == "rollout" and partial_rollout:
        return (
            "partial rollout scores a prompt's samples when all of them have ended, whatever comes later: "
            "reward.score_when must be 'sample' or 'group' (which mean the same there), found 'rollout'"
        )
    if dynamic_sampling and group_size < 2:
        return (
            f"dynamic sampling needs rollout.n >= 2, found {group_size}: the rewards of a group of one are all equal, "
            "so every prompt would be left out"
        )
    if score_when == "rollout" and streaming:
        return (
            "streaming needs rewards during the rollout: reward.score_when must be 'sample' or 'group', found 'rollout'"
        )
    if score_when == "rollout" and dynamic_sampling and racing:
        return (
            f"dynamic sampling with {racing[0]} needs rewards during the rollout, which say when it ends: "
            "reward.score_when must be 'sample' or 'group', found 'rollout'"
        )
    if streaming and needs_whole_batch is not None:
        return (
            f"streaming excludes algorithm.adv_estimator={needs_whole_batch}: its statistics span the batch, so no "
            "gradient can start before the last reward"
        )
    return None
