"""Rollouts of models with sliding windows, whose blocks behind the windows are freed, against the same models with
every block kept: the same tokens, and the log-probabilities of training (`test_families.py`).

`HYBRID` is a drawn Gemma 3, of which one layer sees everything and three have a window; `UNIFORM` a drawn Mistral,
whose layers all have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from checked_blocks import check_blocks
from own_process import alone
from recorder import Recorder
from replay_executor import ReplayExecutor
from small_models import VOCABULARY, engine_over, ready, requests, with_drafts
from whole_pass import check

from jaxrl.models.kv_layers import whole
from jaxrl.rollout import executor as executors
from jaxrl.rollout import layout_programs
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import Completed, TraceEvent
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Sample, SampleKey, SamplingParams

from . import test_switch
from .test_families import FORMS, LENGTH, SIZES
from .test_switch import DRAFTING

HYBRID, UNIFORM = "gemma3_text:4", "mistral:5"


@contextmanager
def every_block_kept() -> Iterator[None]:
    """Models lie in their pools as those without windows do."""
    keep = mock.Mock(side_effect=lambda model, *_: whole(model.num_layers))
    with mock.patch.object(executors, "kv_layers", keep), mock.patch.object(layout_programs, "kv_layers", keep):
        yield
    assert keep.called


def engine_of(
    name: str, form: str = "on CPU", drafts: bool = False, trace: Any = None, **sizes: Any
) -> tuple[Engine, Recorder]:
    more = FORMS[form] | {"block_size": 4, "max_prefill_tokens": 12, "decode_steps": 2} | sizes
    whole = replace(SIZES, proposer=DRAFTING if drafts else None, **more)
    executor = Recorder(ready(name, Layout(make_mesh(jax.devices()[:1]), 1), whole))
    return engine_over(executor, trace=trace), executor


def fewest_blocks(engine: Engine) -> int:
    """Of one request of the longest length, and the reserved one."""
    return engine.batcher.blocks.most_blocks(LENGTH) + 1


def decided(event: TraceEvent) -> TraceEvent:
    """A replay of a response that stops at its limit says that it ended there."""
    return replace(event, finish_reason="length") if isinstance(event, Completed) else event


@pytest.mark.parametrize(("name", "form"), [(HYBRID, "on CPU"), pytest.param(UNIFORM, "paged", marks=pytest.mark.slow)])
def test_what_is_behind_a_window_is_freed_and_no_token_changes(x64: None, name: str, form: str):
    """Samples that share prompts, in a pool with room for everything, and in one in which rows are preempted; of the
    latter, a replay of the lengths decides the same."""
    asked = requests(4, 3, 40)
    with every_block_kept():
        engine, _ = engine_of(name, form, num_blocks=200)  # programs of its own
        expected = engine.generate(asked)
    engine, executor = engine_of(name, form)
    recorded: list[TraceEvent] = []
    replayed: list[TraceEvent] = []
    for num_blocks in (0, fewest_blocks(engine) + 4):
        if num_blocks:
            engine, executor = engine_of(name, form, trace=recorded.append, num_blocks=num_blocks)
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
                most = max(most, progress.num_written * len(executor.stacks) // 4 - held)
                assert held <= blocks.most_blocks(LENGTH)
        assert most > 2 * len(executor.stacks), "rows hold some stretches less than they have"
        assert (engine.counters.preemptions > 0) == bool(num_blocks)
        assert engine.counters.shared_tokens > 0
        assert [samples[r.request_id].token_ids.tolist() for r in asked] == [x.token_ids.tolist() for x in expected]
        check(name, asked, [samples[request.request_id] for request in asked], executor)
    lengths = {sample.key: len(sample) for sample in expected}
    sizes = ("num_groups", "num_slots", "num_blocks", "block_size", "max_prefill_tokens", "stacks")
    replay = ReplayExecutor(lengths, **{size: getattr(executor, size) for size in sizes})
    Engine(replay, engine.batcher.config, trace=replayed.append).generate(asked)
    assert list(map(decided, replayed)) == list(map(decided, recorded))


@pytest.mark.slow
def test_rows_that_draft_free_what_is_behind_a_window(x64: None):
    """In a pool in which not all rows have room for drafts."""
    name, asked = HYBRID, requests(3, 2, 40)
    engine, executor = engine_of(name, drafts=True)
    expected = engine.generate(asked)
    engine, executor = engine_of(name, drafts=True, num_blocks=2 * fewest_blocks(engine))
    drafted = engine.generate(with_drafts(asked, expected))
    assert 0 < engine.counters.accepted_tokens < engine.counters.proposed_tokens
    assert [x.token_ids.tolist() for x in drafted] == [x.token_ids.tolist() for x in expected]
    check(name, asked, drafted, executor)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        f"walk({HYBRID!r}, 'migrate', {test_switch.EVERY_PAIR})",
        f"walk({UNIFORM!r}, 'recompute', {test_switch.CHAIN})",
        f"across({HYBRID!r}, 1, 4, DRAFTING)",
        f"across({UNIFORM!r}, 2, 2)",
    ],
)
def test_blocks_move_between_layouts(call: str):
    """As in `test_switch.py`."""
    alone(test_switch.__file__, f"{call} # float64")
