"""What XLA makes of the rollout's programs for TPUs, on a machine without one.

A program takes half a minute or more to compile. Only the first test does so by default.
"""

from typing import Any

import pytest
from for_gpu import compile_for_tpu

SLOW = pytest.mark.slow


def compiled(program: str, chip: str, tp: int, shape: str, *more: str) -> dict[str, Any]:
    told = compile_for_tpu(chip, program, "--shape", shape, "--layers", "1", "--tp", str(tp), *more)
    # weights and pool come in, the pool goes out where it came in
    assert told["memory"]["results"] - told["memory"]["aliased"] < 1 << 20
    return told


@pytest.mark.parametrize(
    ("chip", "tp", "shape", "rows", "context"),
    [
        ("v5e", 1, "Qwen2.5-1.5B", 16, 1024),
        pytest.param("v5e", 8, "Qwen2.5-7B", 64, 1024, marks=SLOW),
        pytest.param("v5p", 2, "Qwen2.5-7B", 64, 1024, marks=SLOW),
        pytest.param("v5e", 1, "Qwen2.5-1.5B", 256, 16384, marks=SLOW),  # more blocks than scalar memory holds
    ],
)
def test_a_decode_step_reads_the_pool_where_it_lies(chip: str, tp: int, shape: str, rows: int, context: int):
    told = compiled("decode", chip, tp, shape, "--rows", str(rows), "--context", str(context))
    assert told["kernels"]["paged_attention"] == (1 if context == 1024 else 2)
    # projections of queries, keys and values are copied, once a plan, and logits that tp does not divide
    assert max((size for *_, size in told["copies"]), default=0) < 0.9 * told["pool_array_bytes"]
    assert not [name for _, name, _ in told["copies"] if name.startswith("gather")]


@SLOW
@pytest.mark.parametrize(
    ("program", "chip", "tp", "dtype"),
    [("decode", "v5e", 1, "float32"), ("verify", "v5p", 2, "bfloat16"), ("prefill", "v5e", 4, "bfloat16")],
)
def test_what_gathers_copies_no_pool(program: str, chip: str, tp: int, dtype: str):
    """jnp: rows' blocks are gathered, in one go, and the pool stays as it is."""
    told = compiled(program, chip, tp, "Qwen2.5-7B", "--rows", "16", "--dtype", dtype)
    assert not told["kernels"]
    pool = told["pool_array_bytes"]  # blocks of 16 rows, and block 0; of a chunk of a prompt one row's
    assert pool not in [size for *_, size in told["copies"]]
    gathered = [size for _, name, size in told["copies"] if name.startswith("gather")]
    assert program == "prefill" or [size for size in gathered if size > 0.9 * pool] == [pool - pool // 1025] * 2
