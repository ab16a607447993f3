"""The loop with every batch rule on a simulated machine: killed, stopped and resumed anywhere, nothing is lost.

The real backend carries out the same commands (tests/runtime/test_simulated_rounds.py shows that its events are the
same), and tests/commands/test_train.py kills whole real runs.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import rule_sections
from sim_machine import SMALL

from jaxrl.config import Config, SimulatedLengths, SimulatedScoring, SimulatedTask, from_mapping
from jaxrl.loop import STATE_SCHEMA, Hooks
from jaxrl.record.state import dump_state, load_state
from jaxrl.runtime.simulation import Simulation, build
from jaxrl.scheduling.rounds.filtered_share import MOST_PER_MISSING
from jaxrl.sim.cost_model import RooflineCost
from jaxrl.sim.hardware import H100
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import Group

Metrics = dict[str, float]
ON = {"enable": True}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "over-provisioning": {"rollout.over_provisioning": {"enable": True, "prompt_factor": 1.5}},
    "tail batching": {"rollout.tail_batching": {"enable": True, "prompt_factor": 1.5}},
    "partial rollout": {"rollout.partial_rollout": ON},
}


def test_every_rule_is_among_these():
    switched = {path for case in RULES.values() for path in case}
    missing = {f"rollout.{section}" for section in rule_sections()} - switched
    assert not missing, f"RULES has no case with {sorted(missing)}"


class Killed(Exception):
    """The process is gone."""


def make_config(values: dict[str, Any], **more: Any) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "tiny"},
        "data": {"train_batch_size": 3, "max_prompt_length": 16, "max_response_length": 40, "val_size": 2},
        "rollout": {"n": 2, "block_size": 4, "num_blocks": 40, "max_num_seqs": 5, "decode_steps": 3},
        "algorithm": {},
        "actor": {},
        "reward": {"num_workers": 2, "timeout_s": 1.0},
        "trainer": {"total_training_steps": 7, "save_freq": 1, "num_devices": 2},
        "simulate": {"num_prompts": 8},
    }
    for path, value in {**values, **more}.items():
        section, option = path.split(".", 1)
        base[section][option] = value
    return from_mapping(base)


def make_workload(seed: int, hang_share: float = 0.2, pass_rate: float = 0.5) -> ModelledWorkload:
    task = SimulatedTask(
        "t",
        response=SimulatedLengths(9, 1.0),
        prompt_median=6,
        prompt_sigma=0.5,
        scoring=SimulatedScoring(0.05, 1.5, hang_share=hang_share),
        pass_rate=pass_rate,
        pass_spread=1.0,
    )
    return ModelledWorkload(seed, (task,), max_response_length=40, max_prompt_length=16, timeout_s=1.0)


class House:
    """A run through any number of processes; `metrics` and `groups` are those of the steps that count."""

    def __init__(self, config: Config, workload: ModelledWorkload) -> None:
        self.config, self.workload = config, workload
        self.metrics: dict[int, Metrics] = {}
        self.groups: dict[int, list[Group]] = {}
        self.saved: dict[int, str] = {}
        self.num_asked = 0
        self.ends: tuple[Literal["kill", "stop"], int] | None = None
        self.simulation: Simulation | None = None

    def run(self, ends: tuple[Literal["kill", "stop"], int] | None = None) -> bool:
        """One process, from the last checkpoint on; `ends`: how, and after how many looks at the stop signal. Returns
        whether the run is finished."""
        self.num_asked, self.ends = 0, ends
        hooks = Hooks(lambda *_: None, self.on_step, lambda *_: None, self.save, self.stop)
        simulation = self.simulation = build(self.config, RooflineCost(SMALL, H100), self.workload, hooks)
        if self.saved:
            simulation.loop.load_host_state(load_state(self.saved[max(self.saved)], "test"))
        try:
            return simulation.loop.run()
        except Killed:
            last = max(self.saved, default=0)
            self.metrics = {step: values for step, values in self.metrics.items() if step <= last}
            return False

    def stop(self) -> bool:
        self.num_asked += 1
        if self.ends is None or self.num_asked < self.ends[1]:
            return False
        if self.ends[0] == "kill":
            raise Killed
        return True

    def on_step(self, step: int, measured: Metrics, groups: Any) -> None:
        self.metrics[step], self.groups[step] = measured, list(groups)

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.saved[step] = dump_state(state)

    @property
    def loop(self) -> Any:
        assert self.simulation is not None
        return self.simulation.loop

    @property
    def state(self) -> dict[str, Any]:
        return load_state(self.saved[max(self.saved)], "test")

    def decided(self) -> Any:
        """All results of a run but its seconds: scoring that no round waits for keeps its worker, and a resumed run has
        free workers."""
        metrics = {
            step: {k: v for k, v in values.items() if not k.startswith(("timing_s/", "perf/"))}
            for step, values in self.metrics.items()
        }
        trained = {
            step: [
                (s.key, s.token_ids.tolist(), s.versions.tolist(), s.reward, s.text) for g in groups for s in g.samples
            ]
            for step, groups in self.groups.items()
        }
        return metrics, trained


def whole(config: Config, workload: ModelledWorkload) -> House:
    house = House(config, workload)
    assert house.run()
    return house


def drawn(house: House) -> list[tuple[int, int]]:
    """Keys of all prompts handed out."""
    prompts = house.loop._prompts
    position = prompts.state()["position"]
    prompts.load_state(prompts.state() | {"position": 0})
    keys = [prompt.key for prompt in prompts.next(position)]
    return keys


def check(house: House) -> None:
    """Checks what holds for every rule."""
    config, loop = house.config, house.loop
    batch, size = config.data.train_batch_size, config.rollout.n
    assert sorted(house.metrics) == list(range(1, config.trainer.total_training_steps + 1))
    samples: set[Any] = set()
    prompts: set[Any] = set()
    for groups in house.groups.values():
        assert len(groups) == batch
        assert all(len(group.samples) == size for group in groups)
        keys = {sample.key for group in groups for sample in group.samples}
        assert len(keys) == batch * size
        assert not keys & samples, "a sample in two batches"
        assert not {group.prompt.key for group in groups} & prompts
        samples |= keys
        prompts |= {group.prompt.key for group in groups}
    handed = drawn(house)
    counts = loop.departures.counts
    left = [key for key in handed if loop.departures.has_left(key)]
    assert sum(counts.values()) == len(left)
    assert counts["trained"] == len(prompts)
    assert len(handed) == len(left) + loop.num_carried, "each prompt has left once, or is carried"
    lag = int(config.trainer.one_step_off)
    for step, values in house.metrics.items():
        stale = values["training/off_policy/max_staleness"]
        if not config.rollout.partial_rollout.enable:
            assert stale == (lag if step > 1 else 0)
            assert values["training/off_policy/share"] == (1.0 if lag and step > 1 else 0.0)
        elif config.rollout.partial_rollout.max_staleness >= 0:
            assert stale <= config.rollout.partial_rollout.max_staleness
        ahead = (MOST_PER_MISSING - 1) * batch if config.algorithm.filter_groups.enable else 0
        if config.rollout.tail_batching.enable:
            assert values["rollout/queue_length"] <= (batch + ahead - 1) + (loop.rule.num_spare + ahead)
        elif config.rollout.partial_rollout.enable:
            assert values["rollout/queue_length"] <= loop.rule.num_spare + ahead
    if config.rollout.tail_batching.at_end == config.rollout.partial_rollout.at_end == "flush":
        assert loop.num_carried == 0


@pytest.mark.parametrize("one_step_off", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_with_each_rule(rule: str, one_step_off: bool):
    house = whole(make_config(RULES[rule], **{"trainer.one_step_off": one_step_off}), make_workload(1))
    check(house)
    first = house.metrics[1]
    assert first["rollout/launched_prompts"] == {"plain": 3, "partial rollout": 6}.get(rule, 5)
    assert first["rollout/kept_prompts"] == 3
    long_rounds = [values["rollout/long_round"] for values in house.metrics.values()]
    assert (1.0 in long_rounds) == (rule == "tail batching")
    thrown = sum(values["rollout/thrown_tokens"] for values in house.metrics.values())
    assert (thrown > 0) == (rule in ("over-provisioning", "tail batching"))
    if rule == "partial rollout":
        assert max(values["training/off_policy/spans/max"] for values in house.metrics.values()) > 1
        assert max(values["training/off_policy/max_staleness"] for values in house.metrics.values()) > one_step_off


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("at", [1, 7, 23, 40, 61])
def test_a_run_ended_anywhere_goes_on_as_if_it_had_not_been(rule: str, how: Literal["kill", "stop"], at: int):
    config, workload = make_config(RULES[rule], **{"trainer.save_freq": 2}), make_workload(2)
    house = House(config, workload)
    house.run((how, at))
    assert house.run()
    check(house)
    assert house.decided() == whole(config, workload).decided()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_whatever_happens(data: st.DataObject):
    """Random rules, workloads (with scorers that hang), pools that run dry, and ends of processes."""
    draw = data.draw
    values = dict(draw(st.sampled_from(sorted(RULES.items())))[1])
    if "rollout.tail_batching" in values:
        values["rollout.tail_batching"] = {
            "enable": True,
            "prompt_factor": draw(st.sampled_from([1.0, 1.25, 2.0])),
            "response_factor": draw(st.sampled_from([1.0, 1.5])),
            "max_age_steps": draw(st.sampled_from([0, 1, 3])),
            "at_end": draw(st.sampled_from(["flush", "leave"])),
            "keep_finished": draw(st.booleans()),
        }
    one_step_off = draw(st.booleans())
    if "rollout.partial_rollout" in values:
        values["rollout.partial_rollout"] = {
            "enable": True,
            "over_provision": draw(st.sampled_from([1.0, 1.5, 2.0])),
            "max_staleness": draw(st.sampled_from([-1, int(one_step_off), 2])),
            "max_restarts": draw(st.sampled_from([0, 1])),
            "at_end": draw(st.sampled_from(["flush", "leave"])),
        }
    filtering = draw(st.booleans())
    racing = set(values) & {"rollout.tail_batching", "rollout.over_provisioning"}
    whens = ["sample", "group"] if (filtering and racing) or "rollout.partial_rollout" in values else None
    config = make_config(
        values,
        **{
            "trainer.one_step_off": one_step_off,
            "trainer.save_freq": draw(st.sampled_from([1, 2, 3])),
            "trainer.test_freq": draw(st.sampled_from([0, 2])),
            "algorithm.filter_groups": {
                "enable": filtering,
                "max_unscored_groups": draw(st.sampled_from([-1, 0, 8])),
                "max_num_gen_batches": 1000,  # rewards are drawn: ten groups of equal ones in a row do happen
            },
            "reward.score_when": draw(st.sampled_from(whens or ["sample", "group", "rollout"])),
            "rollout.max_active_requests": draw(st.sampled_from([0, 4, 7])),
            "rollout.num_blocks": draw(st.sampled_from([17, 40])),
            "data.train_batch_size": draw(st.sampled_from([1, 3, 5])),
            "simulate.num_prompts": draw(st.sampled_from([2, 8, 50])),
        },
    )
    workload = make_workload(draw(st.integers(0, 1 << 20)), draw(st.sampled_from([0.0, 0.4])))
    house = House(config, workload)
    for _ in range(draw(st.integers(0, 3))):
        if house.run((draw(st.sampled_from(["kill", "stop"])), draw(st.integers(1, 60)))):
            break
    assert house.run()
    check(house)
    assert house.decided() == whole(config, workload).decided()


# ---------------------------------------------------------------- checkpoints


def saved_after(values: dict[str, Any], steps: int) -> House:
    house = House(make_config(values, **{"trainer.total_training_steps": steps}), make_workload(3))
    assert house.run()
    return house


LEAVE = {"rollout.tail_batching": {"enable": True, "prompt_factor": 2.0, "at_end": "leave"}}


def test_a_checkpoint_of_before_the_rules_goes_on_with_any():
    house = saved_after({}, 2)
    state = house.state
    assert state["schema"] == STATE_SCHEMA == 2
    older = {k: v for k, v in state.items() if k not in ("rule", "ahead")} | {"schema": 1}
    for values in RULES.values():
        again = House(make_config(values), make_workload(3))
        again.saved = {2: dump_state(older)}
        assert again.run()
        assert sorted(again.metrics) == [3, 4, 5, 6, 7]


def test_prompts_that_wait_in_another_rule_are_not_dropped_in_silence():
    house = saved_after(LEAVE, 1)
    waiting = house.state["rule"]["num_carried"]
    assert waiting > 0
    assert house.loop.num_carried == waiting
    again = House(make_config({}), make_workload(3))
    again.saved = house.saved
    with pytest.raises(ValueError, match=rf"{waiting} prompts wait in the state of tail batching, and this run uses"):
        again.run()
    emptied = saved_after({"rollout.tail_batching": {"enable": True, "prompt_factor": 2.0}}, 2)
    again.saved = emptied.saved  # flushed: the run may go on with another rule
    assert again.run()


@pytest.mark.parametrize("rule", RULES)
def test_rollout_beside_the_update_changes_nothing_but_time(rule: str):
    """Two devices that roll out and train in turns, and four of which two roll out: the same batches, in less time."""
    off = {"trainer.one_step_off": True, **RULES[rule]}
    turns = whole(make_config(off), make_workload(1))
    beside = whole(make_config({**off, "trainer.num_devices": 4, "rollout.num_devices": 2}), make_workload(1))
    check(beside)
    assert beside.decided() == turns.decided()
    for step in range(2, 7):  # the first step's own round is beside nothing, and beside the last update there is none
        own, other = beside.metrics[step], turns.metrics[step]
        update_s = own["timing_s/update_actor"]
        rollout_s = other["timing_s/gen"] + other["timing_s/reward"]
        assert own["timing_s/step"] == pytest.approx(max(update_s, rollout_s) + own["timing_s/sync"], rel=0.01)
        assert own["timing_s/step"] < other["timing_s/step"]


def test_one_step_off_may_be_switched_at_a_resume():
    """Each step trains on a batch of the version before, or of its own where the switch has been turned."""
    off, on = ({"trainer.one_step_off": value, **RULES["tail batching"]} for value in (False, True))
    workload = make_workload(5)

    def staleness(house: House) -> list[float]:
        return [values["training/off_policy/max_staleness"] for _, values in sorted(house.metrics.items())]

    house = House(make_config(on), workload)
    house.run(("stop", 60))
    stopped_at = max(house.saved)
    assert 0 < stopped_at < 6
    assert house.state["ahead"] is not None
    assert house.loop.num_carried >= 3, "the batch ahead is not trained on yet"
    house.config = make_config(off)
    assert house.run()
    assert staleness(house) == [0.0] + [1.0] * stopped_at + [0.0] * (6 - stopped_at)
    assert house.loop.num_carried == 0

    house = House(make_config(off), workload)
    house.run(("stop", 60))
    stopped_at = max(house.saved)
    house.config = make_config(on)
    assert house.run()
    assert staleness(house) == [0.0] * (stopped_at + 1) + [1.0] * (6 - stopped_at)


# ---------------------------------------------------------------- training on several versions


def learnt_from(values: dict[str, Any]) -> list[Any]:
    """The batches that the trainer is given."""
    house = House(make_config({**RULES["partial rollout"], **values}), make_workload(4))
    hooks = Hooks(lambda *_: None, house.on_step, lambda *_: None, house.save, house.stop)
    simulation = build(house.config, RooflineCost(SMALL, H100), house.workload, hooks)
    batches: list[Any] = []
    trainer: Any = simulation.loop._trainer
    trainer.accumulate = lambda batch: batches.append(batch)
    trainer.token_logprobs = lambda batch, which: [np.full(len(s), -9.0, np.float32) for s in batch.samples]
    assert simulation.loop.run()
    return batches


def test_tokens_of_earlier_versions_keep_their_recorded_logprobs():
    batches = learnt_from({})
    old = 0
    for step, batch in enumerate(batches, 1):
        assert batch.loss_masks is None
        for sample, values in zip(batch.samples, batch.old_logprobs, strict=True):
            expected = np.where(sample.versions >= step - 1, -9.0, sample.rollout_logprobs)
            assert values.tolist() == expected.tolist()
            old += int((sample.versions < step - 1).sum())
    assert old > 0
    assert all(batch.old_logprobs is None for batch in learnt_from({"actor.old_logprobs": "rollout"}))


def test_or_are_not_learnt_from():
    batches = learnt_from({"rollout.stale_tokens": "mask"})
    masked = 0
    for step, batch in enumerate(batches, 1):
        for sample, mask in zip(batch.samples, batch.loss_masks, strict=True):
            assert mask.tolist() == (sample.versions >= step - 1).astype(float).tolist()
            masked += int((mask == 0).sum())
    assert masked > 0


def test_one_step_off_learns_from_recorded_logprobs_and_asks_for_no_others():
    values = {"rollout.partial_rollout": {}, "trainer.one_step_off": True}
    batches = learnt_from(values)
    assert batches[0].old_logprobs is not None, "the first step is on-policy"
    assert all(batch.old_logprobs is None for batch in batches[1:])
