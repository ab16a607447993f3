"""Every program of a rollout compiles for H100s at every tensor-parallel degree, beyond the key/value heads as well.

On a machine without a GPU (`tests/support/tp_programs.py`).
"""

import pytest
from for_gpu import ask_for_gpu

LARGE, SMALL = "Qwen2.5-7B", "Qwen2.5-1.5B"
KV_HEADS = {LARGE: 4, SMALL: 2}
"""Beside 28 query heads, and beside 12."""

EVERY = ("prefill", "decode", "verify", "switch")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "tp"), [(LARGE, 1), (LARGE, 8), (SMALL, 2), (SMALL, 4)])
def test_every_program_compiles(shape: str, tp: int):
    """With our kernels: the fused decode step where each device has whole groups of heads, attention's elsewhere."""
    told = ask_for_gpu("tp_programs", shape, str(tp), *EVERY)
    assert list(told) == list(EVERY)
    moved = told.pop("switch")
    assert (tp == 1) == (moved[0] == moved[2] == 0), "weights move, from tp 1 and back to it"
    assert moved[1] == moved[3] == 1, "so does KV, in programs of one kind"
    for kind, kernels in told.items():
        is_fused = kind == "decode" and tp <= KV_HEADS[shape]
        assert kernels["_decode_kernel" if is_fused else "_paged_kernel"] == 1, kernels
