"""Several processes of one simulated run, whose progress is interleaved at random, handle the same events, train on the
same groups and carry the same state as one process with all workers."""

from __future__ import annotations

import pytest
from host_rules import RULES, config_of
from hosts_in_step import HostsInStep, assert_same, one_process, with_hosts
from simulated_runs import make_workload

from jaxrl.runtime.hosts.event_stream import MAX_UNREAD

SEEDS = 25


def case(rule: str, seed: int, num_processes: int, per_process: int = 1) -> None:
    config = config_of(rule, seed, num_processes * per_process, **{"trainer.total_training_steps": 5})
    workload = make_workload(seed)
    alone = one_process(config, workload)
    assert alone.finished
    assert_same(HostsInStep(with_hosts(config, num_processes), workload, num_processes, seed).run(), alone)


@pytest.mark.parametrize(("rule", "num_processes"), [*zip(RULES, (2, 3, 2, 4, 3, 2, 2, 3), strict=True)])
def test_processes_handle_the_events_of_one(rule: str, num_processes: int):
    case(rule, 1 + num_processes, num_processes)


def test_processes_of_several_workers_each():
    case("tail batching", 2, 2, per_process=2)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_processes_handle_the_events_of_one_whoever_is_slow(rule: str, num_processes: int):
    for seed in range(SEEDS):
        case(rule, seed, num_processes)


@pytest.mark.parametrize("asked_by", [0, 2])
def test_a_stop_asked_of_any_process_ends_all_at_the_same_event_and_the_run_goes_on(asked_by: int):
    config, workload = config_of("tail batching", 5, 3, **{"trainer.total_training_steps": 5}), make_workload(5)
    alone = one_process(config, workload)
    run = HostsInStep(with_hosts(config, 3), workload, 3, seed=asked_by)
    run.processes[asked_by].stop_after = 60
    run.run()
    first = run.processes[0]
    assert 60 <= len(first.events) < len(alone.events)
    for process in run.processes:
        assert process.finished is False
        assert process.events == first.events
        assert process.saved == first.saved
    (step,) = {max(process.saved) for process in run.processes}
    rest = HostsInStep(with_hosts(config, 3), workload, 3, seed=7).run(first.saved[step])
    assert rest.processes[0].finished
    for process in rest.processes:
        assert process.saved == {at: state for at, state in alone.saved.items() if at > step}


def test_the_board_holds_no_more_after_many_rounds():
    """What lies there at once does not grow with the steps, and little is left."""
    workload = make_workload(4)
    most: list[int] = []
    for steps in (3, 24):
        config = config_of("plain", 4, 2, **{"trainer.total_training_steps": steps, "trainer.save_freq": 100})
        run = HostsInStep(with_hosts(config, 2), workload, 2, seed=4).run()
        most.append(max(run.stores[0].most))
        assert len(run.stores[0].values) < MAX_UNREAD + 4
        assert all(
            values["hosts/stream_batches"] > 0 for process in run.processes for values in process.metrics.values()
        )
    assert most[0] <= most[1] < 2 * MAX_UNREAD
