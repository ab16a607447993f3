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
    properties: dict[str, dict[str, Any]] = {
        "query": {"type": "string", "description": "what to look for, in words of any language."},
        "limit": {"type": "integer", "description": "how many at most."},
        "unit": {"type": "string", "enum": ["m", "km"], "description": "of the distance."},
        "tags": {"type": "array", "items": {"type": "string"}, "nullable": True, "description": "that all must have."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    told = {"name": "search", "description": "Looks places up, the nearest first.", "parameters": parameters}
    assert tool_schema(search) == {"type": "function", "function": told}


@pytest.mark.parametrize("hint", [None, bytes, tuple[int, str], dict[int, str], Literal[1, "a"]])
def test_a_parameter_that_json_has_no_type_for_is_refused(hint: Any):
    def tool(x) -> None:
        """Does it.

        Args:
          x: it.
        """

    tool.__annotations__ |= {"x": hint} if hint else {}
    with pytest.raises(ValueError, match=f"tool: the parameter x has {'the' if hint else 'no'} type"):
        tool_schema(tool)
