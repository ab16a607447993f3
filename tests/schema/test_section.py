"""What a section declares, and that bounds hold wherever one stands, on made-up sections."""

from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, ValidationError

from jaxrl.schema.section import Section


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
