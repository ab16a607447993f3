"""Conversations with calls of tools, in public layouts: what the prompt has, or where the error is; and what is
answered to what a model says. The right values of `tools.jsonl` were judged by hand.

A row has `messages` (and perhaps `more` of the body) for a server, or `said` for an environment of two tools. `has` and
`lacks` are pieces of the prompt, `param` and `says` of the error; `answers` are the tools' (null: nothing was called).
"""

from __future__ import annotations

import asyncio
import copy
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tiny import write_tiny_model

from jaxrl.data.chat_template import ChatTemplate
from jaxrl.environments.env import Action
from jaxrl.environments.kinds import answers
from jaxrl.serving.app import Routes
from jaxrl.serving.driver import Driver
from jaxrl.serving.generation import ServedModel
from jaxrl.text import TextEngine

ROWS = list(map(json.loads, (Path(__file__).parent / "tools.jsonl").read_text(encoding="utf-8").splitlines()))
HISTORIES = [row for row in ROWS if "messages" in row]
SAYINGS = [row for row in ROWS if "said" in row]
LENGTH = 2048
_AGREE = """
{%- set talk = messages | rejectattr('role', 'in', ['tool', 'system']) | rejectattr('tool_calls') | list %}
{%- for m in talk %}{% if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('roles must alternate') }}
{%- endif %}{% endfor %}"""
_ID = """
{%- macro nine(id) %}{{ id }}{% if id is undefined or id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endmacro %}"""
# in the structure of the published ones
TEMPLATES = {
    "mistral": _AGREE
    + _ID
    + """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' ~ m.content | tojson ~ ', "call_id": "' ~ nine(m.tool_call_id) ~ '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}
{{- (call.function | tojson)[:-1] ~ ', "id": "' ~ nine(call.id) ~ '"}' ~ (']' if loop.last else ', ') }}{% endfor %}</s>
{%- else %}{{ m.content ~ '</s>' }}{% endif %}{% endfor %}""",
    "mistral 2025": _ID
    + """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '[TOOL_RESULTS]' ~ nine(m.tool_call_id) ~ '[TOOL_CONTENT]' ~ m.content ~ '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ m.content }}{% for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' ~ call.function.name ~ '[CALL_ID]' ~ nine(call.id) ~ '[ARGS]' ~ call.function.arguments | tojson }}
{%- endfor %}</s>{% else %}{{ '[INST]' ~ m.content ~ '[/INST]' }}{% endif %}{% endfor %}""",
    "qwen": """
{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}
</tools><|im_end|>\n{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama": """
{%- for m in messages %}
{%- if m.role == 'tool' or m.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' ~ m.content | tojson ~ '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' ~ call.name ~ '", "parameters": ' }}
{{- call.arguments | tojson ~ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}""",
    "thinking": """
{%- for m in messages %}{{ m.role ~ ':' ~ ('(' ~ m.thinking ~ ')' if m.thinking else '') ~ m.content ~ ';' }}
{%- endfor %}""",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TextEngine:
    folder = write_tiny_model(tmp_path_factory.mktemp("cases"), max_position_embeddings=LENGTH)
    return TextEngine.from_path(f"random:{folder}", max_length=LENGTH, num_slots=2, decode_steps=4)


@pytest.mark.parametrize("row", HISTORIES, ids=[row["id"] for row in HISTORIES])
def test_a_history_is_in_the_prompt_or_refused_by_its_place(row: dict[str, Any], engine: TextEngine):
    tokenizer = copy.copy(engine.tokenizer)
    tokenizer.chat_templates = {"default": ChatTemplate(TEMPLATES[row["template"]].strip(), "a template")}
    body = {"messages": row["messages"], "max_tokens": 1, "return_token_ids": True, **row.get("more", {})}

    async def answer() -> Any:
        driver = Driver(engine.engine, 4)
        routes = Routes(ServedModel(driver, tokenizer, LENGTH, (), tokenizer.vocab_size), "tiny")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(driver.close, 5.0)
            app = httpx2.ASGITransport(routes.app())
            client = await stack.enter_async_context(httpx2.AsyncClient(transport=app, base_url="http://server"))
            return (await client.post("/v1/chat/completions", json=body)).json()

    found = asyncio.run(answer())
    if "says" in row:
        assert (found["error"]["param"], row["says"] in found["error"]["message"]) == (row["param"], True), found
    else:
        assert "error" not in found, found
        prompt = tokenizer.decode(found["prompt_token_ids"], skip_special_tokens=False)
        assert [piece for piece in row["has"] if piece not in prompt] == [], prompt
        assert [piece for piece in row.get("lacks", ()) if piece in prompt] == [], prompt


def look(at: str = "nothing") -> str:
    return f"seen {at}"


def add(a: int, b: int = 0) -> int:
    return a + b


@pytest.mark.parametrize("row", SAYINGS, ids=[row["id"] for row in SAYINGS])
def test_what_a_model_says_is_answered(row: dict[str, Any]):
    action = Action.of(row["said"], [{"type": "function", "function": {"name": name}} for name in ("look", "add")])
    if row["answers"] is None:
        assert not action.calls
        assert not action.is_unread
    else:
        result, _ = answers({"look": look, "add": add}, action)
        assert [message["content"] for message in result.messages] == row["answers"]
