"""What a calibration may be fitted to (`facts.yaml`), as `FACTS` and `SETUPS` by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Fact:
    """One published number, or a range of which any value agrees (`low` == `high` for a number); see facts.yaml."""

    name: str
    paper: str
    where: str
    unit: str
    low: float
    high: float
    role: Literal["fit", "check", "input", "unused"] = "fit"
    tolerance: float = 0.05
    note: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a paper ran a baseline. `tp` is of rollout; `max_tokens` counts response tokens; groups of `group_size`."""

    where: str
    model: str
    hardware: str
    num_devices: int
    tp: int
    num_prompts: int
    group_size: int
    max_tokens: int
    note: str = ""


_WRITTEN = yaml.safe_load((HERE / "facts.yaml").read_text(encoding="utf-8"))


def _fact(paper: str, where: str, name: str, entry: dict) -> Fact:
    (unit, value), *more = entry.items()
    low, high = map(float, value if isinstance(value, list) else (value, value))
    given = dict(more)
    given["note"] = re.sub(r"\{(\w+)\}", lambda found: _WRITTEN["sources"][found[1]], given.get("note", ""))
    return Fact(f"{paper.lower()}.{name}", paper, where, unit, low, high, **given)


FACTS = {
    fact.name: fact
    for paper, places in _WRITTEN["facts"].items()
    for where, entries in places.items()
    for fact in (_fact(paper, where, name, entry) for name, entry in entries.items())
}
SETUPS = {name: Setup(*fields) for name, fields in _WRITTEN["setups"].items()}
