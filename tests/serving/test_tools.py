"""Tools on their way: into the model's own chat template, and back out of what it writes, read by OpenAI's client."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from served import Client, Talk, talk_to
from tiny import write_tiny_model
from turn_templates import renders

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tool_calls import ToolCall
from jaxrl.serving.answers import Chat
from jaxrl.serving.bodies import ChatBody
from jaxrl.serving.driver import Piece
from jaxrl.serving.generation import Choice, Generation, GrowingText
from jaxrl.serving.objects import tool_calls
from jaxrl.text import TextEngine
from jaxrl.types import FinishReason

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
ASKED: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": [LOOK]}
TEMPLATE = """\
{% if tools %}{{ tools | tojson }}{% endif %}\
{% for m in messages %}{{ m.role }}:{{ m.content }}\
{% for call in m.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments | tojson }}{% endfor %};\
{% endfor %}{% if add_generation_prompt %}A:{% endif %}"""


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    folder = write_tiny_model(tmp_path_factory.mktemp("tools"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return talk_to(TextEngine.from_path(f"random:{folder}", max_length=256, num_slots=2, decode_steps=4))


def test_tools_calls_and_results_are_in_the_prompt(talk: Talk, tiny_model: Path):
    tokenizer = Tokenizer.from_path(str(tiny_model))
    turns = [*ASKED["messages"], {"role": "assistant", "tool_calls": [CALL]}]
    turns += [{"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen"}]}]

    async def conversation(client: Client) -> None:
        for choice, told in (("auto", json.dumps([LOOK])), ("none", "")):
            body = {"messages": turns, "tools": [LOOK], "tool_choice": choice, "max_tokens": 1}
            answer = (await client.post("/v1/chat/completions", json=body | {"return_token_ids": True})).json()
            assert (
                tokenizer.decode(answer["prompt_token_ids"]) == told + 'user:hi;assistant:look={"at": "x"};tool:seen;A:'
            )

    talk(conversation)


def test_an_answer_sent_back_has_ids_that_mistrals_templates_take(talk: Talk, tiny_model: Path):
    tokenizer = Tokenizer.from_path(str(tiny_model))
    calls = [ToolCall("look", "{}"), ToolCall("look", "{}"), ToolCall("look", "{}", "a1B2c3D4e")]
    listed = tool_calls(calls, "answer", 0)
    ids = [call["id"] for call in listed]
    assert len({*ids, *(call["id"] for call in tool_calls(calls, "answer", 1))}) == 5
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
    assert ids[2] == "a1B2c3D4e"
    history = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": listed}]
    history += [{"role": "tool", "tool_call_id": each, "content": "x"} for each in ids]
    template = """{% for m in messages %}{{ m.content if m.role == 'user' }}{{ '=' ~ m.tool_call_id if m.tool_call_id }}
{%- for call in m.tool_calls or [] %}{{ call.id }}{% endfor %}{% endfor %}"""
    given = [each.given for each in ChatBody.model_validate({"messages": history}).messages]
    assert renders(tokenizer, template).apply_chat_template(given) == f"hi{''.join(ids)}={'='.join(ids)}"


@pytest.mark.parametrize(
    ("text", "ends", "content", "names", "reason"),
    [
        ('I look.<tool_call>{"name": "look", "arguments": {}}</tool_call>', "stop", "I look.", ["look"], "tool_calls"),
        ('<tool_call>{"name": "look"}</tool_call>' * 2, "stop", None, ["look", "look"], "tool_calls"),
        ('<tool_call>{"name": "other"}</tool_call>', "stop", None, ["other"], "tool_calls"),
        ('{"name": "Bob", "age": 3}', "stop", '{"name": "Bob", "age": 3}', [], "stop"),
        ("look at this", "stop", "look at this", [], "stop"),
        ('<tool_call>{"name": "lo', "length", '<tool_call>{"name": "lo', [], "length"),
        ("a < b, <tool", "stop", "a < b, <tool", [], "stop"),
    ],
)
def test_calls_come_back_whole_and_in_pieces(
    tiny_model: Path, text: str, ends: FinishReason, content: str | None, names: list[str], reason: str
):
    tokenizer = Tokenizer.from_path(str(tiny_model))
    ids = tokenizer.encode(text)
    choice = Choice(0, 0, (5,), GrowingText(tokenizer))
    growth = cast("Generation", SimpleNamespace(choices=[choice], num_prompt_tokens=1))
    chat = Chat(ChatBody.model_validate(ASKED), growth, tokenizer, "tiny", frozenset({"look"}))
    chunks = [*chat.opening()]
    for start in range(0, len(ids), 7):
        cut = np.array(ids[start : start + 7], np.int32)
        piece = Piece(cut, np.zeros(len(cut), np.float32), ends if start + 7 >= len(ids) else None)
        chunks.append(chat.chunk(choice, choice.take(piece), piece))
    message = ChatCompletion.model_validate(chat.whole()).choices[0]
    read = [ChatCompletionChunk.model_validate(chunk).choices[0] for chunk in chunks]
    for found_reason, said, calls in (
        (message.finish_reason, message.message.content, message.message.tool_calls or []),
        (
            read[-1].finish_reason,
            "".join(each.delta.content or "" for each in read) or None,
            [call for each in read for call in each.delta.tool_calls or []],
        ),
    ):
        functions: list[Any] = [cast("Any", call).function for call in calls]
        assert (said, [each.name for each in functions], found_reason) == (content, names, reason)
        assert all(json.loads(each.arguments) == {} for each in functions)
