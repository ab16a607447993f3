"""Limits of domains: who is next, and that a slow domain leaves workers to the others."""

from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.config.domains import domains
from jaxrl.rewards.pool_host import FairQueue, Task


def filled(num_workers: int, waiting: dict[str, int]) -> FairQueue:
    queue = FairQueue(num_workers)
    for domain, count in waiting.items():
        for i in range(count):
            queue.put(Task(i, domain, 0.0, "", b""))
    return queue


def popped(queue: FairQueue, count: int) -> list[str]:
    return [f"{task.domain}{task.number}" for _ in range(count) if (task := queue.pop()) is not None]


@pytest.mark.parametrize(
    ("num_workers", "waiting", "order"),
    [
        (2, {"": 4}, ["0", "1"]),  # one domain: the order of arrival, on all workers
        (3, {"a": 3, "b": 3}, ["a0", "b0", "a1"]),  # in turns
        (4, {"a": 9, "b": 1}, ["a0", "b0", "a1", "a2"]),  # a may have all but one
        (4, {"a": 9, "b": 0, "c": 0}, ["a0", "a1", "a2", "a3"]),  # b and c are not in use
    ],
)
def test_who_is_next(num_workers: int, waiting: dict[str, int], order: list[str]):
    assert popped(filled(num_workers, waiting), num_workers) == order


def test_the_domain_with_the_least_at_work_is_next():
    queue = filled(5, {"a": 9, "b": 9, "c": 9})
    assert popped(queue, 5) == ["a0", "b0", "c0", "a1", "b1"]
    queue.done("a")
    queue.done("a")
    assert popped(queue, 1) == ["a2"]


def test_math_has_a_limit_of_its_own():
    """Two seconds, unless the limit of all is shorter, or a domain has its own."""

    def limit(source: str, **reward: Any) -> tuple[float, str]:
        found = domains(from_mapping({"model": {"path": "x"}, "reward": reward}).reward)[source]
        return found.timeout_s, found.timeout_option

    assert limit("") == limit("", kind="math") == limit("", timeout_s=0) == (2.0, "reward.math_timeout_s")
    assert limit("", timeout_s=1.0) == (1.0, "reward.timeout_s")
    assert limit("", math_timeout_s=0) == (10.0, "reward.timeout_s")
    assert limit("", kind="custom", path="a.py") == (10.0, "reward.timeout_s")
    domain = {"gsm8k": {"kind": "math"}, "own": {"kind": "math", "timeout_s": 5.0}}
    assert limit("gsm8k", domains=domain, kind="custom", path="a.py") == (2.0, "reward.math_timeout_s")
    assert limit("prime", domains={"prime": {"timeout_s": 0}}) == (0.0, "reward.domains.prime.timeout_s")
    assert limit("own", domains=domain) == (5.0, "reward.domains.own.timeout_s")
