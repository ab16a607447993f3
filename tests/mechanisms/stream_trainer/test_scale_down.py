"""When workers are freed: each boundary and each refusal, and what holds for any round."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.mechanisms.stream_trainer.scale_down import (
    MAX_POINTS,
    LeftRequest,
    ScaleDown,
    ScaleDownDecision,
    WorkerLoad,
    halves,
    projected_kv,
)
from jaxrl.scheduling.tokens.lengths import LengthHistory
from jaxrl.scheduling.tokens.stacks import KvStacks

ROOMY = 1 << 30


def load(*contexts: int, kv_tokens: int = ROOMY, num_rows: int = 64, limit: int = 100) -> WorkerLoad:
    """A worker with requests of ten prompt tokens and so many tokens in all."""
    requests = tuple(LeftRequest(10, tokens - 10, limit) for tokens in contexts)
    return WorkerLoad(requests, kv_tokens, num_rows)


def none_fits() -> list[WorkerLoad]:
    return [load(20, kv_tokens=0)] * 2


def opened(options: StreamTrainer.Options | None = None, workers: int = 2, lengths: dict[str, list[int]] | None = None):
    """A rule in a plain round, with earlier lengths by kind."""
    rule = ScaleDown(options or StreamTrainer.Options(), halves(workers))
    for kind, known in (lengths or {}).items():
        rule.begin(kind)
        for length in known:
            rule.finished(length)
        rule.end()
    rule.begin()
    return rule


@pytest.mark.parametrize(
    ("num_all", "options", "expected"),
    [
        (20, {}, [4, 5, 6, 7, 8, 9, 10]),  # 4/20 and 10/20 are exactly the bounds, 1/20 is exactly a step
        (1024, {}, [205, 257, 309, 361, 413, 465]),  # 0.2 x 1024 = 204.8 and 0.05 x 1024 = 51.2, both rounded up
        (5, {}, [1, 2]),
        (1, {}, []),
        (100, {"min_done": 0.3, "max_done": 0.3}, [30]),
        (100, {"min_done": 0.01, "max_done": 0.1}, [5, 10]),
    ],
)
def test_milestones(num_all: int, options: dict[str, Any], expected: list[int]):
    rule = opened(StreamTrainer.Options(**options))
    looks = [done for done in range(1, num_all + 1) if rule.after_finish(done, num_all, none_fits) is not None]
    assert looks == expected


TWENTY = {"num_done": 20, "num_all": 100}


@pytest.mark.parametrize(
    ("workers", "loads", "options", "expected"),
    [
        # fewer tokens to move; equal ones: the first
        (2, [load(20, 30), load(45)], {}, {"freed": (1,), "moved_requests": 1, "moved_tokens": 45}),
        (2, [load(45), load(20, 30)], {}, {"freed": (0,), "moved_requests": 1, "moved_tokens": 45}),
        (2, [load(), load(20)], {}, {"freed": (0,), "moved_requests": 0, "moved_tokens": 0}),
        # halves of the mesh only: 1 and 2 have fewest, but are no half
        (4, [load(99), load(20), load(20), load(98)], {}, {"freed": (2, 3), "moved_requests": 2, "moved_tokens": 118}),
        # no whole half
        # rows: three requests are left, and each worker has two rows, or three
        (2, [load(20, num_rows=2), load(20, 20, num_rows=2)], {}, {"refusal": "rows", "num_left": 3, "num_rows": 2}),
        (2, [load(20, num_rows=2), load(20, 20, num_rows=3)], {}, {"freed": (0,), "num_rows": 3}),
        # without earlier lengths each goes to its limit of 110 tokens; when the first is there they hold 90 + 100 + 110
        (2, [load(50), load(60, 70, kv_tokens=300)], {"kv_margin": 0.0}, {"freed": (0,), "kv_tokens": 300}),
        (2, [load(50), load(60, 70, kv_tokens=299)], {"kv_margin": 0.0}, {"refusal": "kv", "projected_tokens": 300}),
        # what counts is the pools that stay, less the margin
        (2, [load(50, kv_tokens=0), load(60, 70, kv_tokens=600)], {"kv_margin": 0.5}, {"freed": (0,)}),
        (2, [load(50), load(60, 70, kv_tokens=599)], {"kv_margin": 0.5}, {"refusal": "kv", "kv_tokens": 299}),
        # the paper's fixed baselines ask for neither
        (2, [load(50), load(60, 70, kv_tokens=0, num_rows=0)], {"trigger": "fixed"}, {"freed": (0,)}),
    ],
)
def test_which_workers_are_freed_and_why_not(
    workers: int, loads: list[WorkerLoad], options: dict[str, Any], expected: dict[str, Any]
):
    decision = opened(StreamTrainer.Options(**options), workers).after_finish(20, 100, lambda: loads)
    assert decision is not None
    found = {name: getattr(decision, name) for name in TWENTY | expected}
    assert found == TWENTY | expected
    assert bool(decision.freed) != bool(decision.refusal)
    assert ScaleDownDecision.from_json(json.loads(json.dumps(decision.to_json()))) == decision


def test_a_journalled_decision_is_followed():
    rule, loads = opened(), [load(20)] * 2
    rule.follow(ScaleDownDecision(20, 100, refusal="kv"))
    assert rule.after_finish(24, 100, lambda: loads) is None
    assert rule.after_finish(25, 100, lambda: loads) is not None
    again = opened()
    again.follow(ScaleDownDecision(20, 100, freed=(1,)))
    assert all(again.after_finish(done, 100, lambda: loads) is None for done in range(21, 101))
    with pytest.raises(ValueError, match="this version reads schema 1"):
        ScaleDownDecision.from_json({"schema": 2})


def test_lengths_count_from_the_next_round_of_their_kind_on():
    limited = StreamTrainer.Options(kv_margin=0.0)
    loads = [load(20, kv_tokens=60)] * 2  # two responses of 10 tokens; at their limits they hold 220

    def refusal(rule: ScaleDown) -> str:
        decision = rule.after_finish(20, 100, lambda: loads)
        assert decision is not None
        return decision.refusal

    assert refusal(opened(limited)) == "kv"
    assert refusal(opened(limited, lengths={"plain": [20] * 8})) == ""
    assert refusal(opened(limited, lengths={"short": [20] * 8})) == "kv"
    rule = opened(limited)
    rule.finished(20)  # of this round
    assert refusal(rule) == "kv"
    rule.cancel()  # a round that is dropped leaves nothing behind
    rule.begin()
    assert refusal(rule) == "kv"
    rule.finished(20)
    rule.end()
    kept = rule.state_dict()
    other = ScaleDown(limited, halves(2))
    other.load_state_dict(kept)
    other.begin()
    assert refusal(other) == ""
    with pytest.raises(ValueError, match="reads schema 1"):
        other.load_state_dict(kept | {"schema": 9})


def recorded(*lengths: int) -> LengthHistory:
    history = LengthHistory()
    for length in lengths:
        history.add(length)
    return history


def test_tokens_behind_a_window_are_not_projected():
    """Two stacks, of which one holds the last 8 tokens at the most: 10 and 8 now, and at the limit 104 and 8."""
    stacks = KvStacks((0, 5), ahead=4)
    assert projected_kv([LeftRequest(10, 0, 100)], recorded(), stacks) == 110 + 8
    assert projected_kv([LeftRequest(10, 3, 3)], recorded(9), stacks) == 13 + 8
    assert projected_kv([LeftRequest(2, 0, 3)] * 2, recorded(), stacks) == 2 * (5 + 5)


def exact_peak(requests: list[LeftRequest], lengths: list[int], deviations: float) -> float:
    """The largest KV, so many deviations above what is expected, looked for one step after another."""
    peak, left = 0.0, [request.max_response - request.num_response for request in requests]
    for step in range(max(left) + 1):
        held, everything, deviation = 0.0, 0.0, dict.fromkeys((request.prompt_index for request in requests), 0.0)
        for request, most in zip(requests, left, strict=True):
            if step > most:
                continue
            longer = [n for n in lengths if n > request.num_response]
            # the token of this step is written if the response has at least that many
            there = sum(n >= request.num_response + step for n in longer) / len(longer) if longer else 1.0
            tokens = request.num_tokens + step
            held, everything = held + there * tokens, everything + tokens
            deviation[request.prompt_index] += math.sqrt(there * (1 - there)) * tokens
        peak = max(peak, min(held + deviations * math.hypot(*deviation.values()), everything))
    return peak


def left_of(drawn: list[tuple[int, int, int]]) -> list[LeftRequest]:
    """Two prompts."""
    return [LeftRequest(prompt, so_far, so_far + more, i % 2) for i, (prompt, so_far, more) in enumerate(drawn)]


KNOWN = st.lists(st.integers(1, 800), max_size=12)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 400), st.integers(0, MAX_POINTS)), min_size=1, max_size=8),
    KNOWN,
)
def test_where_each_step_is_a_point_the_projection_is_exact(drawn: list[tuple[int, int, int]], lengths: list[int]):
    requests = left_of(drawn)
    exact = exact_peak(requests, lengths, 2.0)
    assert exact - 1e-6 <= projected_kv(requests, recorded(*lengths)) <= math.ceil(exact - 1e-6) + 1
