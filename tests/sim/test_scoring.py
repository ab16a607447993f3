"""Simulated scoring: which worker scores what and when, and what happens to cancelled verdicts."""

from __future__ import annotations

import numpy as np
from known_samples import KnownSample, KnownWorkload
from sim_machine import key, known, prompt

from jaxrl.mechanisms.reward_timeouts import AdaptiveTimeouts, TimeoutRule
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.types import Sample, SampleKey

SECONDS = {key(0): 5.0, key(1): 1.0, key(2): 2.0}


class Bench:
    def __init__(self, num_workers: int = 1, timeout_s: float = 0.0, timeouts: AdaptiveTimeouts | None = None) -> None:
        self.clock = SimulatedClock()
        self.phases = SimulatedPhases(self.clock)
        workload = known(dict.fromkeys(SECONDS, 3), SECONDS)
        self.scoring = ScoringWorkers(workload, self.clock, self.phases, num_workers, timeout_s, timeouts=timeouts)

    def submit(self, *keys: SampleKey) -> None:
        for each in keys:
            self.scoring.submit(prompt(each.prompt_index), response(each))

    def wait(self) -> list[tuple[float, SampleKey]]:
        return came(self.scoring.wait(0.5))


def response(of: SampleKey, version: int = 0) -> Sample:
    sample = Sample.empty(of)
    sample.token_ids, sample.versions = np.zeros(3, np.int32), np.full(3, version, np.int32)
    return sample


def came(verdicts: list[Verdict]) -> list[tuple[float, SampleKey]]:
    return [(verdict.time_s, verdict.key) for verdict in verdicts]


def test_a_cancelled_scoring_keeps_its_worker_and_may_be_asked_for_again():
    bench = Bench()
    bench.submit(key(0))
    bench.scoring.cancel((key(0),))
    bench.submit(key(0))
    assert bench.scoring.num_pending == 1
    bench.clock.advance(5.0)
    assert bench.scoring.completed() == [], "this one was cancelled"
    assert bench.wait() == [(10.0, key(0))]
    assert bench.wait() == []


def test_metrics_are_those_of_a_pool_and_start_anew():
    bench = Bench(timeout_s=2.0)
    bench.submit(key(0), key(1), key(2))
    verdicts = []
    while bench.scoring.num_pending:
        verdicts += bench.scoring.wait(0.5)
    assert [(v.key, v.status, v.duration_s) for v in verdicts] == [
        (key(0), "timeout", 2.0),
        (key(1), "ok", 1.0),
        (key(2), "timeout", 2.0),  # the limit itself is too late
    ]
    assert verdicts[0].info == {"error": "no verdict after 2.0 s"}
    assert bench.scoring.take_metrics() == {"reward/pool_restarts": 0, "reward/seconds": 5.0}
    assert set(bench.scoring.take_metrics().values()) == {0}


def test_test_cases_are_cut_off_at_the_limits_that_come_with_them():
    bench = Bench(num_workers=3, timeout_s=1.5, timeouts=AdaptiveTimeouts(TimeoutRule(1.0, 4.0)))
    for each, limits in ((key(0), ()), (key(1), (1.25,)), (key(2), (1.75,))):
        bench.scoring.submit(prompt(each.prompt_index), response(each), limits)
    verdicts = {}
    while bench.scoring.num_pending:
        verdicts |= {verdict.key: verdict for verdict in bench.scoring.wait(0.5)}
    said = {each: (v.duration_s, v.info["case_s"], v.info["cut_off"]) for each, v in verdicts.items()}
    assert said == {
        key(0): (4.0, [4.0], 1),  # nothing is known of it
        key(1): (1.0, [1.0], 0),
        key(2): (1.75, [1.75], 1),
    }
    assert {verdict.status for verdict in verdicts.values()} == {"ok"}
    kinds = {each: verdict.info.get("timeouts") for each, verdict in verdicts.items()}
    assert kinds == {key(0): {"case_max": 1}, key(1): None, key(2): {"case": 1}}


def test_rewards_and_times_are_those_of_the_step_of_the_first_token():
    class Growing(KnownWorkload):
        def reward(self, key: SampleKey, step: int = 0) -> float:
            return float(step)

        def reward_s(self, key: SampleKey, step: int = 0) -> float:
            return 10.0 * step

    clock = SimulatedClock()
    scoring = ScoringWorkers(Growing({}, {}), clock, SimulatedPhases(clock))
    sample = response(key(0), version=3)
    sample.versions[1:] = 7  # it was resumed
    scoring.submit(prompt(0), sample)
    (verdict,) = scoring.wait(0.5)
    assert (verdict.reward, verdict.time_s, verdict.duration_s) == (4.0, 40.0, 40.0)


def test_tasks_may_have_workers_of_their_own():
    samples = {of: KnownSample(3, 1.0, seconds) for of, seconds in SECONDS.items()}
    workload = KnownWorkload(samples, dict.fromkeys(range(3), 4), {0: "code", 1: "math", 2: "code"})
    bench = Bench()
    bench.scoring = ScoringWorkers(workload, bench.clock, bench.phases, 1, 0.0, {"code": 2})
    bench.submit(*SECONDS)
    assert [bench.wait() for _ in SECONDS] == [[(1.0, key(1))], [(2.0, key(2))], [(5.0, key(0))]]
