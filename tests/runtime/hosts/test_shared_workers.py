"""Processes that drive one worker together, interleaved at random, submit the same plans and wait for each other's, and
decide what one process with as many workers decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from host_rules import RULES, config_of
from hosts_in_step import HostsInStep, assert_same, one_process, with_hosts
from simulated_runs import make_workload

from jaxrl.config import Config
from jaxrl.runtime.simulation import Simulation
from jaxrl.sim.workload import Workload

SEEDS = 25


class SharedInStep(HostsInStep):
    """The devices of a worker run a plan once all of its processes have submitted it."""

    def __init__(self, config: Config, workload: Workload, seed: int) -> None:
        super().__init__(config, workload, config.hosts.num, seed)
        self.plans: list[list[str]] = [[] for _ in self.processes]

    def _slow_down(self, process: int, simulation: Simulation) -> None:
        super()._slow_down(process, simulation)
        (executor,) = simulation.executors.executors
        submit, collect, each = executor.submit, executor.collect, self.config.rollout.hosts_per_worker
        together = self.plans[process // each * each :][:each]
        num_collected = 0

        def submitted(plan: Any) -> Any:
            self.plans[process].append(
                f"{plan.index} {plan.prefill} {list(plan.decode)} {plan.num_steps} {plan.leave_after} {plan.verifies}"
            )
            return submit(plan)

        def collected(ticket: Any, own: Callable[[Any], Any] = collect) -> Any:
            nonlocal num_collected
            num_collected += 1
            while min(map(len, together)) < num_collected:
                self.baton.pass_on(process)
            return own(ticket)

        executor.submit, executor.collect = submitted, collected  # type: ignore[method-assign]


def spanning(rule: str, seed: int, num_groups: int, each: int, **more: Any) -> Config:
    """`num_groups` workers, of `each` hosts with a device."""
    sizes = {"trainer.num_devices": num_groups * each, "rollout.tensor_model_parallel_size": each}
    return config_of(rule, seed, num_groups, **{"trainer.total_training_steps": 5, **sizes, **more})


def shared(config: Config, each: int) -> Config:
    hosts = with_hosts(config, config.rollout.num_workers * each)
    return replace(hosts, rollout=replace(hosts.rollout, hosts_per_worker=each))


def case(rule: str, seed: int, num_groups: int, each: int) -> None:
    config, workload = spanning(rule, seed, num_groups, each), make_workload(seed)
    run = SharedInStep(shared(config, each), workload, seed)
    run.run()
    assert_same(run, one_process(config, workload))
    for first in range(0, num_groups * each, each):
        assert run.plans[first]
        assert all(run.plans[first + i] == run.plans[first] for i in range(each))


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single worker in one process hears of commands as one of several processes does."""
    monkeypatch.setattr("jaxrl.runtime.rules.lookahead", lambda config, ticks=None: 1)


@pytest.mark.parametrize("rule", RULES)
def test_two_workers_of_two_processes_each(rule: str):
    case(rule, 3, 2, 2)


@pytest.mark.parametrize("rule", ["tail batching", "partial rollout"])
def test_one_worker_of_all_processes(rule: str, synchronized: None):
    case(rule, 4, 1, 3)


def test_a_busy_period_that_another_process_has_begun_alone():
    """It is dropped before this one has made its first plan."""
    case("prompts stay together", 17, 2, 2)


@pytest.mark.parametrize("asked_by", [0, 1, 3])
def test_a_stop_ends_all_at_the_same_event_and_with_the_same_plans(asked_by: int):
    config, workload = spanning("tail batching", 5, 2, 2), make_workload(5)
    run = SharedInStep(shared(config, 2), workload, asked_by)
    run.processes[asked_by].stop_after = 60
    run.run()
    first = run.processes[0]
    assert 60 <= len(first.events) < len(one_process(config, workload).events)
    assert all((p.finished, p.events, p.saved) == (False, first.events, first.saved) for p in run.processes)
    assert run.plans[0] == run.plans[1]
    assert run.plans[2] == run.plans[3]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_whoever_is_slow(rule: str, synchronized: None):
    for seed in range(SEEDS):
        case(rule, seed, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_whoever_is_slow_of_several_workers(rule: str):
    for seed in range(SEEDS):
        case(rule, seed, 2, 2)
