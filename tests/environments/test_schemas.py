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
    def tool(x) -> None:
        """Does it.

        Args:
          x: it.
        """

    tool.__annotations__ |= {"x": hint} if hint else {}
    return tool_schema(tool)["function"]["parameters"]["properties"]["x"]


@pytest.mark.parametrize("hint", [None, bytes, tuple[int, str], dict[int, str], Literal[1, "a"]])
def test_a_parameter_that_json_has_no_type_for_is_refused(hint: Any):
    with pytest.raises(ValueError, match=f"tool: the parameter x has {'the' if hint else 'no'} type"):
        of_type(hint)


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Any, {}),
        (int | str, {"type": ["integer", "string"]}),
        (dict[str, bool], {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (int | Literal["all"], {"anyOf": [{"type": "integer"}, {"type": "string", "enum": ["all"]}]}),
    ],
)
def test_types_of_a_parameter(hint: Any, schema: dict[str, Any]):
    assert of_type(hint) == schema | {"description": "it."}
