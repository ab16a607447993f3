"""Programs as they are lowered for an H100, with no device needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def lowered_for_cuda(function: Callable[..., Any], *arrays: Any) -> tuple[str, int]:
    """A program's text, and how many Pallas kernels it calls."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return text, text.count("custom_call @__gpu$xla.gpu.triton")
