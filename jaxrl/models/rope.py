"""How rotary frequencies are made and stretched to longer contexts: `Rope`, and how config.json says it.

Linear; llama3 (Llama 3.1 model card); yarn (Peng et al., 2023, arXiv:2309.00071); longrope (Ding et al., 2024,
arXiv:2402.13753). Files are read as transformers 5 reads them (`modeling_rope_utils.py`, `convert_rope_params_to_dict`
and `standardize_rope_params`; compared with versions 5.23 and 5.24):

- a `rope_scaling` that is not empty takes the place of all of `rope_parameters`; where windowed layers have a rope of
  their own, it is laid over that of the others;
- `rope_theta` in there wins over one at the top level;
- `original_max_position_embeddings` at the top level wins over one in there;
- yarn and llama3 without it start from `max_position_embeddings`.

Departures: yarn without a factor uses the ratio of the two contexts. Longrope has frequencies for short and for long
sequences, and transformers takes those that the longest sequence of a batch asks for; here sequences end where the
short ones do, at `original_max_position_embeddings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl.models.fields import MAX_ID, Fields

DEFAULT_THETA = 10_000.0
# Rotary angles are computed in at least float32; a theta or a factor beyond these leaves pairs that never turn.
MAX_THETA, MAX_FACTOR = 1e15, 1e6


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than those seen in pretraining.

    `attention_factor` multiplies cos and sin (yarn and longrope); it is resolved when a file is read, so that `mscale`
    and its kin need no fields here. `short_factor` divides each pair's frequency (longrope); `long_factor` is what it
    would be beyond the original context, and is kept for export.
    """

    kind: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def to_hf(self) -> dict[str, Any]:
        names: dict[str, tuple[str, ...]] = {
            "none": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": (
                *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
                *("attention_factor", "truncate"),
            ),
            "longrope": ("factor", "original_max_position_embeddings", "attention_factor"),
        }
        kind = "default" if self.kind == "none" else self.kind
        lists = {"short_factor": [*self.short_factor], "long_factor": [*self.long_factor]}
        own = {name: getattr(self, name) for name in names[self.kind]}
        return {"rope_type": kind} | own | (lists if self.kind == "longrope" else {})


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: the base of the frequencies, and their scaling."""

    theta: float = DEFAULT_THETA
    scaling: RopeScaling = field(default_factory=RopeScaling)

    def to_hf(self) -> dict[str, Any]:
        return {"rope_theta": self.theta, **self.scaling.to_hf()}


def read_rope(fields: Fields, max_position_embeddings: int, theta: float, partial: bool, longrope: bool) -> Rope:
    """The rope of a config.json that has one for all layers; `theta`: its default. `partial`: whether rope may turn
    a part of each head; `longrope`: whether the family has that type."""
    rope: dict[str, Any] = dict(_object(fields, "rope_scaling") or _object(fields, "rope_parameters"))
    for name, value in rope.items():
        if isinstance(value, Mapping):
            fields.refuse(f"separate rope for {name!r}", "all layers must have the same rope")
    for factor in (rope.get("partial_rotary_factor"), fields.get("partial_rotary_factor")):
        if not partial and factor not in (None, 1, 1.0):
            fields.refuse(f"partial_rotary_factor {factor}", "rope must rotate the whole head")
    rope["rope_theta"] = rope.get("rope_theta") or fields.get("rope_theta")
    top = fields.get("original_max_position_embeddings")
    if top is not None:
        rope["original_max_position_embeddings"] = top
    return _of_object(Fields(rope, fields.file), max_position_embeddings, theta, longrope)


def read_ropes(
    fields: Fields, max_position_embeddings: int, theta: float, local_theta: float, local_key: str
) -> tuple[Rope, Rope]:
    """(the rope of layers with full attention, that of windowed ones) of a config.json in which they may differ.
    `local_key`: the windowed layers' theta beside `rope_theta`; empty: there is none."""
    parameters = _object(fields, "rope_parameters")
    full, local = (dict(_object(Fields(parameters, fields.file), f"{kind}_attention")) for kind in ("full", "sliding"))
    full |= _object(fields, "rope_scaling")
    full["rope_theta"] = full.get("rope_theta") or fields.get("rope_theta")
    local["rope_theta"] = local.get("rope_theta") or fields.get(local_key)
    both = (full, theta), (local, local_theta)
    one, other = (_of_object(Fields(x, fields.file), max_position_embeddings, given, False) for x, given in both)
    return one, other


def _object(fields: Fields, name: str) -> Mapping[str, Any]:
    if not isinstance(fields.get(name, {}), Mapping):
        fields.refuse(f"{name} {fields.raw[name]!r}", "it must be an object")
    return fields.get(name, {})


def _of_object(inner: Fields, max_position_embeddings: int, theta: float, longrope: bool) -> Rope:
    theta = inner.number("rope_theta", theta, above=1.0, high=MAX_THETA)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if longrope and kind in ("su", "yarn"):  # early files of Phi-3 call it so
        kind = "longrope"
    known = ("longrope",) if longrope else ("linear", "llama3", "yarn")
    if kind not in known:
        listed = "'longrope'" if longrope else "'linear', 'llama3' and 'yarn'"
        inner.refuse(f"rope_type {kind!r}", f"supported are 'default', {listed}")
    original = inner.integer("original_max_position_embeddings", max_position_embeddings, high=MAX_ID)
    if kind in ("yarn", "longrope") and inner.get("factor") is None:
        factor = max_position_embeddings / original
    elif inner.get("factor") is None:
        raise ValueError(f"{inner.file}: rope scaling {kind!r} needs a factor")
    else:
        factor = inner.number("factor", 1.0, high=MAX_FACTOR)
    if kind == "linear":
        return Rope(theta, RopeScaling("linear", factor))
    read = {"llama3": _llama3, "longrope": _longrope, "yarn": _yarn}[kind]
    return Rope(theta, read(inner, factor, original))


def _llama3(fields: Fields, factor: float, original: int) -> RopeScaling:
    low = fields.number("low_freq_factor", 1.0, high=MAX_FACTOR)
    high = fields.number("high_freq_factor", 4.0, high=MAX_FACTOR)
    if not low < high:
        raise ValueError(f"{fields.file}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
    return RopeScaling("llama3", factor, original, low, high)


def _longrope(fields: Fields, factor: float, original: int) -> RopeScaling:
    lists: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        numbers = fields.get(name)
        if not isinstance(numbers, list) or not all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= MAX_FACTOR for x in numbers
        ):
            fields.wrong(name, f"a list of numbers above 0, and at most {MAX_FACTOR:g}")
        lists[name] = tuple(map(float, numbers))
    implied = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=fields.number("attention_factor", implied, high=MAX_FACTOR),
        **lists,
    )


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
    """The factor on cos and sin that yarn implies where the file gives none."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)
