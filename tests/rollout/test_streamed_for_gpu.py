"""What XLA makes of a program with streamed layers for an H100, on a machine without one.

Six layers, two of them resident: layers 0, 1, 3, 4 or so are streamed, four matrices each. Copies are numbered in the
order in which they begin, so streamed layer j has the numbers 4 j to 4 j + 3, the largest two last.
"""

from __future__ import annotations

from typing import Any

import pytest
from for_gpu import compile_for_gpu

STREAMED, MATRICES = 4, 4


def streamed(program: str, *more: str) -> dict[str, Any]:
    sizes = ("--shape", "Qwen2.5-1.5B", "--layers", "6", "--resident", "2", "--rows", "8", "--context", "512")
    return compile_for_gpu(program, *sizes, *more)


def places(told: dict[str, Any]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for place, (what, number) in enumerate(told["host_copies"]):
        found.setdefault((what, number), []).append(place)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_a_layers_copy_runs_under_the_layer_before_it(program):
    told = streamed(program)
    at = places(told)
    assert len([key for key in at if key[0] == "begin"]) == STREAMED * MATRICES, "each matrix is copied once"
    for layer in range(STREAMED - 1):
        computes = [place for n in range(MATRICES) for place in at["product", MATRICES * layer + n]]
        for large in (2, 3):  # XLA lets two copies be under way at a time, so the small ones end first
            number = MATRICES * (layer + 1) + large
            assert at["begin", number][0] < min(computes)
            assert at["end", number][0] > max(computes)


@pytest.mark.slow
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
