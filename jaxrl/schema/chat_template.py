"""What the variables of a chat template must be, whichever option gives them (`apply_chat_template_kwargs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.schema.declared import shown


def template_problem(variables: Mapping[str, Any]) -> str | None:
    """What is wrong with variables for a chat template, as the end of a sentence that begins with their option; None if
    nothing is."""
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            return f"{name}: the run gives the chat template {name} itself"
    tools = variables.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return f"tools must be a list of JSON schemas, found {shown(tools)}"
    return None
