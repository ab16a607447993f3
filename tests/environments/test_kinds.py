"""Episodes of the user's kinds: what a turn is answered, and what of them is kept between two turns."""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from jaxrl.config.functions import UserFile
from jaxrl.data.tool_calls import ToolCall
from jaxrl.environments.env import Action, StepResult
from jaxrl.environments.kinds import FunctionTools, calls_of
from jaxrl.environments.worker import EpisodeScorer

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
    (wrong,) = contents(tools.step({}, b"", Action("", (call("add", b=1),)))[0])
    assert wrong == "Error: add cannot be called so: missing a required argument: 'a'"
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
        ("def f(x: int):\n    'Args:'", "f: the docstring must say what it is for, before Args:"),
        ("def f(x: 'Nothing'):\n    'Does it.'", "f: its types cannot be read: name 'Nothing' is not defined"),
        ("def f(*x: int):\n    'Does it.'", "f: the parameter x must be an ordinary one: a model gives arguments by"),
        ("def f(x: int):\n    'Does it.'", "f: the parameter x has no line under Args: in the docstring"),
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


CLASSES = """
from jaxrl.environments.env import StepResult
class Empty: ...
class Box:
    def reset(self, size): self.things = "x" * size
    def get_reward(self): ...
class Game:
    def step(self, action): return eval(action.text)
maker = lambda: Box()
"""


@pytest.mark.parametrize(
    ("kind", "name", "asked", "words"),
    [
        ("class", "Bax", ("schemas", ""), "environment.name: /made/up.py defines no class 'Bax'"),
        ("class", "maker", ("schemas", ""), "environment.name: /made/up.py: maker must be a class, found <function"),
        ("class", "Empty", ("schemas", ""), "Empty must have a method reset"),
        ("class", "Box", ("compare", {}, ()), "defines no class 'Box' with a method compute_group_rewards"),
        ("class", "Box", ("problems", 0, 1, 0), "defines no function problem(index, seed), which makes rows: give da"),
        ("native", "Game", ("turn", {}, None, "3", 1.0), "Game.step must return a StepResult, found int"),
        ("native", "Game", ("turn", {}, None, "StepResult()", 1.0), "an episode that is not over needs a next_observ"),
        ("native", "Game", ("turn", {}, None, "StepResult(0, 0, [3])", 1.0), "messages with the role user or tool and"),
    ],
)
def test_mistakes_of_a_file_are_said(kind: Any, name: str, asked: tuple[Any, ...], words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        EpisodeScorer(kind, UserFile("/made/up.py", CLASSES), name, {}, group="Box")(asked)
