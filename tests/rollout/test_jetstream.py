"""The engine behind JetStream's interface draws the tokens that our own engine draws.

Float64, where equality is exact. JetStream's orchestrator is in `tests/commands/test_serve_jetstream.py`.
"""

from __future__ import annotations

import importlib
import warnings
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.loading import RANDOM, load_model
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import SampleKey, SamplingParams

PROMPTS = ("a", "The rain in Spain", "2 + 2 = ", "stays mainly in the plain " * 2, "xyz")
LENGTHS = (9, 3, 17, 5, 12)
MAX_LENGTH = 90


@pytest.fixture(scope="module")
def jetstream() -> Any:
    """`jaxrl.rollout.jetstream`. TensorFlow, which comes along with JetStream's interface, warns as it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = "google-jetstream is not installed: pip install 'jaxrl[jetstream]'"
        pytest.importorskip("jetstream.engine.engine_api", reason=reason, exc_type=ImportError)
        return importlib.import_module("jaxrl.rollout.jetstream")


@pytest.fixture
def make(jetstream, tiny_model, x64):
    """(devices, tp, options of JetStreamConfig) -> engine."""

    def build(devices: int = 1, tp: int = 1, **options: Any) -> Any:
        path = f"{RANDOM}{tiny_model}"
        mesh = make_mesh(jax.devices()[:devices])
        model, _ = load_model(path, mesh, "float64")
        sizes = {"num_slots": 2, "block_size": 8, "max_length": MAX_LENGTH, "max_prefill_length": 64, "max_tp": tp}
        config = jetstream.JetStreamConfig(**(sizes | {"dtype": "float64"} | options))
        return jetstream.JetStreamEngine(model, Layout(mesh, tp), config, path)

    return build


def ours(path: Path, prompts: list[list[int]], lengths: tuple[int, ...], sampling: SamplingParams):
    """[prompt] -> token ids, from our own engine over a MeshExecutor."""
    mesh = make_mesh(jax.devices()[:1])
    model, params = load_model(f"{RANDOM}{path}", mesh, "float64")
    sizes = ExecutorConfig(
        num_slots=4, num_blocks=65, block_size=8, max_length=MAX_LENGTH, max_prefill_tokens=64, dtype="float64",
        truncate=True,
    )  # fmt: skip
    executor = MeshExecutor(model, Layout(mesh, 1), sizes)
    executor.sync_weights(params, 0)
    executor.allocate()
    requests = [
        Request(i, SampleKey(0, i, 0), tuple(ids), replace(sampling, max_tokens=length))
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    done = Engine(executor, BatcherConfig(decode_steps=8, max_model_len=MAX_LENGTH)).generate(requests)
    return [sample.token_ids.tolist() for sample in done]


def drive(engine: Any, prompts: list[list[int]], lengths: tuple[int, ...]) -> list[list[int]]:
    """What a driver does: fill free slots, step, hand out tokens, free the slots of finished requests."""
    params, state = engine.load_params(), engine.init_decode_state()
    waiting = deque(enumerate(prompts))
    free = deque(range(engine.max_concurrent_decodes))
    live: dict[int, int] = {}
    out: list[list[int]] = [[] for _ in prompts]
    while waiting or live:
        # At most one request enters per step, so that slots are at different positions.
        if waiting and free:
            index, ids = waiting.popleft()
            padded = np.pad(np.array(ids, np.int32), (0, -len(ids) % 16))
            prefix = engine.prefill(params=params, padded_tokens=padded, true_length=len(ids))
            live[slot := free.popleft()] = index
            state = engine.insert(prefix, state, slot=slot)
        state, result = engine.generate(params, state)
        result.copy_to_host_async()
        host = result.convert_to_numpy()
        for slot, index in list(live.items()):
            data = host.get_result_at_slot(slot)
            assert data.tokens.shape == data.valid.shape == (1, 1)
            out[index].append(data.tokens.item())
            assert data.valid.all()
            assert data.lengths.item() == len(out[index])
            if len(out[index]) == lengths[index]:
                del live[slot]
                free.append(slot)
                assert engine.free_resource(slot) is None
    return out


def encoded(folder: Path) -> list[list[int]]:
    return [Tokenizer.from_path(folder).encode(text) for text in PROMPTS]


@pytest.mark.parametrize(
    ("devices", "tp", "sampling"),
    [(4, 2, SamplingParams(temperature=0)), (2, 1, SamplingParams(temperature=0.8, top_k=40, max_tokens=64))],
)
def test_tokens_are_those_of_our_engine(make, tiny_model, devices, tp, sampling):
    engine = make(devices, tp, sampling=replace(sampling, max_tokens=64))
    prompts = encoded(tiny_model)
    assert drive(engine, prompts, LENGTHS) == ours(tiny_model, prompts, LENGTHS, sampling)


def generate(engine: Any, params: Any, prefix: Any, steps: int) -> list[tuple[int, int, int]]:
    """(token, valid, length) of slot 1 for some steps, slot 0 being empty."""
    state = engine.insert(prefix, engine.init_decode_state(), slot=1)
    rows = []
    for _ in range(steps):
        state, result = engine.generate(params, state)
        assert not result.convert_to_numpy().get_result_at_slot(0).valid.any()
        data = result.convert_to_numpy().get_result_at_slot(1)
        rows.append((data.tokens.item(), data.valid.item(), data.lengths.item()))
    return rows


@pytest.mark.parametrize("limited_by", ["max_length", "max_tokens", "stop token"])
def test_a_slot_that_has_no_more_to_say_is_not_valid(make, tiny_model, limited_by):
    ids = encoded(tiny_model)[3]
    room = MAX_LENGTH - len(ids)
    (response,) = ours(tiny_model, [ids], (room,), SamplingParams(temperature=0))
    limits, expected = {
        "max_length": ({}, room),
        "max_tokens": ({"max_tokens": 1}, 1),
        "stop token": ({"stop_token_ids": (response[4],)}, response.index(response[4]) + 1),
    }[limited_by]
    engine = make(sampling=SamplingParams(**({"temperature": 0, "max_tokens": 10_000} | limits)))
    params = engine.load_params()
    prefix = engine.prefill(params=params, padded_tokens=np.array(ids, np.int32), true_length=len(ids))
    rows = generate(engine, params, prefix, expected + 2)
    assert [token for token, valid, _ in rows if valid] == response[:expected]
    assert [valid for _, valid, _ in rows] == [1] * expected + [0, 0]
    assert rows[-1][2] == expected
