"""Bounds, types and rules that options of several sections share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge

from jaxrl.schema.declared import Cap, shown

OpenFloatType = Literal["auto", "float32", "bfloat16", "float64"]
"""auto: `Config.with_types` puts a type in its place once the devices are known."""
Quantization = Literal["none", "int8", "nf4"]
"""Types of frozen weights."""
Narrow = Literal["none", "int8", "fp8"]
"""Types of the rollout's weights; fp8: float8_e4m3fn."""
BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float64": 8, "int8": 1, "uint8": 1, "fp8": 1}
"""Bytes of a number of each type."""
AtEnd = Literal["flush", "leave"]
ScoreWhen = Literal["sample", "group", "rollout"]

MAX_PROMPTS = Cap(65536, "prompts and their samples are kept in memory until their step ends")
MAX_SAMPLES = Cap(65536, "a prompt's samples are kept in memory until the last one is scored")
MAX_LENGTH = Cap(16777216, "every row of a batch has room for the longest sequence")
MAX_FACTOR = Cap(100, "a round would launch that many batches at once")
Factor = Annotated[float, Ge(1), MAX_FACTOR]
"""By how much more a round launches than a batch has: the speculation factor η of RollPacker §3."""
MAX_WAIT = Cap(10_000_000, "the system's clocks wait no longer, which is four months")
MAX_GIB = Cap(2**20, "no machine has more")
MAX_HOSTS = Cap(4096, "one process decides for all of them")
MAX_RANK = Cap(4096, "an adapter of such a rank is as large as its matrix")


def template_problem(variables: Mapping[str, Any]) -> str | None:
    """What is wrong with variables for a chat template, as the end of a sentence that begins with their option; None if
    nothing is."""
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            return f"{name}: the run gives the chat template {name} itself"
    tools = variables.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return f"tools must be a list of JSON schemas, found {shown(tools)}"
    return None
