"""Whole runs of the loop on a small simulated machine, through any number of processes, and what must hold for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pytest
from sim_machine import SMALL

from jaxrl.config import Config, SimulatedLengths, SimulatedScoring, SimulatedTask, from_mapping
from jaxrl.mechanisms.dynamic_sampling import MOST_PER_MISSING
from jaxrl.record.state import dump_state, load_state
from jaxrl.run.simulation import Simulation, build
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.carried import unpack_samples
from jaxrl.scheduling.rounds.events import Command, Event, Launch, SampleAborted, SampleFinished
from jaxrl.scheduling.rounds.round import Round
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import Group

Metrics = dict[str, float]


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
        # a fifth of the scorers hangs, and batches are small: all of some time out by chance
        "trainer": {"total_training_steps": 7, "save_freq": 1, "num_devices": 2, "max_bad_steps": 0},
        "simulate": {"num_prompts": 8},
    }
    for path, value in {**values, **more}.items():
        section, option = path.split(".", 1)
        base.setdefault(section, {})[option] = value
    return from_mapping(base)


def make_workload(
    seed: int,
    hang_share: float = 0.2,
    pass_rate: float = 0.5,
    scoring_s: float = 0.05,
    timeout_s: float = 1.0,
    lengths: tuple[float, float] = (9, 1.0),
) -> ModelledWorkload:
    """`timeout_s` is that of `reward.timeout_s`, `lengths` median and sigma of responses."""
    task = SimulatedTask(
        name="t",
        response=SimulatedLengths(median=lengths[0], sigma=lengths[1]),
        prompt_median=6,
        prompt_sigma=0.5,
        scoring=SimulatedScoring(median_s=scoring_s, sigma=1.5, hang_share=hang_share),
        pass_rate=pass_rate,
        pass_spread=1.0,
    )
    return ModelledWorkload(seed, (task,), max_response_length=40, max_prompt_length=16, timeout_s=timeout_s)


def samples_of(groups: dict[int, list[Group]]) -> dict[int, list[tuple[Any, ...]]]:
    """The samples of each step, by what an update sees of them."""
    return {
        step: [(s.key, s.token_ids.tolist(), s.versions.tolist(), s.reward) for each in of_step for s in each.samples]
        for step, of_step in groups.items()
    }


class Counting:
    """A backend that counts, for each training round, the tokens that its events tell beyond those resumed."""

    def __init__(self, backend: Any, tokens: dict[int, int]) -> None:
        self._backend, self._tokens = backend, tokens
        self._step: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def begin(self, info: RoundInfo, params: Any) -> None:
        self._step = info.step if info.is_training else None
        self._tokens |= {} if self._step is None else {self._step: 0}
        self._backend.begin(info, params)

    def wait(self) -> Event:
        event = self._backend.wait()
        if isinstance(event, SampleFinished | SampleAborted):
            self._count(len(event.sample))
        return event

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Launch):
                self._count(-sum(map(len, command.resumed)))
        self._backend.apply(commands)

    def _count(self, tokens: int) -> None:
        if self._step is not None:
            self._tokens[self._step] += tokens


@contextmanager
def certain_is_checked() -> Iterator[None]:
    """After each event: a group that is certain to be in the batch stays so, and is what the round yields."""
    handle = Round.handle

    def checked(self: Round, event: Event) -> list[Command]:
        before = {group.prompt.key for group in self.certain()}
        commands = handle(self, event)
        assert before <= {group.prompt.key for group in self.certain()}
        assert not self.done or self.certain() == self.groups()
        return commands

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Round, "handle", checked)
        yield


class House:
    """A run through any number of processes; `metrics` and `groups` are those of the steps that count, `tokens` those
    drawn in the round of each. `prepare` is called with each process's simulation; `more` is for `build`."""

    def __init__(
        self,
        config: Config,
        workload: Any,
        cost: CostModel | None = None,
        prepare: Callable[[Simulation], None] = lambda _: None,
        **more: Any,
    ) -> None:
        self.config, self.workload, self.prepare, self.more = config, workload, prepare, more
        self.cost = CostModel(SMALL, H100) if cost is None else cost
        self.metrics: dict[int, Metrics] = {}
        self.groups: dict[int, list[Group]] = {}
        self.tokens: dict[int, int] = {}
        self.saved: dict[int, str] = {}
        self.num_asked = 0
        self.ends: tuple[Literal["kill", "stop"], int] | None = None
        self.simulation: Simulation | None = None

    def run(self, ends: tuple[Literal["kill", "stop"], int] | None = None) -> bool:
        """One process, from the last checkpoint on; `ends`: how, and after how many looks at the stop signal. Returns
        whether the run is finished."""
        self.num_asked, self.ends = 0, ends
        callbacks = {"on_step": self.on_step, "save": self.save, "stop": self.stop} | self.more
        simulation = self.simulation = build(self.config, self.cost, self.workload, **callbacks)
        loop: Any = simulation.loop
        loop.backend = Counting(loop.backend, self.tokens)
        self.prepare(simulation)
        if self.saved:
            simulation.loop.load_host_state(load_state(self.saved[max(self.saved)], "test"))
        try:
            with certain_is_checked():
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


def whole(config: Config, workload: ModelledWorkload, cost: CostModel | None = None) -> House:
    house = House(config, workload, cost)
    assert house.run()
    return house


def played(config: Config, cost: CostModel, workload: Any, state: str | None = None, **more: Any) -> Any:
    """A run of one process, its metrics, groups and states by step. `state`: that it goes on from; `more`: of
    `build`."""
    house = House(config, workload, cost, **more)
    house.saved |= {} if state is None else {0: state}
    assert house.run()
    return house.simulation, house.metrics, house.groups, house.saved


def drawn(house: House) -> list[tuple[int, int]]:
    prompts = house.loop._prompts
    position = prompts.state()["position"]
    prompts.load_state(prompts.state() | {"position": 0})
    keys = [prompt.key for prompt in prompts.next(position)]
    return keys


def check(house: House) -> None:
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
    check_counts(house)
    check_tokens(house)
    check_samples(house)
    lag = int(config.trainer.one_step_off)
    for step, values in house.metrics.items():
        stale = values["training/off_policy/max_staleness"]
        if (cap := most_stale(config)) is None:
            assert stale == (lag if step > 1 else 0)
            assert values["training/off_policy/share"] == (1.0 if lag and step > 1 else 0.0)
        else:
            assert stale <= cap
        ahead = max(config.data.gen_batch_size - 1, 0)
        ahead += (MOST_PER_MISSING - 1) * batch if config.algorithm.filter_groups.enable else 0
        # a batch in the order of launch leaves groups waiting that were judged out of turn, and that has no bound
        filters = config.algorithm.filter_groups.enable
        is_bounded = not filters or getattr(loop.rule, "num_spare", 0) > 0
        if config.rollout.tail_batching.enable:
            if is_bounded:
                assert values["rollout/queue_length"] <= (batch + ahead - 1) + (loop.rule.num_spare + ahead)
        elif config.rollout.partial_rollout.enable and is_bounded:
            assert values["rollout/queue_length"] <= loop.rule.num_spare + ahead
    if config.rollout.tail_batching.at_end == config.rollout.partial_rollout.at_end == "flush":
        assert loop.num_carried == 0


def most_stale(config: Config) -> float | None:
    """The cap in versions of a rule whose prompts wait with their tokens; None: they do not."""
    tail, partial = config.rollout.tail_batching, config.rollout.partial_rollout
    if not partial.enable and not (tail.enable and tail.relaunch == "resume"):
        return None
    cap = partial.max_staleness if partial.enable else tail.max_staleness
    return math.inf if cap < 0 else cap


def of_steps(house: House, name: str) -> list[float]:
    return [values.get(f"rollout/{name}", 0.0) for _, values in sorted(house.metrics.items())]


def check_counts(house: House) -> None:
    """The metrics of all steps say how prompts left."""
    left = {name: sum(of_steps(house, f"{name}_prompts")) for name in ("kept", "filtered", "failed", "discarded")}
    assert house.loop.departures.counts == {
        "trained": left["kept"],
        "filtered": left["filtered"] + left["discarded"],
        "failed": left["failed"],
    }


def check_tokens(house: House) -> None:
    """Each token that a round draws, or finds carried, is trained on, filtered, thrown away or carried on."""
    filtered, thrown, carried = (of_steps(house, f"{name}_tokens") for name in ("filtered", "thrown", "buffered"))
    for i, step in enumerate(sorted(house.metrics)):
        trained = sum(len(sample) for group in house.groups[step] for sample in group.samples)
        came = house.tokens[step] + (carried[i - 1] if i else 0)
        assert came == trained + filtered[i] + thrown[i] + carried[i], f"step {step}"
    assert carried[-1] == sum(map(len, buffered(house)))


def check_samples(house: House) -> None:
    """Responses are whole, in order, fresh enough, and have not started again too often."""
    options = house.config.rollout.partial_rollout
    rule = house.loop.rule
    carried = buffered(house)
    trained = [(step, s) for step, groups in house.groups.items() for group in groups for s in group.samples]
    for step, sample in trained:
        assert len(sample) == house.workload.length(sample.key)
        assert np.all(np.diff(sample.versions) >= 0)
        assert sample.versions.max(initial=0) < step
        assert sample.reward == house.workload.reward(sample.key) or "error" in sample.reward_info
        if (cap := most_stale(house.config)) is not None:
            assert step - 1 - sample.versions.min(initial=step) <= cap
    if options.enable:
        most = options.max_restarts if options.max_staleness >= 0 else 0
        restarts = [sample.key.attempt for sample in (*carried, *(sample for _, sample in trained))]
        assert max(restarts) <= most
        seen = sum(restarts)
        counted = sum(of_steps(house, "restarted_samples"))
        assert seen <= counted if house.config.algorithm.filter_groups.enable else seen == counted
        assert len({(entry.key, entry.first_step) for entry in rule.queue}) == len(rule.queue)


def buffered(house: House) -> list[Any]:
    """Samples that a rule carries at the end."""
    state = house.loop.rule.state()
    return unpack_samples(state["queue"]["samples"])
