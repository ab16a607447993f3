"""Rounds on simulated devices: exact times done by hand, the commands of all rules, replayed lengths beside them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from replay_worker import ReplayWorker
from run_parts import made_run
from sim_machine import STOP, TINY, Machine, key, known, play, prompt, sizes, told

from jaxrl.config import SimulatedLengths, SimulatedScoring, SimulatedTask
from jaxrl.mechanisms.dynamic_sampling import DynamicSampling
from jaxrl.mechanisms.over_provisioning import OverProvisioning
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.runtime.backend import RolloutBackend
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches, RoundTime
from jaxrl.scheduling.rounds.events import (
    Abort,
    AwaitVerdict,
    CancelScore,
    Event,
    Launch,
    SampleAborted,
    SampleFinished,
    Score,
    Verdict,
)
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.workload import ModelledWorkload, Workload
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams


def play_round(machine: Machine, prompts: Sequence[Prompt] = (prompt(0), prompt(1))) -> list[Event]:
    """A round of two samples for each prompt."""
    machine.backend.enter_rollout(0)
    machine.backend.begin(RoundInfo(1), SamplingParams(max_tokens=50, stop_token_ids=(STOP,)))
    return play(Round(prompts, 2), machine.backend)


def test_a_tiny_round_by_hand():
    """Plan 0 prefills (10 s), which samples each first token, and decodes two steps: until 12. Plan 1, submitted at 0,
    runs two more until 14; plan 2, submitted at 12 when the host has seen plan 0, one until 15. The one reward worker
    starts at 12, as soon as the first response has been told."""
    machine = Machine(TINY)
    events = play_round(machine)
    assert told(events) == [
        (12.0, "finished", key(0, 0)),
        (12.0, "finished", key(1, 0)),
        (14.0, "finished", key(0, 1)),
        (15.0, "finished", key(1, 1)),
        (15.0, "verdict", key(0, 0)),
        (16.0, "verdict", key(1, 0)),
        (20.0, "verdict", key(0, 1)),
        (22.0, "verdict", key(1, 1)),
    ]
    assert [event.duration_s for event in events if isinstance(event, Verdict)] == [3.0, 1.0, 4.0, 2.0]
    measured = machine.backend.end()
    assert measured["rollout/decode_steps"] == 5
    assert measured["rollout/bubble_ratio"] == pytest.approx(1 - 12 / 20)
    assert (measured["reward/num_scored"], measured["reward/seconds"]) == (4, 10.0)
    assert machine.executor.num_tokens == 16


def test_two_reward_workers_score_side_by_side():
    machine = Machine(TINY, workers=2)
    verdicts = [each for each in told(play_round(machine)) if each[1] == "verdict"]
    # the second worker is done at 13, and its verdict waits for the first one's; the third starts at 14 on it
    assert [(at, of) for at, _, of in verdicts] == [
        (15.0, key(0, 0)),
        (13.0, key(1, 0)),
        (18.0, key(0, 1)),
        (17.0, key(1, 1)),
    ]
    assert machine.clock.now_s == 18.0


def test_the_host_works_beside_the_devices():
    """With half a second of host work per plan everything begins half a second later, and no plan waits for it again:
    plan 1 is submitted at 1.0, while plan 0 runs from 0.5 to 12.5."""
    finished = [each[0] for each in told(play_round(Machine(TINY, host_s=0.5))) if each[1] == "finished"]
    assert finished == [12.5, 12.5, 14.5, 15.5]


def test_scoring_that_reaches_the_limit_is_a_time_out():
    machine = Machine(TINY, timeout_s=3.0)
    events = play_round(machine)
    verdicts = {event.key: event for event in events if isinstance(event, Verdict)}
    assert {of: event.status for of, event in verdicts.items()} == {
        key(0, 0): "timeout",
        key(0, 1): "timeout",
        key(1, 0): "ok",
        key(1, 1): "ok",
    }
    assert verdicts[key(0, 1)].reward == 0.0, "its scorer would have said 1"
    assert machine.backend.end()["reward/timeouts"] == 2


def test_a_length_that_is_not_known_is_an_error():
    machine = Machine(known({key(0, 0): 3}))
    with pytest.raises(ValueError, match=r"sample_index=1.*no length is recorded"):
        play_round(machine, [prompt(0)])


# ---------------------------------------------------------------- commands of other rules


def test_aborted_responses_are_told_and_may_go_on_where_they_were():
    lengths = {key(0): 9, key(1): 3, key(2): 30}
    machine = Machine(known(lengths, prompts=4))
    backend = machine.begin()
    for i in range(3):
        backend.apply([Launch(prompt(i), (key(i),))])
    first = backend.wait()
    assert isinstance(first, SampleFinished)
    assert first.sample.key == key(1)
    backend.apply([Abort((key(0), key(2)), keep=True)])  # plan 1, in flight, is waited for: five tokens each
    aborted = [backend.wait() for _ in range(2)]
    assert told(aborted) == [(14.0, "aborted", key(0)), (14.0, "aborted", key(2))]
    kept = [event.sample for event in aborted if isinstance(event, SampleAborted)]
    assert [(len(sample), sample.finish_reason) for sample in kept] == [(5, "abort"), (5, "abort")]
    backend.end()

    backend = machine.begin(version=1)
    backend.apply([Launch(prompt(0), (key(0),), resumed=(kept[0],))])
    finished = backend.wait()
    assert isinstance(finished, SampleFinished)
    assert len(finished.sample) == 9
    assert finished.sample.versions.tolist() == [0] * 5 + [1] * 4
    backend.end()


def test_a_response_resumed_later_keeps_the_length_it_had():
    growing = ModelledWorkload(
        0, (SimulatedTask(name="t", response=SimulatedLengths(median=8, sigma=0.0, growth=0.5)),), 50
    )
    assert (growing.length(key(0), 1), growing.length(key(0), 3)) == (12, 27)
    machine = Machine(growing)
    backend = machine.begin()
    backend.apply([Launch(prompt(0), (key(0),))])
    backend.apply([Launch(prompt(1), (key(1),))])
    for _ in range(3):
        backend._serve()
    backend.apply([Abort((key(0), key(1)), keep=True)])
    kept = [event.sample for event in (backend.wait(), backend.wait()) if isinstance(event, SampleAborted)]
    assert len(kept) == 2
    backend.end()
    backend = machine.begin(version=2)
    backend.apply([Launch(prompt(0), (key(0),), resumed=(kept[0],))])
    backend.apply([Launch(prompt(1), (key(1),))])
    events = [backend.wait(), backend.wait()]
    assert {e.sample.key: len(e.sample) for e in events if isinstance(e, SampleFinished)} == {key(0): 12, key(1): 27}


def test_verdicts_are_awaited_and_cancelled():
    lengths = {key(0): 2, key(1): 40, key(2): 2}
    backend = Machine(known(lengths, {key(0): 50.0, key(2): 1.0}), workers=2).begin()
    for i in range(3):
        backend.apply([Launch(prompt(i), (key(i),))])
    ends = [backend.wait(), backend.wait()]
    for event in ends:
        assert isinstance(event, SampleFinished)
        backend.apply([Score(prompt(event.sample.key.prompt_index), event.sample)])
    backend.apply([AwaitVerdict(key(0))])
    assert told([backend.wait()]) == [(62.0, "verdict", key(0))]
    assert backend.engine.counters.plans == 1, "no plan was made while the verdict was awaited"
    backend.apply([CancelScore((key(2),))])  # has come in at 13 and has not been told
    assert told([backend.wait()])[0][1:] == ("finished", key(1))


def test_a_cancelled_round_leaves_nothing():
    machine = Machine(TINY)
    backend = machine.begin()
    backend.apply([Launch(prompt(0), (key(0, 0), key(0, 1)))])
    event = backend.wait()
    assert isinstance(event, SampleFinished)
    backend.apply([Score(prompt(0), event.sample)])
    backend.cancel()
    assert machine.engine.is_idle
    again = machine.begin()
    began_s = machine.clock.now_s
    again.apply([Launch(prompt(1), (key(1, 0),))])
    event = again.wait()
    assert isinstance(event, SampleFinished)
    assert event.time_s == began_s + 11.0
    again.apply([Score(prompt(1), event.sample)])
    assert told([again.wait()]) == [(began_s + 12.0, "verdict", key(1, 0))]


# ---------------------------------------------------------------- as over replayed lengths


class OddPool:
    """A reward pool with verdicts that come after so many looks, in another order; 0: at once."""

    def __init__(self, workload: Workload, looks: int = 0) -> None:
        self._workload, self._looks = workload, looks
        self._pending: dict[SampleKey, int] = {}

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        self._pending[sample.key] = (5 * sample.key.prompt_index + 3 * sample.key.sample_index) % (self._looks + 1)

    def cancel(self, keys: Any) -> None:
        self._pending = {key: looks for key, looks in self._pending.items() if key not in keys}

    def completed(self) -> list[Verdict]:
        done = [key for key, looks in self._pending.items() if looks <= 0]
        self._pending = {key: looks - 1 for key, looks in self._pending.items() if looks > 0}
        return [Verdict(0.0, key, self._workload.reward(key)) for key in done]

    def wait(self, timeout_s: float) -> list[Verdict]:
        return self.completed()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take_metrics(self) -> dict[str, float]:
        return {}


class _Lengths:
    """A workload as a mapping from keys to lengths."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __getitem__(self, of: SampleKey) -> int:
        return self._workload.length(of)

    def __contains__(self, of: SampleKey) -> bool:
        return True


def replaying_backend(workload: Workload, looks: int = 0) -> RolloutBackend:
    """A backend over a replay of a workload's lengths, on two dp groups of three rows."""
    lengths: Any = _Lengths(workload)
    worker = ReplayWorker(lengths, num_groups=2, num_slots=3, num_blocks=20)
    engine = Engine(worker, BatcherConfig(decode_steps=3))
    pool = OddPool(workload, looks)
    return RolloutBackend(made_run(engine, worker, pool))


def simulated_backend(workload: Workload) -> RolloutBackend:
    return Machine(workload, sizes(num_devices=2, num_slots=3, num_blocks=20), decode_steps=3).backend


def test_replayed_lengths_tell_the_same():
    """The same round over a replay of the same lengths: same events, same dispatches."""
    rng = random.Random(1)
    workload = known({key(i, j): rng.randint(1, 30) for i in range(9) for j in range(3)})
    outcomes = []
    for backend in (replaying_backend(workload), simulated_backend(workload)):
        backend.enter_rollout(0)
        backend.begin(RoundInfo(1), SamplingParams(max_tokens=40, stop_token_ids=(STOP,)))
        events = play(Round([prompt(i, 5) for i in range(9)], 3), backend)
        measured = backend.end()
        rollout = {name: value for name, value in measured.items() if name.startswith("rollout/")}
        finishes = [(e.sample.key, e.dispatch) for e in events if isinstance(e, SampleFinished)]
        outcomes.append(([each[1:] for each in told(events)], finishes, rollout))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2]["rollout/bubble_ratio"] > 0


BATCH = BatchSettings(3, 3)
FILTERING = replace(BATCH, group_filter=DynamicSampling(DynamicSampling.Options(enable=True, max_unscored_groups=1)))
AFTERWARDS, FILTERING_AFTERWARDS = (replace(batch, score_when="rollout") for batch in (BATCH, FILTERING))
RULES: dict[str, Callable[[], BatchRule]] = {
    "plain": lambda: FreshBatches(BATCH),
    "plain, scored afterwards": lambda: FreshBatches(AFTERWARDS),
    "plain, filter_groups": lambda: FreshBatches(FILTERING),
    "plain, filter_groups afterwards": lambda: FreshBatches(FILTERING_AFTERWARDS),
    "over-provisioning": lambda: OverProvisioning(
        BATCH, OverProvisioning.Options(enable=True, prompt_factor=1.5, response_factor=1.5)
    ),
    "tail batching": lambda: TailBatching(
        BATCH, TailBatching.Options(enable=True, prompt_factor=1.5, response_factor=1.5)
    ),
    "tail batching, filter_groups": lambda: TailBatching(
        FILTERING, TailBatching.Options(enable=True, prompt_factor=2.0)
    ),
    "partial rollout": lambda: PartialRollout(BATCH, PartialRollout.Options(enable=True)),
    "partial rollout, staleness 1": lambda: PartialRollout(BATCH, PartialRollout.Options(enable=True, max_staleness=1)),
    "partial rollout, filter_groups": lambda: PartialRollout(FILTERING, PartialRollout.Options(enable=True)),
}
MIXED = ModelledWorkload(
    3,
    (
        SimulatedTask(
            name="t",
            response=SimulatedLengths(median=8, sigma=0.9),
            prompt_median=6,
            prompt_sigma=0.4,
            scoring=SimulatedScoring(median_s=0.5, sigma=2.0, per_token_s=0.1),
        ),
    ),
    max_response_length=40,
    max_prompt_length=12,
)


def play_rounds(backend: Any, rule: BatchRule, num_rounds: int = 6) -> list[Any]:
    """What each round decided and measured; the weights change after every second one."""
    prompts = SimulatedPrompts(MIXED, 10, 12, seed=0)
    outcomes = []
    for step in range(1, num_rounds + 1):
        version = (step - 1) // 2
        backend.enter_rollout(version)
        backend.begin(RoundInfo(step), SamplingParams(max_tokens=40, stop_token_ids=(STOP,)))
        current = rule.plan(prompts, RoundTime(step, version, num_rounds - step + 1))
        play(current, backend)
        result = rule.settle(current)
        measured = {name: value for name, value in backend.end().items() if name.startswith("rollout/")}
        samples = [
            (s.key, s.token_ids.tolist(), s.versions.tolist(), s.reward, s.text)
            for g in result.groups
            for s in g.samples
        ]
        outcomes.append((result.kind, samples, result.left, result.metrics, measured))
    return outcomes


@pytest.mark.parametrize("name", RULES)
def test_each_rule_decides_the_same_over_both_whatever_scoring_takes(name: str):
    """Replayed, with verdicts at once and late, and simulated with scoring times: batches, leftovers, and what the
    engine counted are the same."""
    simulated = play_rounds(simulated_backend(MIXED), RULES[name]())
    for looks in (0, 7):
        assert play_rounds(replaying_backend(MIXED, looks), RULES[name]()) == simulated
    aborted = sum(metrics["rollout/aborted_samples"] for *_, metrics, _ in simulated)
    # dynamic sampling launches ahead of verdicts, and ends what the batch does not need
    assert (aborted > 0) == (not name.startswith("plain") or name == "plain, filter_groups")
