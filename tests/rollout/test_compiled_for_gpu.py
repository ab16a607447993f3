"""What XLA makes of the rollout's programs for an H100, on a machine without one."""

import pytest
from for_gpu import compile_for_gpu

SHAPES = ["Qwen2.5-1.5B", "Qwen2.5-7B"]
MOST_KERNELS_A_LAYER = 9


def decode(shape: str, layers: int) -> dict:
    return compile_for_gpu("decode", "--shape", shape, "--layers", str(layers), "--rows", "64", "--context", "1024")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_is_one_graph_and_copies_no_pool(shape: str):
    told = decode(shape, 1)
    assert (told["graphs"], told["host_loops"]) == (1, [])
    assert not [copy for copy in told["copies"] if copy[2] >= told["pool_array_bytes"] // 2]
    # weights and pool come in, the pool goes out where it came in
    assert told["memory"]["results"] - told["memory"]["aliased"] < 1 << 20


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_of_a_layer(shape: str):
    """The difference between three layers and one: what is outside of the layers drops out."""
    three, one = (sum(decode(shape, layers)["kernels"].values()) for layers in (3, 1))
    assert (three - one) / 2 <= MOST_KERNELS_A_LAYER


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_copies_no_pool(shape: str):
    told = compile_for_gpu("prefill", "--shape", shape, "--layers", "1")
    assert told["host_loops"] == []
    assert not [copy for copy in told["copies"] if copy[2] >= told["pool_array_bytes"] // 2]
