"""`actor.numerics=invariant` compiled for an H100, on a machine without one: the same pieces in all programs, and
kernels whose sums have one order. None of them by default: each takes several programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import pytest
from for_gpu import compile_for_gpu
from loop_bodies import bodies

pytestmark = pytest.mark.slow
SMALL, LARGE, MIXTURE = "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen3-30B-A3B"
ROLLOUT = ("--layers", "1", "--rows", "64", "--context", "1024")
PROGRAMS = {
    "decode": ROLLOUT,
    "verify": ROLLOUT,
    "prefill": ROLLOUT,
    "logprobs": ("--layers", "2", "--rows", "1", "--tokens", "8192"),
    "gradients": ("--layers", "2", "--rows", "1", "--tokens", "8192"),
}


def compiled(program: str, shape: str = SMALL, dtype: str = "bfloat16", *more: str) -> dict:
    how = ("--shape", shape, "--dtype", dtype, "--numerics", "invariant")
    return compile_for_gpu(program, *PROGRAMS[program], *how, *more)


PIECES = {"logprobs": (9, 8), "verify": (10, 9)}
"""How many there are, and the most kernels of one: rope, what stands before attention, two stretches and two sums
behind it, the last norm, the logits, the log-probabilities; in rollouts the drawing. A trainer's chunk of one tile has
more kernels."""


@pytest.mark.parametrize(
    ("shape", "dtype", "one", "others"),
    [
        (SMALL, "bfloat16", "logprobs", ("gradients", "decode")),
        (SMALL, "float32", "verify", ("prefill", "decode")),
        (LARGE, "bfloat16", "logprobs", ("decode",)),
        (LARGE, "bfloat16", "verify", ("prefill", "decode")),
    ],
)
def test_all_programs_have_the_same_pieces(shape: str, dtype: str, one: str, others: tuple[str, ...]):
    """Each has another number of tiles: one, which is no loop; three of `verify`, four of prefill, 64 in training."""
    loops, (count, most) = bodies(compiled(one, shape, dtype)["hlo"], innermost=True), PIECES[one]
    tiles = [loop for loop in loops if 0 < loop.total() <= most]
    assert len(tiles) == count
    for program in others:
        found = bodies(compiled(program, shape, dtype)["hlo"])
        assert not [tile for tile in tiles if not any(tile <= body for body in found)], program


@pytest.mark.parametrize("others", [("decode", "--tp", "2"), ("verify", "--tp", "4")])
def test_all_degrees_of_tensor_parallelism_have_the_same_pieces(others: tuple[str, ...]):
    """Of parts, whichever device has them. A kernel reads its part in another array, and multiplies alike."""
    program, *split = others
    parts = ("--numerics-tp", split[1])
    every = [compiled("logprobs", SMALL, "bfloat16", *parts), compiled(program, SMALL, "bfloat16", *parts)]
    every.append(compiled(program, SMALL, "bfloat16", *split))
    loops = bodies(every[0]["hlo"], innermost=True, kernels=False)
    tiles = [loop for loop in loops if 0 < loop.total() <= 9]
    assert len(tiles) == 10
    for told in every:
        found = bodies(told["hlo"], kernels=False)
        assert not [tile for tile in tiles if not any(tile <= body for body in found)]
        sums = [words for name, words in told["arithmetic"].items() if name.startswith("_product_kernel")]
        assert len({tuple(words.items()) for words in sums}) == 1
    packed, *paged = (alike(kernel(told, name)) for told, name in zip(every, NAMES, strict=True))
    assert paged == [packed, packed]


NAMES = ("_packed_kernel", "_paged_kernel", "_paged_kernel")


@pytest.mark.parametrize("split", [(), ("--tp", "2")])
def test_experts_are_the_same_arithmetic_in_rollout_and_training(split: tuple[str, ...]):
    """All tokens are two kernels', which no piece has; pieces are what is around them. `split`: of the rollout."""
    trained = compiled("logprobs", MIXTURE, "bfloat16", *(("--numerics-tp", "2") if split else ()))
    drawn = compiled("decode", MIXTURE, "bfloat16", *split)
    loops = bodies(trained["hlo"], innermost=True, kernels=False)
    # what a chunk of training writes its numbers with is no piece
    tiles = [loop for loop in loops if 0 < loop.total() <= 9 and not any(" scatter(" in each for each in loop)]
    found = bodies(drawn["hlo"], kernels=False)
    assert len(tiles) == 10 + bool(split)
    assert not [tile for tile in tiles if not any(tile <= body for body in found)]
    for name in ("_experts_gate_up", "_experts_down"):
        assert kernel(trained, name) == kernel(drawn, name)
        assert not [word for word in kernel(drawn, name) if word.startswith(("atom", "red"))]
    assert [word.partition(".")[0] for word in sorted(kernel(drawn, "_experts_down"))] == ["mul", "wgmma"]
    assert drawn["copies"] == []  # no matrix of an expert is cut out
    if "--tp" not in split:
        assert (drawn["graphs"], drawn["host_loops"]) == (1, [])


def kernel(told: dict, name: str) -> Counter[str]:
    counts = {
        each: Counter(words) for each, words in told["arithmetic"].items() if re.fullmatch(rf"{name}(_\d*)?", each)
    }
    (found,) = counts.values()
    return found


ORDERLESS = ("fma", "mad", "atom", "red")
"""What rounds once where others round twice, and what adds in the order of chance."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_is_the_same_arithmetic_in_rollout_and_training(dtype: str):
    """The same products of the same size, and all else rounded one by one."""
    paged = kernel(compiled("decode", SMALL, dtype), "_paged_kernel")
    packed = kernel(compiled("logprobs", SMALL, dtype), "_packed_kernel")
    for counts in (paged, packed):
        assert not [word for word in counts if word.startswith(ORDERLESS)]
        assert all(".rn." in word for word in counts if word.startswith(("add", "sub", "mul")))
    # a context of one part has nothing to scale: the compiler leaves out that product with 0
    assert alike(paged) == alike(packed)
    assert any("mma" in word for word in alike(paged))


def alike(counts: Mapping[str, int]) -> dict[str, int]:
    return {word: count for word, count in counts.items() if not word.startswith("mul")}
