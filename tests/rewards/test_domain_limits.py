"""Limits of domains: who is next, and that a slow domain leaves workers to the others."""

from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.config.domains import domains
from jaxrl.rewards.domain_limits import DomainLimit, DomainLimits, FairQueue


def limits(**most: int) -> DomainLimits:
    return DomainLimits({"": DomainLimit(0, 1.0)} | {name: DomainLimit(count, 1.0) for name, count in most.items()})


def configured(**reward: Any) -> DomainLimits:
    return DomainLimits.of(domains(from_mapping({"model": {"path": "x"}, "reward": reward}).reward))


def filled(num_workers: int, most: dict[str, int], waiting: dict[str, int]) -> FairQueue[str]:
    queue = FairQueue[str](limits(**most), num_workers)
    for domain, count in waiting.items():
        for i in range(count):
            queue.put(domain, f"{domain}{i}")
    return queue


def popped(queue: FairQueue[str], count: int) -> list[str | None]:
    return [queue.pop() for _ in range(count)]


@pytest.mark.parametrize(
    ("num_workers", "most", "waiting", "order"),
    [
        (2, {}, {"": 4}, ["0", "1"]),  # one domain: the order of arrival, on all workers
        (3, {"a": 0, "b": 0}, {"a": 3, "b": 3}, ["a0", "b0", "a1"]),  # in turns
        (4, {"a": 0, "b": 0}, {"a": 9, "b": 1}, ["a0", "b0", "a1", "a2"]),  # a may have all but one
        (4, {"a": 0, "b": 0, "c": 0}, {"a": 9, "b": 0, "c": 0}, ["a0", "a1", "a2", "a3"]),  # b and c are not in use
        (4, {"a": 1, "b": 0}, {"a": 9, "b": 9}, ["a0", "b0", "b1", "b2"]),  # a limit of its own
    ],
)
def test_who_is_next(num_workers: int, most: dict[str, int], waiting: dict[str, int], order: list[str]):
    assert popped(filled(num_workers, most, waiting), num_workers) == order


def test_the_domain_with_the_least_at_work_is_next():
    queue = filled(5, {"a": 0, "b": 0, "c": 0}, {"a": 9, "b": 9, "c": 9})
    assert popped(queue, 5) == ["a0", "b0", "c0", "a1", "b1"]
    queue.done("a")
    queue.done("a")
    assert queue.pop() == "a2"


def test_limits_of_a_configuration():
    own = {"gsm8k": {"max_concurrent": 2}, "prime": {"timeout_s": 0}}
    found = configured(timeout_s=3.0, math_timeout_s=0, domains=own)
    assert found.by_source == {
        "": DomainLimit(0, 3.0, "reward.timeout_s"),
        "gsm8k": DomainLimit(2, 3.0, "reward.timeout_s"),
        "prime": DomainLimit(0, 0.0, "reward.domains.prime.timeout_s"),
    }
    assert [found.domain(source) for source in ("gsm8k", "other")] == ["gsm8k", ""]


def test_math_has_a_limit_of_its_own():
    """Two seconds, unless the limit of all is shorter, or a domain has its own."""

    def limit(source: str, **reward: Any) -> tuple[float, str]:
        found = configured(**reward).by_source[source]
        return found.timeout_s, found.option

    assert limit("") == limit("", kind="math") == limit("", timeout_s=0) == (2.0, "reward.math_timeout_s")
    assert limit("", timeout_s=1.0) == (1.0, "reward.timeout_s")
    assert limit("", math_timeout_s=0) == (10.0, "reward.timeout_s")
    assert limit("", kind="custom", path="a.py") == (10.0, "reward.timeout_s")
    domain = {"gsm8k": {"kind": "math"}, "own": {"kind": "math", "timeout_s": 5.0}}
    assert limit("gsm8k", domains=domain, kind="custom", path="a.py") == (2.0, "reward.math_timeout_s")
    assert limit("own", domains=domain) == (5.0, "reward.domains.own.timeout_s")
