"""Whatever happens to the requests of several workers, each ends once and whole, and the same again on a second run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from checked_blocks import check_blocks
from checked_workers import SMALL, build, requests_of, run
from checking import assert_empty, assert_whole
from hypothesis import example, given
from hypothesis import strategies as st
from plan_rows import contents

from jaxrl.scheduling.layouts.relayout import How
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine, Finished
from jaxrl.scheduling.tokens.local_workers import Deal, LocalWorkers
from jaxrl.scheduling.tokens.plan import Request, resume
from jaxrl.types import Sample

Act = tuple[Literal["step", "add", "abort", "again", "move", "close", "open", "drain"], int]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["step"] * 6 + ["add", "add", "abort", "again", "move", "move", "close", "open", "drain"]),
        st.integers(0, 10**6),
    ),
    min_size=10,
    max_size=60,
)


@dataclass
class Run:
    """What became of the requests: those that were delivered, in order, and those that were aborted for good."""

    delivered: list[Finished]
    aborted: dict[int, Sample]
    requests: dict[int, Request]


def play(workers: LocalWorkers | Engine, requests: Sequence[Request], acts: Sequence[Act]) -> Run:
    """Adds requests and does what `acts` says; every number picks something by its remainder."""
    done, waiting, ids = Run([], {}, {}), list(requests[len(requests) // 2 :]), len(requests)
    for request in requests[: len(requests) // 2]:
        workers.add(request)
        done.requests[request.request_id] = request
    for name, number in acts:
        chance = random.Random(number)
        live = workers.unfinished()
        some = chance.sample(live, chance.randint(0, len(live)))
        match name:
            case "step":
                for _ in range(1 + number % 3):
                    done.delivered += workers.step()
            case "add":
                for request in waiting[:3]:
                    workers.add(request)
                    done.requests[request.request_id] = request
                del waiting[:3]
            case "abort":
                done.aborted |= dict(zip(some[:2], workers.abort(some[:2]), strict=True))
            case "again":  # aborted with its tokens, and added again with them
                done.delivered += workers.drain()
                some = [i for i in some if i in workers.unfinished()]
                for i, sample in zip(some, workers.abort(some), strict=True):
                    again = resume(done.requests.pop(i), sample)
                    done.requests[ids] = again = replace(again, request_id=ids)
                    workers.add(again)
                    ids += 1
            case "drain":
                done.delivered += workers.drain()
            case _ if isinstance(workers, LocalWorkers) and len(workers.engines) > 1:
                _rearrange(workers, name, number, some)
    for request in waiting:
        workers.add(request)
        done.requests[request.request_id] = request
    done.delivered += run(workers)
    return done


def _rearrange(workers: LocalWorkers, name: str, number: int, some: Sequence[int]) -> None:
    by: How = ("migrate", "recompute")[number % 2]
    states = {state: [i for i in range(len(workers.engines)) if workers.is_open(i) == state] for state in (True, False)}
    if name == "move":
        workers.move(some, states[True][number % len(states[True])], by)
    elif name == "close" and workers.num_open > 1:
        closed = states[True][number % len(states[True])]
        workers.close(closed, by)
        assert workers.engines[closed].is_idle
    elif name == "open" and states[False]:
        workers.open(states[False][number % len(states[False])])
    for engine in workers.engines:
        check_blocks(engine.batcher.blocks)
    live = [i for engine in workers.engines for i in engine.unfinished()]
    assert sorted(live) == sorted(workers.unfinished()), "each on exactly one worker"


WINDOWS = {(0,): 0, (7,): 0, (0, 6): 18, (0, 5, 5): 34}  # with the blocks that the longest request needs beside SMALL's
SIZES = st.fixed_dictionaries(
    {
        "num_groups": st.integers(1, 3),
        "num_slots": st.integers(1, 4),
        "max_prefill_tokens": st.sampled_from([1, 5, 16]),
        "num_blocks": st.sampled_from([20, 20, 32]),
        "config": st.builds(BatcherConfig, decode_steps=st.integers(1, 6)),
    }
)
REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(1, 45)), min_size=2, max_size=12)


@given(REQUESTS, ACTS, st.integers(1, 4), st.sampled_from(["tokens", "prompts"]), st.sampled_from(list(WINDOWS)), SIZES)
@example(  # a request that has been in two workers comes to a third one together with others from the first
    [(14, 0, 14), (1, 1, 1), (10, 2, 10), (1, 0, 1), (1, 0, 1), (1, 2, 1)],
    [*[("step", 0)] * 7, ("add", 0), *[("step", 0)] * 2, ("move", 865), ("step", 0), ("again", 1), ("move", 0)],
    3,
    "prompts",
    (0,),
    SMALL,
)
def test_every_request_ends_once_and_whole_whatever_happens(
    drawn: list[tuple[int, int, int]],
    acts: list[Act],
    num_workers: int,
    deal: Deal,
    windows: tuple[int, ...],
    sizes: dict[str, Any],
):
    requests, lengths = requests_of(drawn)
    sizes = sizes | {"windows": windows, "num_blocks": sizes["num_blocks"] + WINDOWS[windows]}
    workers, executors = build(requests, lengths, num_workers, deal, **sizes)
    done = play(workers, requests, acts)
    ended = [one.request_id for one in done.delivered] + list(done.aborted)
    assert sorted(ended) == sorted(done.requests), "each ends once"
    by_key = dict(zip((request.key for request in requests), lengths, strict=True))
    for one in done.delivered:
        request = done.requests[one.request_id]
        assert_whole(one.sample, request, by_key[request.key])
    for sample in done.aborted.values():
        assert sample.finish_reason == "abort"
    for engine in workers.engines:
        assert_empty(engine)
    # the same once more, on executors that answer the same and measure other times: same plans, same order
    again, others = build(requests, lengths, num_workers, deal, **sizes)
    for factor, executor in enumerate(others):
        executor.inner.cost = lambda plan, steps, by=factor: by + plan.index % 3 + steps
    repeated = play(again, requests, acts)
    for other, executor in zip(others, executors, strict=True):
        assert list(map(contents, other.plans)) == list(map(contents, executor.plans))
    assert [(one.request_id, one.dispatch) for one in repeated.delivered] == [
        (one.request_id, one.dispatch) for one in done.delivered
    ]
