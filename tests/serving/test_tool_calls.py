"""Calls of functions in a response's text, in the forms of the families; what cannot be read is text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.data.tool_calls import Call, calls_in, may_begin

NAMES = {"look", "add"}
ONE = '{"name": "look", "arguments": {"at": "é"}}'
LOOK, ADD = Call("look", '{"at": "é"}'), Call("add", '{"a": 1, "b": [2]}')


@pytest.mark.parametrize(
    ("text", "before", "calls"),
    [
        (f"<tool_call>\n{ONE}\n</tool_call>", "", [LOOK]),
        (f"I look.\n<tool_call>{ONE}</tool_call>", "I look.", [LOOK]),
        (
            f'<tool_call>{ONE}</tool_call>\n<tool_call>{{"name":"add","arguments":{{"a":1,"b":[2]}}}}</tool_call>',
            "",
            [LOOK, ADD],
        ),
        (f"I look.<tool_call>{ONE}</tool_call> Done.", "I look. Done.", [LOOK]),
        (f"<tool_call>{ONE}", "", [LOOK]),  # the end token stands where the tag would
        ('{"name": "look", "parameters": {"at": "é"}}', "", [LOOK]),
        (
            '<|python_tag|>{"name": "look", "parameters": {"at": "é"}}; {"name": "add", "parameters": {"a":1,"b":[2]}}',
            "",
            [LOOK, ADD],
        ),
        ('{"name": "look", "arguments": "{\\"at\\": \\"é\\"}"}', "", [LOOK]),
        ('{"name": "look"}', "", [Call("look", "{}")]),
        (f"[TOOL_CALLS][{ONE}]", "", [LOOK]),
        (f'I look. [TOOL_CALLS] [{ONE}, {{"name":"add","arguments":{{"a":1,"b":[2]}}}}]', "I look.", [LOOK, ADD]),
        (f"<|tool_call|>[{ONE}]<|/tool_call|>", "", [LOOK]),
        (f"<|tool_call|>[{ONE}]", "", [LOOK]),
        (f" [{ONE}] ", "", [LOOK]),  # the marks are special tokens, which text may leave out
    ],
)
def test_calls_are_read(text: str, before: str, calls: list[Call]):
    assert calls_in(text, NAMES) == (before, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call",
        '{"name": "other", "parameters": {}}',
        '<tool_call>{"name": "look", "arguments": {"at": NaN}}</tool_call>',
        '{"name": "look", "parameters": {"at": Infinity}}',
        f"<tool_call>{ONE[:-1]}</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>["look"]</tool_call>',
        '{"name": "look", "parameters": [1]}',
        '{"name": "look", "parameters": {}} then',
        "[" * 100_000,
        "[1, 2]",
        "[]",
        "[TOOL_CALLS]",
        f"[TOOL_CALLS][{ONE}, 3]",
        f"[TOOL_CALLS]{ONE}",
        f"[{ONE}] then",
    ],
)
def test_what_is_no_call_is_text(text: str):
    assert calls_in(text, NAMES) == (text, [])


@given(st.text(alphabet="<tool_cal>|[TOLCAS]{}\n x", max_size=30), st.integers(0, 30))
def test_what_is_handed_out_early_is_before_every_call(text: str, cut: int):
    """Whatever follows: text that was handed out stays the beginning of what the response says in the end."""
    early = text[: may_begin(text)]
    lists = (f"[TOOL_CALLS][{ONE}]", f"TOOL_CALLS][{ONE}]", f"tool_call|>[{ONE}]")
    for rest in (f"<tool_call>{ONE}</tool_call>", "", text[cut:], f"tool_call>{ONE}", f"{ONE}", *lists):
        said, calls = calls_in(text + rest, NAMES)
        assert said.startswith(early.rstrip() if calls else early)


def test_arguments_are_json_again():
    _, (call,) = calls_in(f"<tool_call>{ONE}</tool_call>", NAMES)
    assert json.loads(call.arguments) == {"at": "é"}
