"""A simulated run on several hosts: it decides what one process with all workers decides, and says what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from host_rules import config_of
from hosts_in_step import Process, assert_same, one_process, with_hosts
from sim_machine import SMALL
from simulated_runs import House, make_config, make_workload

from jaxrl.config import Config
from jaxrl.loop import Hooks
from jaxrl.record.state import dump_state, load_state
from jaxrl.runtime.other_host import HostTimes
from jaxrl.runtime.simulated_hosts import SimulatedStore
from jaxrl.runtime.simulation import build
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100

RULES = ("plain", "tail batching", "partial rollout, one step off", "over-provisioning", "prompts stay together")


@dataclass
class Alone:
    """What `assert_same` compares."""

    processes: list[Process]


def on_hosts(config: Config, num_hosts: int, **simulate: Any) -> Config:
    config = with_hosts(config, num_hosts)
    return replace(config, simulate=replace(config.simulate, **simulate))


def played(config: Config, seed: int) -> Process:
    process = Process()
    process.run(config, make_workload(seed))
    assert process.finished
    return process


@pytest.mark.parametrize(
    ("rule", "num_hosts", "per_host"),
    [("plain", 2, 1), ("tail batching", 3, 1), ("tail batching", 2, 2), *((rule, 2, 1) for rule in RULES[2:])],
)
def test_hosts_decide_what_one_process_decides(rule: str, num_hosts: int, per_host: int):
    for seed, times in enumerate(({}, {"host_spread": 0.5, "host_latency_s": 0.1, "host_call_s": 0.0})):
        config = config_of(rule, seed, num_hosts * per_host, **{"trainer.total_training_steps": 4})
        alone = one_process(config, make_workload(seed))
        assert_same(Alone([played(on_hosts(config, num_hosts, **times), seed)]), alone)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_hosts_decide_what_one_process_decides_whatever_things_take(rule: str, num_hosts: int):
    for seed in range(12):
        config = config_of(rule, seed, num_hosts)
        alone = one_process(config, make_workload(seed))
        times = {
            "host_spread": 0.3 * (seed % 4),
            "host_latency_s": 0.004 * (seed % 3),
            "host_event_s": 1e-3 * (seed % 2),
        }
        assert_same(Alone([played(on_hosts(config, num_hosts, **times), seed)]), alone)  # type: ignore[arg-type]


def test_a_run_that_was_killed_ends_as_one_that_was_not():
    config = on_hosts(config_of("tail batching", 5, 2), 2, host_spread=0.2)
    whole = House(config, make_workload(5))
    assert whole.run()
    halved = House(config, make_workload(5))
    halved.run(("kill", whole.num_asked // 2))
    assert max(halved.saved) in range(1, 7)
    assert halved.run()
    assert halved.saved == whole.saved
    times = ("timing_s/", "perf/", "hosts/", "reward/")  # scoring that no round waits for keeps its worker
    found, expected = (
        {step: {n: v for n, v in values.items() if not n.startswith(times)} for step, values in house.metrics.items()}
        for house in (halved, whole)
    )
    assert found == expected


def long_rounds(num_hosts: int, **simulate: float | str) -> Process:
    """Rounds of a hundred plans of 8 ms or so, and hosts that hear of each other within 1 ms."""
    more = {
        "data.train_batch_size": 4 * num_hosts,
        "data.max_response_length": 900,
        "rollout.num_blocks": 2000,
        "rollout.max_num_seqs": 16,
        "rollout.num_workers": num_hosts,
        "trainer.num_devices": num_hosts,
        "trainer.total_training_steps": 1,
        "reward.timeout_s": 1000.0,
        "rollout.over_provisioning": {"enable": True, "prompt_factor": 1.5, "response_factor": 1.5},
    }
    times = {"host_latency_s": 1e-4, "host_call_s": 1e-6, "host_event_s": 1e-6}
    config = on_hosts(make_config({}, **more), num_hosts, **{**times, **simulate})
    workload = make_workload(1, hang_share=0.0, scoring_s=0.0, lengths=(300, 0.6))
    process = Process()
    process.run(config, replace(workload, max_response_length=900))
    return process


def mean_of(process: Process, name: str) -> float:
    return sum(step[name] for step in process.metrics.values()) / len(process.metrics)


def test_what_the_order_costs_grows_with_the_spread_and_none_is_paid_in_order_of_arrival():
    alike, apart = long_rounds(4), long_rounds(4, host_spread=0.5)
    waits, rollout = [mean_of(run, "hosts/order_wait_s") for run in (alike, apart)], mean_of(apart, "timing_s/gen")
    assert waits[1] > 3 * waits[0]
    assert 0.05 * rollout < waits[1] < 0.5 * rollout, "the fastest of four waits for a third of the time"
    arrived = long_rounds(4, host_spread=0.5, host_order="arrival")
    assert mean_of(arrived, "hosts/order_wait_s") == 0
    assert mean_of(arrived, "timing_s/gen") < rollout


def test_latency_costs_only_beyond_what_hosts_may_run_ahead():
    """Four plans of lookahead are 32 steps; a decode step takes about 10 µs."""
    near, far = (long_rounds(3, host_latency_s=seconds) for seconds in (1e-5, 1e-2))
    assert near.logical() == far.logical()
    assert mean_of(far, "timing_s/gen") > 1.5 * mean_of(near, "timing_s/gen")


def test_metrics_of_the_stream_are_those_of_a_real_run_and_exchanged_tokens_are_counted():
    process = long_rounds(2)
    for step, measured in process.metrics.items():
        assert measured["hosts/stream_batches"] > 10
        assert measured["hosts/slowest"] == 1
        assert 0 <= measured["hosts/order_wait_s"] <= measured["hosts/order_wait_max_s"] <= measured["timing_s/gen"]
        tokens = sum(len(sample) for group in process.groups[step] for sample in group.samples)
        assert measured["hosts/exchange_bytes"] == 16 * tokens
        texts = {sample.text for group in process.groups[step] for sample in group.samples}
        assert all("simulated tokens" in text for text in texts), "what other hosts have drawn has its text"


def test_the_timeline_has_tracks_of_each_host(tmp_path: Path):
    config = on_hosts(config_of("plain", 1, 3), 3)
    hooks = Hooks(lambda *_: None, lambda *_: None, lambda *_: None, lambda *_: None, lambda: False)
    cost, file = CostModel(SMALL, H100), tmp_path / "timeline.json"
    simulation = build(config, cost, make_workload(1), hooks, timeline=file)
    simulation.phases.begin()
    simulation.loop.run()
    simulation.phases.close()
    drawn = file.read_text(encoding="utf-8")
    for track in ("engine", "host 1 engine", "host 2 engine", "host 2 reward worker 0"):
        assert f'"{track}"' in drawn, track


def test_layouts_adapt_on_every_host_as_in_one_process():
    more = {"trainer.num_devices": 4, "rollout.layout": {"planner": True, "degrees": [1, 2]}}
    config = config_of("plain", 2, 2, **more, **{"rollout.num_blocks": 16})
    alone = one_process(config, make_workload(2))
    process = played(on_hosts(config, 2), 2)
    assert_same(Alone([process]), alone)  # type: ignore[arg-type]
    found, expected = (
        {step: dump_state({"layouts": load_state(text, "test")["layouts"]}) for step, text in each.saved.items()}
        for each in (process, alone)
    )
    assert found == expected


class Asleep:
    """A host that has nothing to do."""

    process, next_ns = 1, None


def test_a_board_says_when_nothing_will_ever_come():
    hosts: Any = [Asleep()]
    store = SimulatedStore(hosts, SimulatedClock(), HostTimes(1, 1, 1), False, lambda: None)
    with pytest.raises(RuntimeError, match="host 1 is waited for, and no host has anything to do"):
        store.get("stream/notices/00001/000000000000", 1.0)
    store = SimulatedStore(hosts, SimulatedClock(), HostTimes(1, 1, 1), True, lambda: None)
    with pytest.raises(RuntimeError, match="none has anything to do"):
        store.get("stream/notices/00001/000000000000", 1.0)


def test_a_value_is_there_when_it_has_come():
    clock = SimulatedClock()
    hosts: Any = [Asleep()]
    store = SimulatedStore(hosts, clock, HostTimes(latency_ns=500, call_ns=10, event_ns=0), False, lambda: None)
    store.post(1, 0, 100, b"early")
    store.post(1, 1, 1000, b"late")
    assert store.get("stream/notices/00001/000000000000", 1.0) == b"early"
    assert clock.now_ns == 600
    assert [value for _, value in store.folder("stream/notices")] == [b"early"]
    assert clock.now_ns == 610
    store.delete("stream/notices/00001/000000000000")
    assert store.folder("stream/notices") == []
    assert store.get("stream/notices/00001/000000000001", 2e-7) is None, "it takes longer than that"
    assert store.get("stream/notices/00001/000000000001", 1.0) == b"late"
    assert clock.now_ns == 1500
