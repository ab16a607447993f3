"""Samples of a prompt over several turns: nothing is run twice, and every token is what it would be without a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from checked_blocks import check_blocks

from jaxrl.scheduling.tokens.plan import Request, resume
from jaxrl.text import TextEngine
from jaxrl.types import ENVIRONMENT, Sample, SampleKey, SamplingParams

NUM_SAMPLES, NUM_TURNS, TURN, ANSWER = 4, 3, 7, 3
PROMPT = tuple(range(40, 61))


def first(sample: int, *, cached: bool) -> Request:
    params = SamplingParams(max_tokens=TURN)
    share, session = ("p", sample) if cached else (None, None)
    return Request(sample, SampleKey(0, 5, sample), PROMPT, params, share, session=session)


def answered(request: Request, sample: Sample, turn: int) -> Request:
    """The next turn's, behind three tokens of an environment."""
    answer = np.arange(100 + 10 * turn, 100 + 10 * turn + ANSWER, dtype=np.int32)
    longer = replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, answer]),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs, np.zeros(ANSWER, np.float32)]),
        sampled_logprobs=np.concatenate([sample.sampled_logprobs, np.zeros(ANSWER, np.float32)]),
        versions=np.concatenate([sample.versions, np.full(ANSWER, ENVIRONMENT, np.int32)]),
    )
    params = replace(request.params, max_tokens=request.params.max_tokens + TURN + ANSWER)
    return replace(resume(request, longer), request_id=request.request_id + 10, params=params)


def test_nothing_is_run_twice_and_no_token_changes(x64: None, tiny_model: Path):
    found: dict[bool, dict[SampleKey, Sample]] = {}
    for cached in (True, False):
        text = TextEngine.from_path(f"random:{tiny_model}", dtype="float64", max_length=64, num_slots=4, block_size=4)
        engine, requests = text.engine, [first(i, cached=cached) for i in range(NUM_SAMPLES)]
        for turn in range(NUM_TURNS):
            for request in requests:
                engine.add(request)
            ended = {}
            while not engine.is_idle:
                ended |= {one.request_id: one.sample for one in engine.step()}
            check_blocks(engine.batcher.blocks)
            found[cached] = {sample.key: sample for sample in ended.values()}
            requests = [answered(request, ended[request.request_id], turn) for request in requests]
        run, turns = engine.counters.prefill_tokens, NUM_TURNS - 1
        if cached:
            shared = len(PROMPT) // 4 * 4
            newest = 1  # drawn last, and run with the answer
            assert run == len(PROMPT) + 3 * (len(PROMPT) - shared) + turns * NUM_SAMPLES * (newest + ANSWER)
        else:
            assert run > 2 * NUM_TURNS * len(PROMPT)
    assert found[True].keys() == found[False].keys()
    for key, sample in found[True].items():
        assert (len(sample), sample.num_drawn) == (NUM_TURNS * TURN + 2 * ANSWER, NUM_TURNS * TURN)
        assert np.array_equal(sample.token_ids, found[False][key].token_ids)
        np.testing.assert_allclose(sample.rollout_logprobs, found[False][key].rollout_logprobs, atol=1e-6)
        assert not sample.rollout_logprobs[~sample.drawn].any()
