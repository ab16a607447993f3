"""Functions as tools: what a model is told of them."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from jaxrl.environments.schemas import tool_schema


def search(query: str, limit: int = 3, unit: Literal["m", "km"] = "m", tags: list[str] | None = None) -> str:
    """Looks places up,
    the nearest first.

    Args:
      query: what to look for, in words
        of any language.
      limit (int): how many at most.
      unit: of the distance.
      tags: that all must have.

    Returns:
      One place a line.
    """
    return query


def test_what_a_model_is_told():
    assert tool_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Looks places up, the nearest first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in words of any language."},
                    "limit": {"type": "integer", "description": "how many at most."},
                    "unit": {"type": "string", "enum": ["m", "km"], "description": "of the distance."},
                    "tags": {
                        "type": "array",
                        "items": {"type": "string"},
                        "nullable": True,
                        "description": "that all must have.",
                    },
                },
                "required": ["query"],
            },
        },
    }


def of_type(hint: Any) -> dict[str, Any]:
    def tool(x: Any) -> None:
        """Does it.

        Args:
          x: it.
        """

    tool.__annotations__["x"] = hint
    found = tool_schema(tool)["function"]["parameters"]["properties"]["x"]
    assert found.pop("description") == "it."
    return found


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (float, {"type": "number"}),
        (Any, {}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (
            list[int] | str | None,
            {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}], "nullable": True},
        ),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
    ],
)
def test_types(hint: Any, expected: dict[str, Any]):
    assert of_type(hint) == expected


@pytest.mark.parametrize("hint", [bytes, tuple[int, str], dict[int, str], Literal[1, "a"]])
def test_types_that_json_does_not_have(hint: Any):
    with pytest.raises(ValueError, match=r"tool: the parameter x has the type .*: it must be str, int"):
        of_type(hint)


def without_type(x) -> None:
    """Does it.

    Args:
      x: it.
    """


def test_a_parameter_without_a_type_is_refused():
    with pytest.raises(ValueError, match=r"^without_type: the parameter x has no type"):
        tool_schema(without_type)
