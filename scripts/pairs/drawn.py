"""Pairs of an answer and a reference, drawn from a grammar that knows which of them are the same.

`draw(count, seed)` gives as many pairs, the kinds in turn, half of them right. A right pair is one value in two
spellings; a wrong one is the value and another that is nearly it (a digit, a sign, a bracket, a place, an element).
What is right is known by construction: values are exact fractions, or, for expressions, numbers that Python's `cmath`
gives for both spellings at the same points. The rules that decide what a spelling stands for are those of
docs/your-reward.md (percentages, rounded decimals, units).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pairs import expressions, numbers, several, units
from pairs.spelling import Drawn

KINDS: dict[str, Callable[[random.Random, bool], Drawn]] = {
    "integers": numbers.integers,
    "decimals": numbers.decimals,
    "fractions": numbers.fractions,
    "percents": numbers.percents,
    "powers": numbers.powers,
    "roots": numbers.roots,
    "sets": several.sets,
    "intervals": several.intervals,
    "tuples": several.tuples,
    "units": units.units,
    "degrees": units.degrees,
    "scientific": numbers.scientific,
    "expressions": expressions.expressions,
}


@dataclass(frozen=True, slots=True)
class Pair:
    kind: str
    answer: str
    reference: str
    right: bool
    how: str


def draw(count: int, seed: int) -> Iterator[Pair]:
    rng = random.Random(seed)
    for i in range(count):
        kind = list(KINDS)[i % len(KINDS)]
        right = i // len(KINDS) % 2 == 0
        answer, reference, how = KINDS[kind](rng, right)
        yield Pair(kind, answer, reference, right, how)
