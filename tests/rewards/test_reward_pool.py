"""The pool over fake places: who scores what, what becomes of several results on one sample, and what is counted."""

import itertools
from concurrent.futures import Future
from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.config.domains import domains
from jaxrl.config.rewards import Place
from jaxrl.rewards.reward_metrics import timeouts_of
from jaxrl.rewards.reward_pool import RewardPool
from jaxrl.rewards.scorers import Scored
from jaxrl.types import Prompt, Sample, SampleKey

DOMAINS = {"judged": {"kind": "judge", "weight": 0.5}, "model": {"kind": "judge"}, "math": {"kind": "math"}}


class FakePlace:
    """A place whose results a test gives."""

    def __init__(self) -> None:
        self.asked: list[SampleKey] = []
        self.futures: dict[SampleKey, Future[Scored]] = {}
        self.is_closed = False

    def warm(self) -> None: ...

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> Future[Scored]:
        self.asked.append(sample.key)
        future = self.futures[sample.key] = Future[Scored]()
        return future

    def step(self) -> bool:
        return False

    def say(self, index: int, reward: float = 1.0, status: Any = "ok", seconds: float = 0.5, **info: Any) -> None:
        future = self.futures[SampleKey(0, index, 0)]
        if future.set_running_or_notify_cancel():
            future.set_result((status, reward, info, seconds))

    def take_metrics(self) -> dict[str, float]:
        return {"reward/retries": 1.0, "reward/judge/turns": 2.0}

    def close(self) -> None:
        self.is_closed = True


def make(parts: bool = False, **reward: Any) -> tuple[RewardPool, FakePlace, FakePlace]:
    judge = {"endpoint": "http://localhost:1/v1", "endpoint_model": "m"}
    options = {"domains": DOMAINS, "judge": judge, "parts": {"tags": {"pattern": "x"}} if parts else {}, **reward}
    config = from_mapping({"model": {"path": "x"}, "reward": options}).reward
    workers, endpoint = FakePlace(), FakePlace()
    clock = itertools.count(3).__next__
    pool = RewardPool(domains(config), parts={name: part.weight for name, part in config.parts.items()}, clock=clock)
    pool.join("workers", workers)
    pool.join("endpoint", endpoint)
    return pool, workers, endpoint


def submit(pool: RewardPool, *sources: str) -> None:
    for index, source in enumerate(sources):
        pool.submit(Prompt(0, index, (1,), "?", source), Sample.empty(SampleKey(0, index, 0)))


def indices(keys: list[SampleKey]) -> list[int]:
    return [key.prompt_index for key in keys]


def test_each_domain_is_scored_in_its_place():
    pool, workers, endpoint = make()
    submit(pool, "math", "judged", "unknown", "model")
    assert (indices(workers.asked), indices(endpoint.asked)) == ([0, 2], [1, 3])
    assert pool.places == {"workers", "endpoint"}
    workers.say(2, 0.25)
    endpoint.say(1, 0.5, why="well")
    endpoint.say(3, 0.5)
    found = {verdict.key.prompt_index: verdict for verdict in pool.completed()}
    assert {index: verdict.reward for index, verdict in found.items()} == {2: 0.25, 1: 0.25, 3: 0.5}
    assert found[1].info == {"acc": 0.5, "why": "well", "own_reward": 0.5}, "weighted here"
    assert found[1].unshaped.reward == 0.5
    assert found[3].info == {}
    assert pool.num_pending == 1


@pytest.mark.parametrize("first", ["workers", "endpoint"])
def test_parts_of_what_an_endpoint_scores(first: Place):
    pool, workers, endpoint = make(parts=True)
    submit(pool, "judged")
    assert indices(workers.asked) == indices(endpoint.asked) == [0]
    say = {
        "workers": lambda: workers.say(0, 0.0, parts={"tags": 0.1}),
        "endpoint": lambda: endpoint.say(0, 1.0, outside=True),
    }
    say.pop(first)()
    assert pool.completed() == []
    assert pool.num_pending == 1
    next(iter(say.values()))()
    (verdict,) = pool.completed()
    assert verdict.reward == 0.6
    assert (verdict.outside, verdict.time_s) == (True, 4.0), "the later one"
    assert verdict.info.items() >= {"acc": 1.0, "own_reward": 1.0, "parts": {"tags": 0.1}}.items()


@pytest.mark.parametrize("parts", ["garbage", {}, {"tags": "x"}, {"tags": 3e38}])
def test_parts_that_are_none(parts: Any):
    """Foreign code has sent them."""
    pool, workers, _ = make(parts=True)
    submit(pool, "math")
    workers.say(0, 3e38, parts=parts)
    assert [(verdict.status, verdict.reward) for verdict in pool.completed()] == [("error", 0.0)]


def test_half_a_verdict_is_none():
    pool, workers, endpoint = make(parts=True)
    submit(pool, "judged", "judged")
    endpoint.say(0, 1.0, timeouts={"endpoint": 2})
    workers.say(0, 0.0, "timeout", error="late")
    workers.say(1, 1.0)
    endpoint.say(1, 0.0, "timeout", error="late")
    first, second = pool.completed()
    for verdict, limits in ((first, {"endpoint": 2, "sample": 1}), (second, {"sample": 1})):
        assert (verdict.status, verdict.reward, verdict.info["error"]) == ("timeout", 0.0, "late")
        assert timeouts_of(verdict) == limits
