"""Every program of a rollout compiles for H100s at every tensor-parallel degree, beyond the key/value heads as well.

On a machine without a GPU (`tests/support/tp_programs.py`).
"""

import pytest
from for_gpu import ask_for_gpu

LARGE, SMALL = "Qwen2.5-7B", "Qwen2.5-1.5B"
KV_HEADS = {LARGE: 4, SMALL: 2}
"""Beside 28 query heads, and beside 12."""

EVERY = ("prefill", "decode", "verify", "switch")


@pytest.mark.parametrize(
    ("shape", "tp", "kinds"),
    [
        (SMALL, 4, ("decode",)),
        *(pytest.param(shape, tp, EVERY, marks=pytest.mark.slow) for shape in (LARGE, SMALL) for tp in (1, 2, 4, 8)),
    ],
)
def test_every_program_compiles(shape: str, tp: int, kinds: tuple[str, ...]):
    """With our kernels: the fused decode step where each device has whole groups of heads, attention's elsewhere."""
    told = ask_for_gpu("tp_programs", shape, str(tp), *kinds)
    assert list(told) == list(kinds)
    moved = told.pop("switch", None)
    assert moved is None or (tp == 1) == (moved[0] == moved[2] == 0), "weights move, from tp 1 and back to it"
    assert moved is None or moved[1] == moved[3] == 1, "so does KV, in programs of one kind"
    for kind, kernels in told.items():
        is_fused = kind == "decode" and tp <= KV_HEADS[shape]
        assert kernels["_decode_kernel" if is_fused else "_paged_kernel"] == 1, kernels
