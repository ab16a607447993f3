"""Several workers over executors that check every plan (`checking.py`), and requests to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checking import CheckingExecutor, make_engine, make_request

from jaxrl.scheduling.tokens.engine import Engine, Finished
from jaxrl.scheduling.tokens.local_workers import Deal, LocalWorkers
from jaxrl.scheduling.tokens.plan import Request


def build(
    requests: Sequence[Request], lengths: Sequence[int], num_workers: int = 2, deal: Deal = "tokens", **more: Any
) -> tuple[LocalWorkers, list[CheckingExecutor]]:
    of = {request.key: length for request, length in zip(requests, lengths, strict=True)}
    pairs = [make_engine(of, **more) for _ in range(num_workers)]
    return LocalWorkers([engine for engine, _ in pairs], deal), [executor for _, executor in pairs]


def asked(count: int, num_prompt: int = 3) -> list[Request]:
    """Requests of prompts of their own, which may have 60 tokens."""
    return [make_request(i, num_prompt, max_tokens=60, prompt=i) for i in range(count)]


def started(
    requests: Sequence[Request], lengths: Sequence[int], steps: int = 0, num_workers: int = 2, **more: Any
) -> LocalWorkers:
    workers, _ = build(requests, lengths, num_workers, **more)
    for request in requests:
        workers.add(request)
    for _ in range(steps):
        workers.step()
    return workers


def run(workers: LocalWorkers | Engine) -> list[Finished]:
    delivered: list[Finished] = []
    while not workers.is_idle:
        delivered += workers.step()
    return delivered


def by_worker(workers: LocalWorkers) -> list[tuple[int, ...]]:
    return [engine.unfinished() for engine in workers.engines]


def requests_of(drawn: Sequence[tuple[int, int, int]]) -> tuple[list[Request], list[int]]:
    """Requests of four prompts with prompts of their own lengths, and how long each response is."""
    requests = [
        make_request(i, num_prompt=4 + 3 * prompt, max_tokens=most, prompt=prompt, sample=i, share=True)
        for i, (most, prompt, _) in enumerate(drawn)
    ]
    return requests, [length for _, _, length in drawn]


SMALL = {"num_blocks": 20, "num_slots": 3, "max_prefill_tokens": 16, "num_groups": 2}
