"""The judge on the rollout's devices: a pool that works in turns. Its engine runs on an executor without a model, whose
tokens follow from keys alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from replay_executor import ReplayExecutor, ReplayWorkers
from run_parts import made_run

from jaxrl.config import from_mapping
from jaxrl.config.domains import domains
from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.device import DeviceJudge
from jaxrl.rewards.reward_pool import RewardPool
from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

PROMPT = Prompt(0, 3, (1,), "?", "s")
RISING = {SampleKey(0, p, s): 2 + 6 * (4 * p + s) for p in range(2) for s in range(4)}  # each longer than the last


class Reads:
    """Reads as many tokens as the response has characters; the reward is the mean of all tokens that it wrote."""

    params = SamplingParams(max_tokens=6)

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def ids(self, request: Any) -> tuple[int, ...]:
        if request.response == "unreadable":
            raise ValueError("it cannot be read")
        return (1,) * max(len(request.response), 1)

    def reward(self, samples: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
        return float(np.mean([np.mean(each.token_ids) for each in samples])), {"unparsed": 1}


class Machine:
    """Counts how often the judge came to the devices."""

    recompiles = 0
    is_there = False
    entered = 0

    def __init__(self) -> None:
        self.did: list[str] = []
        self.runs_alone = False

    def wait_for_actor(self) -> None:
        self.did.append("wait")

    def enter(self) -> None:
        self.did.append("enter")
        self.entered += not self.is_there
        self.is_there = True

    def release(self) -> None:
        self.is_there = False


class AllOf(dict):
    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: SampleKey) -> int:
        return 6


class Judged(RewardPool):
    def __init__(self, judge: DeviceJudge) -> None:
        reward = {"kind": "judge", "judge": {"model": "a/folder"}}
        super().__init__(domains(from_mapping({"model": {"path": "m"}, "reward": reward}).reward), parts={})
        self.judge = judge
        self.join("devices", judge)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.judge, name)


def pool(share: float = 0.5, num_samples: int = 2) -> Judged:
    engine = Engine(ReplayExecutor(AllOf(), 1, 2, 200, 4, 32), BatcherConfig(decode_steps=2))
    clock = map(float, itertools.count())
    options = Judge.Options(busy_share=share)
    return Judged(DeviceJudge(Reads(num_samples), engine, Machine(), options, clock=clock.__next__))


def sample(index: int, text: str = "abcd") -> Sample:
    made = Sample.empty(SampleKey(0, 3, index))
    made.text, made.finish_reason = text, "stop"
    return made


def verdicts(judge: Judged) -> dict[int, Verdict]:
    found: list[Verdict] = []
    while judge.num_pending:
        found += judge.wait()
    return {each.key.sample_index: each for each in found}


def test_verdicts_depend_on_keys_alone():
    """Not on what else is judged, on the order, or on what was cancelled in between."""
    alone = {}
    for index in range(3):
        judge = pool()
        judge.submit(PROMPT, sample(index))
        alone |= verdicts(judge)
    judge = pool()
    for index in (2, 5, 0, 1):
        judge.submit(PROMPT, sample(index))
    assert judge.turn(0, 4)
    judge.cancel([sample(5).key])
    together = verdicts(judge)
    assert {index: each.reward for index, each in together.items()} == {i: each.reward for i, each in alone.items()}
    assert len({each.reward for each in alone.values()}) == 3


def test_turns_and_what_they_count():
    judge = pool(share=0.5)
    judge.submit(PROMPT, sample(0, "abcdefghi"))
    judge.submit(PROMPT, sample(1, "unreadable"))
    (failed,) = judge.completed()
    assert (failed.status, failed.reward) == ("error", 0.0)
    assert "it cannot be read" in failed.info["error"]
    assert not judge.turn(3, 4), "more than half of the rows are busy"
    assert judge.turn(2, 4)
    assert judge.machine.is_there
    (verdict,) = verdicts(judge).values()
    assert verdict.status == "ok"
    judge.release()
    assert not judge.machine.is_there
    measured = judge.take_metrics()
    assert measured["reward/judge/gap_turns"] == 1
    assert measured["reward/judge/turns"] > 1
    assert measured["reward/judge/unparsed"] == 1
    assert measured["reward/judge/tokens"] == 9 + 1 + 2 * 6, "whole blocks are read once for both verdicts"
    assert not any(judge.take_metrics().values())


def round_with(judge: Judged) -> tuple[dict[SampleKey, float], dict[str, float]]:
    return run_round(Engine(ReplayExecutor(RISING, 1, 4, 400, 4, 64), BatcherConfig(decode_steps=2)), judge)


def begun(actor: Engine | LocalWorkers, judge: Judged) -> tuple[RolloutBackend, Round]:
    backend = RolloutBackend(made_run(actor, ReplayWorkers(), judge, mechanisms=[Judge(judge.judge)]))
    backend.enter_rollout(0)
    backend.begin(RoundInfo(0), SamplingParams(max_tokens=64))
    return backend, Round.of([Prompt(0, p, (1, 2), "?", "s") for p in range(2)], 4)


def run_round(actor: Engine | LocalWorkers, judge: Judged) -> tuple[dict[SampleKey, float], dict[str, float]]:
    backend, current = begun(actor, judge)
    while not current.done:
        backend.apply(current.handle(backend.wait()))
    measured = backend.end()
    backend.leave_rollout()
    return {s.key: s.reward for group in current.groups() for s in group.samples}, measured


def test_gaps_after_and_two_workers_give_the_same_rewards():
    gaps = pool()
    one, measured_after = round_with(pool(share=0.0))
    in_gaps, measured_gaps = round_with(gaps)
    assert in_gaps == one
    assert measured_gaps["reward/judge/gap_turns"] > 0
    assert measured_after["reward/judge/gap_turns"] == 0
    assert (gaps.machine.entered, gaps.machine.is_there) == (1, False)
    engines = [Engine(ReplayExecutor(RISING, 1, 2, 400, 4, 64), BatcherConfig(decode_steps=2)) for _ in range(2)]
    two, measured = run_round(LocalWorkers(engines), pool(share=1.0))
    assert two == one
    assert measured["reward/judge/gap_turns"] > 0


@pytest.mark.parametrize("num_samples", [1, 3])
def test_every_verdict_of_a_sample_is_waited_for_and_has_a_key_of_its_own(num_samples):
    judge = pool(num_samples=num_samples)
    seen: list[list[SampleKey]] = []
    judge._reading.reward = lambda samples: (seen.append([s.key for s in samples]), (1.0, {}))[1]
    for index in range(4):
        judge.submit(PROMPT, sample(index))
    assert {index: each.reward for index, each in verdicts(judge).items()} == dict.fromkeys(range(4), 1.0)
    assert [len(keys) for keys in seen] == [num_samples] * 4
    assert len({key for keys in seen for key in keys}) == 4 * num_samples
