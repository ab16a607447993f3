"""Rollouts of models with sliding windows, whose blocks behind the windows are freed: the tokens of whole passes.

`HYBRID` is a drawn Gemma 3, of which one layer sees everything and three have a window; `UNIFORM` a drawn Mistral,
whose layers all have one. `test_switch.py` moves their blocks between layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from checked_blocks import check_blocks
from recorder import Recorder
from small_models import VOCABULARY, engine_over, ready, requests
from whole_pass import check

from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Sample, SampleKey, SamplingParams

from .test_families import FORMS, LENGTH, SIZES

HYBRID, UNIFORM = "gemma3_text:4", "mistral:5"


def engine_of(name: str, form: str = "on CPU", **sizes: Any) -> tuple[Engine, Recorder]:
    more = FORMS[form] | {"block_size": 4, "max_prefill_tokens": 12, "decode_steps": 2} | sizes
    whole = replace(SIZES, **more)
    executor = Recorder(ready(name, Layout(make_mesh(jax.devices()[:1]), 1), whole))
    return engine_over(executor), executor


def fewest_blocks(engine: Engine) -> int:
    """Of one request of the longest length, and the reserved one."""
    return engine.batcher.blocks.most_blocks(LENGTH) + 1


@pytest.mark.parametrize(("name", "form"), [(HYBRID, "on CPU"), pytest.param(UNIFORM, "paged", marks=pytest.mark.slow)])
def test_what_is_behind_a_window_is_freed_and_no_token_changes(x64: None, name: str, form: str):
    """Samples that share prompts, in a pool with room for everything, and in one in which rows are preempted."""
    asked = requests(4, 3, 40)
    engine, executor = engine_of(name, form)
    for num_blocks in (0, fewest_blocks(engine) + 4):
        if num_blocks:
            engine, executor = engine_of(name, form, num_blocks=num_blocks)
        for request in asked:
            engine.add(request)
        samples: dict[int, Sample] = {}
        most = 0
        while not engine.is_idle:
            samples |= {one.request_id: one.sample for one in engine.step()}
            blocks = engine.batcher.blocks
            check_blocks(blocks)
            for progress in engine.batcher.running():
                held = np.count_nonzero(blocks.table(progress.request.request_id))
                most = max(most, progress.num_written * len(executor.sizes.stacks) // 4 - held)
                assert held <= blocks.most_blocks(LENGTH)
        assert most > 2 * len(executor.sizes.stacks), "rows hold some stretches less than they have"
        assert (engine.counters.preemptions > 0) == bool(num_blocks)
        assert engine.counters.shared_tokens > 0
        check(name, asked, [samples[request.request_id] for request in asked], executor)


def test_a_conversation_goes_on_where_its_window_is_left(x64: None):
    """A turn finds the KV of all tokens before it; one that takes back more than is kept runs its tokens again."""
    name, prompt = HYBRID, tuple(np.random.default_rng(3).integers(1, VOCABULARY, 9).tolist())
    engine, executor = engine_of(name)
    tokens, ran = prompt, []
    for turn, dropped in enumerate((0, 0, 1, 24)):
        tokens = (*tokens[: len(tokens) - dropped], 40 + turn)
        request = Request(turn, SampleKey(0, 0, 0), tokens, SamplingParams(max_tokens=13), session="talk")
        before = engine.counters.prefill_tokens
        (sample,) = engine.generate([request])
        ran.append(engine.counters.prefill_tokens - before)
        check(name, [request], [sample], executor)
        tokens = (*tokens, *sample.token_ids.tolist())
        check_blocks(engine.batcher.blocks)
    assert ran[:3] == [10, 2, 1], "what is new: the token drawn last, if it is kept, and the one behind it"
    assert ran[3] == len(prompt) + 3 * 14 - 1 - 24 + 1, "the window of its first new token is gone"
