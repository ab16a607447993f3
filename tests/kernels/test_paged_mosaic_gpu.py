"""The paged kernel on Mosaic GPU: interpreted against the jnp oracle, lowered for CUDA, and when it is chosen.

JAX's interpreter of Mosaic GPU runs the cases of `tests/support/mosaic_gpu_cases.py` in a process of their own.
tests/rollout/test_compiled_for_gpu.py compiles the kernel for an H100; on a GPU, test_gpu.py runs it.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from lowering import lowered_for_cuda
from mosaic_gpu_cases import CASES

from jaxrl.kernels import attention, paged_mosaic_gpu
from jaxrl.kernels.reference import PLAIN, Rule

from .test_paged_pallas import shapes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "mosaic_gpu_cases.py"
QUICK, *SLOW = CASES
LIMIT_S = 300
MOSAIC = attention.choose_paged("mosaic_gpu", "gpu")


@functools.cache
def answers(names: tuple[str, ...]) -> dict[str, str]:
    """What is wrong with each case. A process that waits for itself is ended, and tried once more."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    for last in (False, True):
        try:
            ran = subprocess.run(
                [sys.executable, "-W", "error", str(SCRIPT), *names],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                timeout=LIMIT_S,
                check=True,
            )
        except subprocess.TimeoutExpired:
            if last:
                raise
        else:
            return dict(json.loads(line) for line in ran.stdout.splitlines())
    raise AssertionError


@pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="this JAX's interpreter takes no transposed operand of wgmma (0.10.2: AttributeError in `to_range`)",
)
@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_interpreted(name):
    wrong = answers((QUICK,) if name == QUICK else (*SLOW,))[name]
    assert not wrong, wrong


# ---------------------------------------------------------------- the interface


def refused(change: Any = lambda *arrays: arrays, size: int = 16, rule: Rule = PLAIN) -> str:
    arrays = shapes(2, 1, 4, 2, 64, size, 4, jnp.bfloat16)
    with pytest.raises(ValueError, match="use implementation='reference'") as caught:
        jax.eval_shape(functools.partial(paged_mosaic_gpu.paged_attention, rule=rule), *change(*arrays))
    return str(caught.value)


def test_what_the_kernel_refuses():
    assert "scores are capped (30)" in refused(rule=Rule(0, 30.0))
    assert "rollout.block_size (12) must be a multiple of 8" in refused(size=12)
    narrow = shapes(2, 1, 4, 2, 32, 16, 4, jnp.bfloat16)
    assert "head_dim (32) must be one of (64, 128)" in refused(lambda *_: narrow)


def test_which_platforms_and_models_may_ask_for_it():
    for platform in ("cpu", "tpu"):
        with pytest.raises(ValueError, match=rf"rollout.attention \(mosaic_gpu\) must be .* on {platform}: "):
            attention.choose_paged("mosaic_gpu", platform)
    with pytest.raises(ValueError, match=r"rollout.attention \(mosaic_gpu\) must be .* whose scores are capped"):
        attention.choose_paged("mosaic_gpu", "gpu", 50.0)
    assert not MOSAIC.decodes(12, 2, 128, jnp.bfloat16), "a decode step is its products, and this kernel"


# ---------------------------------------------------------------- lowering for CUDA, without a GPU


@pytest.mark.parametrize(
    ("rows", "queries", "heads", "kv_heads", "dim", "size", "context", "window", "expected"),
    [(8, 9, 32, 8, 128, 32, 2048, 512, 2), (64, 256, 9, 3, 64, 16, 2048, 0, 1)],
)  # fmt: skip
def test_lowers_for_cuda(rows, queries, heads, kv_heads, dim, size, context, window, expected):
    """Attention, and the merge of pieces where rows may have several; prefill of 64 x 256 tokens has none."""
    arrays = shapes(rows, queries, heads, kv_heads, dim, size, context // size, jnp.bfloat16)
    attend = functools.partial(MOSAIC.attend, rule=Rule(window))
    text, kernels = lowered_for_cuda(attend, *arrays)
    assert kernels == expected
    assert "gather" not in text, "the cache is never gathered"
