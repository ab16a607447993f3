"""Episodes of the user's kinds: what a turn is answered, and what of them is kept between two turns."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest

from jaxrl.data.tool_calls import ToolCall
from jaxrl.environments.env import Action, StepResult
from jaxrl.environments.kinds import FunctionTools, calls_of

TOOLS = '''
import threading
_met = threading.Barrier(2)

def add(a: int, b: int = 1) -> int:
    """Adds numbers.

    Args:
      a: one.
      b: the other.
    """
    return a + b

def meet(name: str) -> str:
    """Waits for another one.

    Args:
      name: who.
    """
    _met.wait(10)
    return name

async def later(text: str) -> str:
    """Says it.

    Args:
      text: what.
    """
    import asyncio
    await asyncio.sleep(0.01)
    return text

def _hidden(): ...

def problem(index, seed): ...
'''
COUNTS = {"tool_errors": 0, "tool_timeouts": 0}


def module_of(text: str) -> ModuleType:
    module = ModuleType("made_up_tools")
    sys.modules[module.__name__] = module
    exec(text, module.__dict__)
    return module


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool, json.dumps(arguments))


@pytest.fixture
def tools() -> FunctionTools:
    return FunctionTools(module_of(TOOLS), TOOLS)


def contents(result: StepResult) -> list[str]:
    assert all(message["role"] == "tool" for message in result.messages)
    return [message["content"] for message in result.messages]


def test_functions_are_called_side_by_side_and_answered_in_order(tools: FunctionTools):
    assert [each["function"]["name"] for each in tools.schemas] == ["add", "meet", "later"]
    calls = (call("meet", name="a"), call("meet", name="b"), call("add", a=1), call("add", a=1, b=41))
    result, state = tools.step({}, None, Action("", calls))
    assert contents(result) == ["a", "b", "2", "42"]
    assert (result.episode_done, state, result.metrics) == (False, b"", COUNTS | {"tool_calls": 4})
    assert tools.step({}, b"", Action("it is 42")) == (StepResult(episode_done=True, metrics={"tool_calls": 0}), b"")


OBJECT = '''
import functools
from operator import add  # imported: no tool

class Search:
    def __call__(self, query: str, top: int = 3) -> str:
        """Looks it up.

        Args:
          query: what.
          top: how many.
        """
        return f"{query} {top}"

search = functools.lru_cache(maxsize=None)(Search())
few = functools.partial(Search(), top=1)
'''


def test_what_wrappers_and_objects_make_is_a_tool():
    tools = FunctionTools(module_of(OBJECT), OBJECT)
    said = {each["function"]["name"]: [*each["function"]["parameters"]["properties"]] for each in tools.schemas}
    assert said == {"search": ["query", "top"], "few": ["query"]}
    result, _ = tools.step({}, None, Action("", (call("search", query="b"), call("few", query="c"))))
    assert contents(result) == ["b 3", "c 1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(): ...\nf = 3", "f is a int, which cannot be called: begin its name with _"),
        ("class Box: ...", "must define a function"),
        ("def f(): ...", "f has no docstring"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        FunctionTools(module_of(text), text)


def test_functions_of_a_program_share_a_loop():
    """What one has opened (a client's connections) another one goes on with."""
    made = "import asyncio\nasync def run():\n    return asyncio.get_running_loop()\nschemas = 3\n"
    call = calls_of(module_of(made))
    assert call("run", {}) is call("run", {"row": 1})
    assert (call("schemas", {}), call("problem", {})) == (3, None)
