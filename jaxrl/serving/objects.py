"""Parts of OpenAI's objects that are made without the packages of a server: of calls, and of errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl.data.tool_calls import ToolCall, call_id


def tool_calls(calls: Sequence[ToolCall], *message: Any) -> list[dict[str, Any]]:
    """As an assistant's message has them; `message` says which one it is, as ids of calls differ."""
    return [
        {
            "id": call.id or call_id(*message, number),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
