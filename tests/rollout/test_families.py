"""Every family's rollout against its training: prefill in chunks, decode over blocks and windows, and drafts, in drawn
models with windows shorter than the sequences; float64, tensor parallel.

That layouts change in the middle of a batch, with drafts and without, is in `test_switch.py`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorder import Recorder
from small_models import engine_over, model_of, ready, requests, weights_of, with_drafts

from jaxrl.kernels import reference
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Sample

from .test_switch import DRAFTING

LENGTH = 64
SIZES = ExecutorConfig(
    num_slots=4, block_size=8, max_length=LENGTH, max_prefill_tokens=16, decode_steps=4, dtype=jnp.float64
)
FORMS: dict[str, dict[str, Any]] = {
    "on CPU": {},
    "paged": {"features_first": False, "gathered": False},
    "fused": {"features_first": False, "gathered": False, "fused_projections": True},
}


@functools.cache
def forward(name: str) -> Any:
    """Logits [LENGTH, V] of a padded row, as training computes them."""
    model, params = model_of(name), weights_of(name, "float64")
    windows, positions = jnp.asarray([kind.window or 10**6 for kind in model.kinds]), jnp.arange(LENGTH)[None]

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *more: Any) -> jax.Array:
            *kind, sinks = more if model.attention_sinks else (*more, None)
            first, ones = positions - windows[kind[0] if kind else 0] + 1, jnp.ones_like(positions)
            rows = ones, positions, None, first
            return reference.packed_attention(q, k, v, *rows, model.attn_logit_softcapping, sinks)

        hidden = decoder.forward_scan(params, tokens[None], positions, attend, model, dtype=jnp.float64)
        return decoder.logits(params, hidden, model)[0]

    return logits


def check(name: str, tp: int, form: str) -> None:
    sizes = replace(SIZES, max_tp=tp, proposer=DRAFTING, **FORMS[form])
    executor = Recorder(ready(name, Layout(make_mesh(jax.devices()[:tp]), tp), sizes))
    asked, engine = requests(4, 2, 36), engine_over(executor)
    samples = engine.generate(asked)
    assert sum(map(len, samples)) > 60
    compare(name, asked, samples, executor)
    executor.seen.clear()
    drafted = engine.generate(with_drafts(asked, samples))
    assert 0 < engine.counters.accepted_tokens < engine.counters.proposed_tokens
    assert [x.token_ids.tolist() for x in drafted] == [x.token_ids.tolist() for x in samples]
    compare(name, asked, drafted, executor)


def compare(name: str, asked: list[Request], samples: list[Sample], executor: Recorder) -> None:
    """The log-probability of each token that was drawn is that of training."""
    for request, sample in zip(asked, samples, strict=True):
        row = np.zeros(LENGTH, np.int32)
        begin, end = len(request.prompt_ids), len(request.prompt_ids) + len(sample)
        row[:end] = [*request.prompt_ids, *sample.token_ids]
        temperature = np.float64(np.float32(request.params.temperature)) or 1.0
        logits = np.asarray(forward(name)(row))[begin - 1 : end - 1] / temperature
        top = logits.max(-1, keepdims=True)
        expected = logits - top - np.log(np.sum(np.exp(logits - top), -1, keepdims=True))
        chosen = np.take_along_axis(expected, np.asarray(sample.token_ids)[:, None], -1)[:, 0]
        found = executor.logprobs(request.request_id, 0)[: len(sample)]
        np.testing.assert_allclose(found, chosen, rtol=0, atol=1e-9)


def has_all(model: ModelConfig) -> bool:
    return len(model.kinds) > 1 and any(0 < kind.window < 20 for kind in model.kinds)


WAYS = [(1, "paged"), (2, "fused"), (4, "on CPU"), (8, "on CPU")]


@pytest.mark.parametrize(
    ("name", "tp", "form"),
    [
        ("gemma2:55", 2, "on CPU"),  # of two layers, one with a window
        ("gpt_oss:28", 1, "paged"),
        *(pytest.param(name, *WAYS[i % len(WAYS)], marks=pytest.mark.slow) for i, name in enumerate(FAMILIES)),
    ],
)
def test_a_rollout_computes_what_training_computes(x64, name, tp, form):
    if ":" not in name:
        windowed = (seed for seed in range(30) if has_all(model_of(f"{name}:{seed}")))
        name = f"{name}:{next(windowed, 0)}"
    if form == "fused" and model_of(name).num_kv_heads % tp:
        tp = 1  # whole groups everywhere
    check(name, tp, form)
