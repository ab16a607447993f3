"""How declarations are read, and that bounds hold wherever a section stands, on made-up sections."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt

from jaxrl.config import ConfigError
from jaxrl.config.mapping import build
from jaxrl.schema.declared import bounds_text, declared, is_within, shown, walk


@dataclass(frozen=True)
class Inner:
    """Inside."""

    weight: Annotated[float, Ge(0), "A share."] = 1.0


@dataclass(frozen=True)
class Outer:
    """Outside."""

    count: Annotated[int, Ge(1), Lt(9), "Prompts."] = 3
    kind: Annotated[Literal["a", "b"], "Which."] = "a"
    inner: Inner = field(default_factory=Inner)
    many: Annotated[list[Inner], "More of them."] = field(default_factory=list)


def test_what_is_declared():
    found = declared(Outer)
    assert list(found) == ["count", "kind", "inner", "many"]
    assert (found["count"].type, found["count"].bounds, found["count"].doc) == (int, Interval(ge=1, lt=9), "Prompts.")
    assert (found["kind"].type, found["kind"].bounds) == (Literal["a", "b"], None)
    assert (found["inner"].type, found["inner"].is_section, found["many"].is_section) == (Inner, True, False)


def test_the_options_under_a_section():
    assert [path for path, _ in walk(Outer, "x.")] == ["x.count", "x.kind", "x.inner.weight", "x.many"]


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (Interval(ge=1), "at least 1", 1, 0),
        (Interval(gt=1), "above 1", 2, 1),
        (Interval(le=0.5), "at most 0.5", 0.5, 0.6),
        (Interval(lt=0.5), "below 0.5", 0.4, 0.5),
        (Interval(gt=0, le=1), "in (0, 1]", 1, 0),
        (Interval(ge=0, lt=1), "in [0, 1)", 0, 1),
        (Interval(ge=0, le=1), "in [0, 1]", 1, 1.5),
        (Interval(gt=0, lt=1), "in (0, 1)", 0.5, 0),
    ],
)
def test_bounds(bounds, text, inside, outside):
    assert bounds_text(bounds) == text
    assert is_within(inside, bounds)
    assert not is_within(outside, bounds)
    assert not is_within(float("nan"), bounds)


def test_marks_that_stand_apart_are_one_interval():
    @dataclass
    class Both:
        share: Annotated[float, Gt(0), Le(1), "A share."] = 1.0

    assert declared(Both)["share"].bounds == Interval(gt=0, le=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 9}, "s.count must be in [1, 9), found 9"),
        ({"inner": {"weight": -1}}, "s.inner.weight must be at least 0, found -1.0"),
        ({"many": [{}, {"weight": -0.5}]}, "s.many[1].weight must be at least 0, found -0.5"),
        ({"many": [{"wieght": 1}]}, "unknown option s.many[0].wieght: did you mean s.many[0].weight?"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(Outer, values, "s")


def test_what_is_accepted():
    values = {"count": 8, "kind": "b", "inner": {"weight": 0}, "many": [{"weight": 2}, None]}
    assert build(Outer, values, "s") == Outer(8, "b", Inner(0.0), [Inner(2.0), Inner()])


def test_an_option_without_a_text_is_a_mistake():
    with pytest.raises(AssertionError, match="must have one text"):
        declared(dataclass(type("Mute", (), {"__annotations__": {"n": Annotated[int, Ge(0)]}, "n": 0})))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("four", "'four'"),
        ({"b": 1, "a": {"c": None}}, "{'b': 1, 'a': {'c': None}}"),
        (dict.fromkeys(range(9), 0), "{0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0, ...}"),
        ({"a": {"b": {"c": {"d": 1}, "e": {}}}}, "{'a': {'b': {'c': {...}, 'e': {}}}}"),
        ([0] * 9, "[0, 0, 0, 0, 0, 0, 0, 0, ...]"),
        ("x" * 200, f"'{'x' * 47}...{'x' * 48}'"),
        (10**400, "a number of 1329 bits"),
    ],
)
def test_what_a_sentence_shows_of_a_value(value, text):
    assert shown(value) == text
