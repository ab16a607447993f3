"""What a section declares, and that bounds hold wherever one stands, on made-up sections."""

from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import Field, ValidationError

from jaxrl.schema.declared import shown
from jaxrl.schema.section import Section, allowed_text, bounds_text, walk


class Inner(Section):
    """Inside."""

    weight: Annotated[float, Ge(0), "A share."] = 1.0


class Outer(Section):
    """Outside."""

    count: Annotated[int, Ge(1), Lt(9), "Prompts."] = 3
    kind: Annotated[Literal["a", "b"], "Which."] = "a"
    inner: Inner = Field(default_factory=Inner)
    many: Annotated[list[Inner], "More of them."] = []
    share: Annotated[float, Gt(0), Le(1), "A share."] = 1.0


def test_what_is_declared():
    assert [path for path, _ in walk(Outer, "x.")] == ["x.count", "x.kind", "x.inner.weight", "x.many", "x.share"]
    count, share = Outer.model_fields["count"], Outer.model_fields["share"]
    assert (count.description, allowed_text(count), allowed_text(share)) == ("Prompts.", "in [1, 9)", "in (0, 1]")


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Interval(ge=1), "at least 1"),
        (Interval(gt=1), "above 1"),
        (Interval(le=0.5), "at most 0.5"),
        (Interval(lt=0.5), "below 0.5"),
        (Interval(ge=0, lt=1), "in [0, 1)"),
    ],
)
def test_bounds(bounds: Interval, text: str):
    assert bounds_text(bounds) == text


def test_every_problem_is_found_wherever_it_stands():
    values = {"count": 9, "inner": {"weight": -1}, "many": [{}, {"weight": -0.5, "wieght": 1}]}
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(values)
    assert [error["loc"] for error in caught.value.errors()] == [
        ("count",),
        ("inner", "weight"),
        ("many", 1, "weight"),
        ("many", 1, "wieght"),
    ]


def test_what_is_accepted():
    values = {"count": 8, "kind": "b", "inner": None, "many": [{"weight": 2}]}
    assert Outer.model_validate(values) == Outer(count=8, kind="b", many=[Inner(weight=2.0)])


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
