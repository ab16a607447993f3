"""Calls of functions in a response's text, in the forms of the families; what cannot be read is text."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.data.tool_calls import ToolCall, calls_in, may_begin, seems_to_call

NAMES = {"look", "add"}
ONE = '{"name": "look", "arguments": {"at": "é"}}'
OTHER = ToolCall("other", "{}")
LOOK, ADD = ToolCall("look", '{"at": "é"}'), ToolCall("add", '{"a": 1, "b": [2]}')


@pytest.mark.parametrize(
    ("text", "before", "calls"),
    [
        (f"<tool_call>\n{ONE}\n</tool_call>", "", [LOOK]),
        (
            f'<tool_call>{ONE}</tool_call>\n<tool_call>{{"name":"add","arguments":{{"a":1,"b":[2]}}}}</tool_call>',
            "",
            [LOOK, ADD],
        ),
        (f"I look.<tool_call>{ONE}</tool_call> Done.", "I look. Done.", [LOOK]),
        ('{"name": "look", "parameters": {"at": "é"}}', "", [LOOK]),
        (
            '<|python_tag|>{"name": "look", "parameters": {"at": "é"}}; {"name": "add", "parameters": {"a":1,"b":[2]}}',
            "",
            [LOOK, ADD],
        ),
        ('{"name": "look", "arguments": "{\\"at\\": \\"é\\"}"}', "", [LOOK]),
        (f'I look. [TOOL_CALLS] [{ONE}, {{"name":"add","arguments":{{"a":1,"b":[2]}}}}]', "I look.", [LOOK, ADD]),
        (f"<|tool_call|>[{ONE}]<|/tool_call|>", "", [LOOK]),
        (f" [{ONE}] ", "", [LOOK]),  # the marks are special tokens, which text may leave out
        (f"functools[{ONE}]", "", [LOOK]),
        ('I look.[TOOL_CALLS]look{"at": "é"}[TOOL_CALLS]add[ARGS]{"a":1,"b":[2]}', "I look.", [LOOK, ADD]),
        ('[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS] {"at": "é"}', "", [replace(LOOK, id="a1B2c3D4e")]),
        # of a function that does not exist (tests/cases/tools.jsonl has more): where marks, or names, say it is a call
        (f'[{ONE}, {{"name": "other", "arguments": {{}}}}]', "", [LOOK, OTHER]),
        # without arguments
        *((f'{{"name": "look", "arguments": {each}}}', "", [ToolCall("look", "{}")]) for each in ("null", '""', '" "')),
        ('look{"at": "é"}add{"a":1,"b":[2]}', "", [LOOK, ADD]),
        ("<function_calls>\nlook(at='é')\nadd(a=1, b=[2])\n</function_calls>", "", [LOOK, ADD]),
        ("I look.\n<function_calls>look(at='é')</function_calls> Done.", "I look.\n Done.", [LOOK]),
        ("<function_calls>\n  look(at='é')", "", [LOOK]),  # the end token stands where the tag would
        ('As <code>x</code>: <code>look(at="é")</code>', "As <code>x</code>:", [LOOK]),
        *(  # marks inside of arguments
            (call.replace("é", inside), "", [ToolCall("look", f'{{"at": "{inside}"}}')])
            for call in (ONE, f"[TOOL_CALLS][{ONE}]", '[TOOL_CALLS]look{"at": "é"}', f"<tool_call>{ONE}</tool_call>")
            for inside in (
                *("<code>look(at=1)</code>", "<function_calls>look(at=1)</function_calls>", "<|tool_call|>"),
                *("<tool_call>", "</tool_call>", "[TOOL_CALLS]"),
            )
        ),
    ],
)
def test_calls_are_read(text: str, before: str, calls: list[ToolCall]):
    assert calls_in(text, NAMES) == (before, calls)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        '{"name": "other"}',
        f'<tool_call>{{"name": "{"o" * 65}", "arguments": {{}}}}</tool_call>',
        '{"name": "look", "arguments": "[1]"}',
        '<tool_call>{"name": "look", "arguments": {"at": NaN}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": "\\ud800"}}</tool_call>',
        f"<tool_call>{ONE[:-1]}</tool_call>",
        '{"name": "look", "parameters": {}} then',
        "[" * 100_000,
        f"[TOOL_CALLS][{ONE}, 3]",
        '[TOOL_CALLS]look[ARGS]["at"]',
        '[TOOL_CALLS]look[ARGS]{"at": "é"} then',
        'look {"at": "é"}',
        *(
            f"<function_calls>{each}</function_calls>"
            for each in (
                *("", "look", "look('é')", "look(**{'at': 1})", "look(at=1, at=2)", "look(at=here)", "look(at=b'1')"),
                *("look(at=add(a=1))", "look(at=1 + 1)", "look(at=f'{1}')", "look(at={1: 2})", "look(at=1j)"),
                *("look(at='\\ud800')", "look(at='", "look(at=1); import os", "x = look(at=1)", "self.look(at=1)"),
                *(f"look(at={'[' * 10_000})", f"look(at={'9' * 5_000})", "look(at='\0')"),
            )
        ),
        "<code>look(at=1)</code> does it",
    ],
)
def test_what_is_no_call_is_text(text: str):
    assert calls_in(text, NAMES) == (text, [])


@pytest.mark.parametrize("around", ["{}", "[{}]", "[TOOL_CALLS][{}]", "<tool_call>{}</tool_call>"])
def test_arguments_that_are_nested_too_deep_for_json_are_no_call(around: str):
    """Where they can just be read, and not be written again."""
    for depth in (*range(sys.getrecursionlimit() - 80, sys.getrecursionlimit() + 20), 10_000, 200_000):
        text = around.replace("{}", ONE.replace('"é"', "[" * depth + "]" * depth))
        said, calls = calls_in(text, NAMES)
        assert calls or said == text


def test_python_values_are_those_of_json():
    text = """<function_calls>
look(a=None, b=[true, False, null], c={'x': -1.5, "y": {}}, d='it\\'s \\n "', e="\\d\\\\d", f='''one
  two''', g="é" "f", h=12345678901234567890)
</function_calls>"""
    _, (call,) = calls_in(text, NAMES)
    wanted = {"a": None, "b": [True, False, None], "c": {"x": -1.5, "y": {}}, "d": "it's \n \"", "e": "\\d\\d"}
    assert json.loads(call.arguments) == wanted | {"f": "one\n  two", "g": "éf", "h": 12345678901234567890}


@given(st.text(alphabet="<tool_cal>|[TOLCAS]{}()='\n xfunid", max_size=30), st.integers(0, 30))
def test_what_is_handed_out_early_is_before_every_call(text: str, cut: int):
    """Whatever follows: text that was handed out stays the beginning of what the response says in the end."""
    early = text[: may_begin(text)]
    rests = (f"[TOOL_CALLS][{ONE}]", f"TOOL_CALLS][{ONE}]", f"tool_call|>[{ONE}]")
    rests += ('[TOOL_CALLS]look[ARGS]{"at": 1}', 'look{"at": 1}', 'ok{"at": 1}', '{"at": 1}', f"tools[{ONE}]")
    rests += ('other{}look{"at": 1}', '{}look{"at": 1}', '<tool_call>{"name": "other"}</tool_call>')
    rests += ("<function_calls>look(at=1)", "function_calls>look(at=1)", "code>look(at=1)</code>")
    for rest in (f"<tool_call>{ONE}</tool_call>", "", text[cut:], f"tool_call>{ONE}", f"{ONE}", *rests):
        said, calls = calls_in(text + rest, NAMES)
        assert said.startswith(early.rstrip() if calls else early)


def test_what_was_meant_for_a_call_is_told_from_text():
    """For what is answered to a call that cannot be read."""
    meant = ("<function_calls>look(1)", "[TOOL_CALLS]look", "<|tool_call|>", "<tool_call>", 'functools[{"name"')
    assert all(map(seems_to_call, meant))
    assert not any(map(seems_to_call, ("Write <code>x</code>", "look at this", "functools has a cache")))


def test_thoughts_are_handed_out_and_call_nothing():
    thought = "<think>\nA <tool_call> is due.\n</think>\n\n"
    assert may_begin(thought + '<tool_call>{"name"') == len(thought)
    assert may_begin(thought + "It is 5.") == len(thought + "It is 5.")
    assert not seems_to_call(thought + "It is 5.")
    assert may_begin("</think>\n" * 20_000) == len("</think>\n" * 20_000)
