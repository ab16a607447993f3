"""How rotary frequencies are stretched to longer contexts: `RopeScaling`, and how config.json says it.

Linear; llama3 (Llama 3.1 model card); yarn (Peng et al., 2023, arXiv:2309.00071). Files are read as transformers 5
reads them (`modeling_rope_utils.py`, `convert_rope_params_to_dict` and `standardize_rope_params`; compared with version
5.23):

- a `rope_scaling` that is not empty takes the place of all of `rope_parameters`;
- `rope_theta` in there wins over one at the top level;
- `original_max_position_embeddings` at the top level wins over one in there;
- yarn and llama3 without it start from `max_position_embeddings`.

Departure: yarn without a factor uses the ratio of the two contexts, where version 5 wants a null written out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl.models.fields import MAX_ID, Fields

DEFAULT_THETA = 10_000.0
# Rotary angles are computed in at least float32; a theta or a factor beyond these leaves pairs that never turn.
MAX_THETA, MAX_FACTOR = 1e15, 1e6


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than those seen in pretraining.

    `attention_factor` multiplies cos and sin (yarn only); it is resolved when a file is read, so that `mscale` and its
    kin need no fields here.
    """

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def to_hf(self) -> dict[str, Any]:
        """The `rope_scaling` entry of config.json, in the words of transformers."""
        names: dict[str, tuple[str, ...]] = {
            "none": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": (
                "factor",
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "truncate",
            ),
        }
        kind = "default" if self.kind == "none" else self.kind
        return {"rope_type": kind} | {name: getattr(self, name) for name in names[self.kind]}


def read_rope(fields: Fields, max_position_embeddings: int) -> tuple[float, RopeScaling]:
    """(theta, scaling) of a config.json."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name, {}), Mapping):
            fields.refuse(f"{name} {fields.raw[name]!r}", "it must be an object")
    rope: dict[str, Any] = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    for name, value in rope.items():
        if isinstance(value, Mapping):
            fields.refuse(f"rope of its own for {name!r}", "all layers must have the same rope")
    top = {"rope_theta": fields.get("rope_theta")}
    inner = Fields(top | {name: value for name, value in rope.items() if value is not None}, fields.file)
    theta = inner.number("rope_theta", DEFAULT_THETA, above=1.0, high=MAX_THETA)
    for partial in (rope.get("partial_rotary_factor"), fields.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            fields.refuse(f"partial_rotary_factor {partial}", "rope must rotate the whole head")
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        fields.refuse(f"rope_type {kind!r}", "supported are 'default', 'linear', 'llama3' and 'yarn'")
    origin = fields if fields.get("original_max_position_embeddings") is not None else inner
    original = origin.integer("original_max_position_embeddings", max_position_embeddings, high=MAX_ID)
    if kind == "yarn" and inner.get("factor") is None:
        factor = max_position_embeddings / original
    elif inner.get("factor") is None:
        raise ValueError(f"{fields.file}: rope scaling {kind!r} needs a factor")
    else:
        factor = inner.number("factor", 1.0, high=MAX_FACTOR)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    return theta, _llama3(inner, factor, original) if kind == "llama3" else _yarn(inner, factor, original)


def _llama3(fields: Fields, factor: float, original: int) -> RopeScaling:
    low = fields.number("low_freq_factor", 1.0, high=MAX_FACTOR)
    high = fields.number("high_freq_factor", 4.0, high=MAX_FACTOR)
    if not low < high:
        raise ValueError(f"{fields.file}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
    return RopeScaling("llama3", factor, original, low, high)


def _yarn(fields: Fields, factor: float, original: int) -> RopeScaling:
    fast = fields.number("beta_fast", 32.0, high=MAX_FACTOR)
    slow = fields.number("beta_slow", 1.0, high=MAX_FACTOR)
    if not slow < fast:
        raise ValueError(f"{fields.file}: beta_fast ({fast:g}) must be above beta_slow ({slow:g})")
    mscale = {
        name: fields.number(name, 1.0, high=MAX_FACTOR)
        for name in ("mscale", "mscale_all_dim")
        if fields.get(name)  # 0 counts as left out
    }
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=fields.number("attention_factor", yarn_attention_factor(factor, mscale), high=MAX_FACTOR),
        truncate=fields.flag("truncate", True),
    )


def yarn_attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    """The factor on cos and sin that yarn implies where the file does not give one."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)
