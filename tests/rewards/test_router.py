"""The router over fake pools: who scores what, what becomes of several verdicts on one sample, and what is counted."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.config.domains import domains
from jaxrl.config.rewards import Place
from jaxrl.rewards.reward_metrics import timeouts_of
from jaxrl.rewards.router import RewardRouter
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

DOMAINS = {"judged": {"kind": "judge", "weight": 0.5}, "model": {"kind": "judge"}, "math": {"kind": "math"}}


class FakePool:
    """A pool whose verdicts a test gives."""

    def __init__(self) -> None:
        self.asked: list[SampleKey] = []
        self.verdicts: list[Verdict] = []
        self.pending = 0
        self.is_closed = False

    def warm(self) -> None: ...

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        self.asked.append(sample.key)
        self.pending += 1

    def cancel(self, keys: Collection[SampleKey]) -> None:
        self.pending -= len(keys)

    def say(self, index: int, reward: float = 1.0, status: Any = "ok", seconds: float = 0.5, **info: Any) -> None:
        self.verdicts.append(Verdict(3.0, SampleKey(0, index, 0), reward, status, info, seconds))

    def completed(self) -> list[Verdict]:
        found, self.verdicts = self.verdicts, []
        self.pending -= len(found)
        return found

    def wait(self, timeout_s: float | None = None) -> list[Verdict]:
        return self.completed()

    @property
    def num_pending(self) -> int:
        return self.pending

    def take_metrics(self) -> dict[str, float]:
        return {"reward/num_scored": 99.0, "reward/retries": 1.0, "reward/seconds": 2.0}

    def close(self) -> None:
        self.is_closed = True


def make(parts: bool = False, **reward: Any) -> tuple[RewardRouter, FakePool, FakePool]:
    judge = {"endpoint": "http://localhost:1/v1", "endpoint_model": "m"}
    options = {"domains": DOMAINS, "judge": judge, "parts": {"tags": {"pattern": "x"}} if parts else {}, **reward}
    config = from_mapping({"model": {"path": "x"}, "reward": options}).reward
    workers, endpoint = FakePool(), FakePool()
    router = RewardRouter(domains(config), workers, parts=config.parts, max_retries=config.max_retries)
    router.join("endpoint", endpoint)
    return router, workers, endpoint


def submit(router: RewardRouter, *sources: str) -> None:
    for index, source in enumerate(sources):
        router.submit(Prompt(0, index, (1,), "?", source), Sample.empty(SampleKey(0, index, 0)))


def indices(keys: list[SampleKey]) -> list[int]:
    return [key.prompt_index for key in keys]


def test_each_domain_is_scored_in_its_place():
    router, workers, endpoint = make()
    submit(router, "math", "judged", "unknown", "model")
    assert (indices(workers.asked), indices(endpoint.asked)) == ([0, 2], [1, 3])
    assert router.places == {"workers", "endpoint"}
    workers.say(2, 0.25)
    endpoint.say(1, 0.5, why="well")
    endpoint.say(3, 0.5)
    found = {verdict.key.prompt_index: verdict for verdict in router.completed()}
    assert {index: verdict.reward for index, verdict in found.items()} == {2: 0.25, 1: 0.25, 3: 0.5}
    assert found[1].info == {"acc": 0.5, "why": "well", "own_reward": 0.5}, "weighted here"
    assert found[1].unshaped.reward == 0.5
    assert found[3].info == {}
    assert router.num_pending == 1


def test_a_pool_that_has_not_joined_is_no_one():
    router, *_ = make(judge={"model": "a/folder"})
    with pytest.raises(AssertionError, match=r"nothing scores what reward\.domains\.judged\.kind=judge asks for"):
        submit(router, "judged")


@pytest.mark.parametrize("first", ["workers", "endpoint"])
def test_parts_of_what_an_endpoint_scores(first: Place):
    router, workers, endpoint = make(parts=True)
    submit(router, "judged")
    assert indices(workers.asked) == indices(endpoint.asked) == [0]
    say = {"workers": lambda: workers.say(0, 0.1, parts={"tags": 1.0}), "endpoint": lambda: endpoint.say(0, 1.0)}
    say.pop(first)()
    assert router.completed() == []
    assert router.num_pending == 1
    next(iter(say.values()))()
    (verdict,) = router.completed()
    assert verdict.reward == 0.6
    assert verdict.info == {"acc": 1.0, "own_reward": 1.0, "parts": {"tags": 1.0}}


@pytest.mark.parametrize("failed", ["workers", "endpoint"])
def test_half_a_verdict_is_none(failed: str):
    router, workers, endpoint = make(parts=True)
    submit(router, "judged")
    for place, pool in {"workers": workers, "endpoint": endpoint}.items():
        if place == failed:
            pool.say(0, 0.0, "timeout", error="late")
        else:
            pool.say(0, 1.0)
    (verdict,) = router.completed()
    assert (verdict.status, verdict.reward, verdict.info["error"]) == ("timeout", 0.0, "late")
    assert timeouts_of(verdict) == {"sample": 1}


def test_the_limits_that_ended_both_halves():
    router, workers, endpoint = make(parts=True)
    submit(router, "judged", "judged")
    endpoint.say(0, 1.0, timeouts={"endpoint": 2})
    workers.say(0, 0.0, "timeout", error="late")
    endpoint.say(1, 1.0, timeouts={"endpoint": 1})
    workers.say(1, 0.5)
    first, second = router.completed()
    assert (first.status, timeouts_of(first)) == ("timeout", {"endpoint": 2, "sample": 1})
    assert (second.status, timeouts_of(second)) == ("ok", {"endpoint": 1})


def test_what_an_endpoint_says_is_from_outside():
    router, workers, endpoint = make(parts=True)
    submit(router, "judged")
    workers.say(0, 0.0, parts={"tags": 0.0})
    endpoint.verdicts.append(replace(Verdict(5.0, SampleKey(0, 0, 0), 1.0), outside=True))
    (verdict,) = router.completed()
    assert (verdict.outside, verdict.time_s) == (True, 5.0)


def test_a_fault_of_the_infrastructure_is_asked_again():
    router, workers, endpoint = make(max_retries=2)
    submit(router, "judged", "math", "judged")
    endpoint.say(0, 0.0, "crash", error="unreachable")
    endpoint.say(2, 0.0, "error", error="nonsense")
    workers.say(1, 0.0, "crash", error="died twice")
    assert [(v.key.prompt_index, v.status) for v in router.completed()] == [(1, "crash"), (2, "error")]
    assert indices(endpoint.asked) == [0, 2, 0]
    endpoint.say(0, 0.0, "crash")
    assert router.completed() == []
    endpoint.say(0, 0.0, "crash", error="unreachable")
    assert [verdict.status for verdict in router.completed()] == ["crash"], "two retries, and no more"
    metrics = router.take_metrics()
    assert metrics["reward/retries"] == 2 + 1 + 1, "its own, and those that the pools have counted"
    assert router.take_metrics()["reward/retries"] == 2


def test_cancelled_samples():
    router, workers, endpoint = make(parts=True)
    submit(router, "judged", "math")
    router.cancel({SampleKey(0, 0, 0)})
    endpoint.say(0)
    workers.say(0)
    workers.say(1)
    assert indices([verdict.key for verdict in router.wait(1.0)]) == [1]
    assert router.num_pending == 0


def test_what_the_pools_count_is_added_up_and_closing_closes_all():
    router, workers, endpoint = make()
    assert router.take_metrics() == {"reward/num_scored": 198.0, "reward/retries": 2.0, "reward/seconds": 4.0}
    router.close()
    assert (workers.is_closed, endpoint.is_closed) == (True, True)
