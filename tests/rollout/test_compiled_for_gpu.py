"""What XLA makes of the rollout's programs for an H100, on a machine without one: of one program by default."""

import re
from typing import Any

import pytest
from for_gpu import compile_for_gpu, lowered_for_gpu

SMALL, LARGE = "Qwen2.5-1.5B", "Qwen2.5-7B"
SLOW = pytest.mark.slow


def decode(layers: int = 1, rows: int = 64, context: int = 1024, shape: str = SMALL) -> dict:
    sizes = ("--layers", str(layers), "--rows", str(rows), "--context", str(context))
    return compile_for_gpu("decode", "--shape", shape, *sizes)


def one_layer(program: str, shape: str, *more: str) -> dict:
    return compile_for_gpu(program, "--shape", shape, "--layers", "1", *more)


@pytest.mark.parametrize(("shape", "rows", "context"), [(SMALL, 64, 1024), pytest.param(LARGE, 1, 8192, marks=SLOW)])
def test_a_plan_is_one_graph_and_copies_no_pool(shape: str, rows: int, context: int):
    told = decode(1, rows, context, shape)
    assert (told["graphs"], told["host_loops"]) == (1, [])
    assert told["copies"] == [], "nor a weight"
    # weights and pool come in, the pool goes out where it came in
    assert told["memory"]["results"] - told["memory"]["aliased"] < 1 << 20
    assert shape == LARGE or told["kernels_of_turn"] == 8 + 23, "as docs/benchmarks/expected-gpu.md says"


@SLOW
@pytest.mark.parametrize(("shape", "layers"), [("OLMo-3-7B", 4), ("Mistral-7B", 2)])
def test_stacks_of_layers_write_their_pool_in_place(shape: str, layers: int):
    """Layers that see everything and layers with a window, in the same arrays; and layers that all have a window."""
    told = decode(layers, 16, 8192, shape)
    assert told["copies"] == []
    assert told["memory"]["results"] - told["memory"]["aliased"] < 1 << 20
    arrays = 2 if shape == "OLMo-3-7B" else 2 * layers
    assert told["memory"]["aliased"] // told["pool_array_bytes"] == arrays


@SLOW
@pytest.mark.parametrize(
    ("shape", "most"), [(SMALL, 9), ("OLMo-3-7B", 15), ("Granite-3.1-2B", 13), ("gpt-oss-20b", 28)]
)
def test_kernels_of_a_layer(shape: str, most: int):
    """The difference between three layers and one: what is outside of the layers drops out. Gemma is not among them:
    the kernels take no head dim of 256."""
    three, one = (decode(layers, shape=shape) for layers in (3, 1))
    for told in (three, one):
        assert (told["graphs"], told["host_loops"], told["copies"]) == (1, [], [])
    assert (sum(three["kernels"].values()) - sum(one["kernels"].values())) / 2 <= most
    if shape == SMALL:  # the families of the others have no fused write
        assert three["kernels"]["_decode_kernel"] == 3, "attention writes the new keys and values"


@SLOW
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_weights_are_read_as_codes(kind: str):
    """The kernels of a step are the same: products take codes, and factors before they round. No array of a matrix's
    numbers is written, so a step reads a byte a number."""
    plain, narrow = (one_layer("decode", LARGE, "--quantization", each) for each in ("none", kind))
    assert narrow["kernels"] == plain["kernels"]
    assert narrow["copies"] == []
    assert narrow["memory"]["temporaries"] < plain["memory"]["temporaries"] + 4096
    matrices = 3584 * (3584 + 2 * 512 + 3584) + 3 * 3584 * 18944  # one byte in place of two
    factors = 4 * (3584 + 2 * 512 + 3584 + 2 * 18944 + 3584)
    saved = plain["memory"]["arguments"] - narrow["memory"]["arguments"]
    assert abs(saved - (matrices - factors)) < 4096
    code = {"int8": "s8", "fp8": "f8e4m3fn"}[kind]
    products = re.findall(r"%gemm_fusion_dot\S* \(([^)]*)\)", narrow["hlo"])
    assert sum(f": {code}[" in each for each in products) == 4


@SLOW
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_cache_of_codes_is_read_and_written_by_the_same_kernels(kind: str):
    plain, narrow = (one_layer("decode", LARGE, "--kv", each) for each in ("none", kind))
    assert narrow["kernels"] == plain["kernels"]
    assert narrow["copies"] == []
    assert narrow["memory"]["results"] - narrow["memory"]["aliased"] < 1 << 20, "pool and scales are written in place"
    assert narrow["memory"]["temporaries"] < plain["memory"]["temporaries"] + 4096
    assert narrow["pool_array_bytes"] / plain["pool_array_bytes"] == (128 + 4) / 256


@SLOW
@pytest.mark.parametrize(("shape", "rows", "width"), [(SMALL, 64, 4), (LARGE, 8, 32)])
def test_a_plan_that_verifies_drafts_is_one_graph_and_copies_no_pool(shape: str, rows: int, width: int):
    told = one_layer("verify", shape, "--rows", str(rows), "--context", "1024", "--width", str(width))
    assert told["program"][:3] == ["verify", rows, 1 + width]
    assert (told["graphs"], told["host_loops"]) == (1, [])
    assert told["copies"] == [], "nor a weight, nor the indexes"
    assert told["memory"]["results"] - told["memory"]["aliased"] < 1 << 20
    assert told["kernels"]["_paged_kernel"] == 1, "all of a row's queries at once"


@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_float32_is_float32(program: str):
    """Products of float32 arrays say so; by default a GPU takes 10 bits of each number (TF32)."""
    for dtype, exact in (("float32", True), ("bfloat16", False)):
        told = lowered_for_gpu(program, "--shape", SMALL, "--layers", "1", "--dtype", dtype)
        assert told["products"]
        assert all("highest" in text.lower() for text in told["products"]) == exact


# ---------------------------------------------------------------- every tensor-parallel degree


KV_HEADS = {LARGE: 4, SMALL: 2}
"""Beside 28 query heads, and beside 12."""


@SLOW
@pytest.mark.parametrize(("shape", "tp"), [(LARGE, 1), (LARGE, 8), (SMALL, 2), (SMALL, 4)])
@pytest.mark.parametrize("kind", ["prefill", "decode", "verify"])
def test_every_program_compiles(shape: str, tp: int, kind: str):
    """With our kernels: the fused decode step where each device has whole groups of heads, attention's elsewhere."""
    is_fused = kind == "decode" and tp <= KV_HEADS[shape]
    told = one_layer(kind, shape, "--tp", str(tp), "--rows", "64", "--context", "1024")
    assert told["kernels"]["_decode_kernel" if is_fused else "_paged_kernel"] == 1, told["kernels"]


# ---------------------------------------------------------------- streamed layers

# Six layers, two of them resident: layers 0, 1, 3, 4 or so are streamed, four matrices each. Copies are numbered in the
# order in which they begin, so streamed layer j has the numbers 4 j to 4 j + 3, the largest two last.
STREAMED, MATRICES = 4, 4


def streamed(program: str, *more: str) -> dict[str, Any]:
    sizes = ("--shape", "Qwen2.5-1.5B", "--layers", "6", "--resident", "2", "--rows", "8", "--context", "512")
    return compile_for_gpu(program, *sizes, *more)


@SLOW
def test_memory_is_as_planned():
    told = streamed("decode")
    memory, plan = told["memory"], told["plan"]
    assert memory["host_arguments"] == STREAMED * told["layer_bytes"]
    stays = plan["judge: weights that stay"] + plan["judge: KV pool"]
    assert stays <= memory["arguments"] < stays + (1 << 20), "and row state"
    buffers = plan["judge: buffers of two layers"]
    assert buffers == 2 * told["layer_bytes"]
    assert memory["temporaries"] == pytest.approx(buffers, rel=0.02)
    assert told["copies"] == []
