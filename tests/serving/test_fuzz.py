"""Bodies that nobody meant: each is answered, never by a failure of the server's."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import Client, Talk

from jaxrl.serving.bodies import ChatBody, CompletionBody, GenerateBody, Message, Tool

MESSAGE = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "stop": ["b"], "logprobs": 1, "n": 2}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 3, "stream": True, "stream_options": {}}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 3, "tools": [TOOL], "tool_choice": "auto"}),
    (
        "/v1/chat/completions",
        {
            "messages": [MESSAGE, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}],
            "max_tokens": 3,
            "stream": True,
            "chat_template_kwargs": {},
        },
    ),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "logprobs": 2}}),
]
TEXTS = st.text(max_size=6) | st.sampled_from(["temperature", "n", "seed", "user", "role", "tool", "system"])
NUMBERS = st.integers(-3, 300) | st.integers() | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route, and a body of one to three places away from one that is right; or any bytes."""
    path, right = draw(st.sampled_from(BODIES))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=40))
    body: Any = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, 3))):
        inner: Any = body
        while (keys := list(inner) if isinstance(inner, dict) else list(range(len(inner)))) and draw(st.booleans()):
            deeper = inner[draw(st.sampled_from(keys))]
            if not isinstance(deeper, dict | list):
                break
            inner = deeper
        if isinstance(inner, dict):
            name = draw(st.sampled_from(NAMES) | TEXTS)
            inner.pop(name, None) if draw(st.booleans()) else inner.update({name: draw(JSON)})
        else:
            inner.append(draw(JSON))
    return path, json.dumps(body).encode()


KINDS = (ChatBody, CompletionBody, GenerateBody, Message, Tool)
NAMES = sorted({name for kind in KINDS for name in kind.model_fields})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(asked(), min_size=1, max_size=4))
def test_no_body_breaks_the_server(talk: Talk, tiny_model: Path, requests: list[tuple[str, bytes]]):
    async def conversation(client: Client) -> None:
        for path, content in requests:
            response = await client.post(path, content=content, timeout=60)
            assert response.status_code in (200, 400, 404, 413), (path, content, response.text)
            assert str(tiny_model) not in response.text
            if response.status_code != 200:
                assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert (await client.get("/health")).status_code == 200

    talk(conversation)
