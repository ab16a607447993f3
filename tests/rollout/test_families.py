"""Every family's rollout against its training: prefill in chunks, decode over blocks and windows, and drafts, in drawn
models with windows shorter than the sequences; float64, tensor parallel.

That layouts change in the middle of a batch, with drafts and without, is in `test_switch.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from recorder import Recorder
from small_models import engine_over, model_of, ready, requests, with_drafts
from whole_pass import check

from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

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


def drawn_and_drafted(name: str, tp: int, form: str) -> None:
    sizes = replace(SIZES, max_tp=tp, proposer=DRAFTING, **FORMS[form])
    executor = Recorder(ready(name, Layout(make_mesh(jax.devices()[:tp]), tp), sizes))
    asked, engine = requests(4, 2, 36), engine_over(executor)
    samples = engine.generate(asked)
    assert sum(map(len, samples)) > 60
    check(name, asked, samples, executor)
    executor.seen.clear()
    drafted = engine.generate(with_drafts(asked, samples))
    assert 0 < engine.counters.accepted_tokens < engine.counters.proposed_tokens
    assert [x.token_ids.tolist() for x in drafted] == [x.token_ids.tolist() for x in samples]
    check(name, asked, drafted, executor)


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
    drawn_and_drafted(name, tp, form)
