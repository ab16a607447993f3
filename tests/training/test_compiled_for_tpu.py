"""The update compiles for TPUs, on a machine without one; a program takes a minute or more."""

import pytest
from for_gpu import compile_for_tpu


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "devices"), [("v5e", 1), ("v5e", 8), ("v5p", 8)])
def test_gradients(chip: str, devices: int):
    sizes = ("--layers", "2", "--rows", "1", "--tokens", "512", "--devices", str(devices))
    told = compile_for_tpu(chip, "gradients", *sizes)
    # the accumulator goes out where it came in
    assert told["memory"]["results"] - told["memory"]["aliased"] < 1 << 20
    assert bool(told["collectives"]) == (devices > 1)
