"""Episodes of the user's kinds: what a turn is answered, and what of them is kept between two turns."""

from __future__ import annotations

import json
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from jaxrl.data.tool_calls import ToolCall
from jaxrl.environments.env import Action, StepResult
from jaxrl.environments.kinds import MAX_ANSWER, FunctionTools, MethodTools, NativeEpisodes, calls_of

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

def shout(text: str) -> str:
    """Says it often.

    Args:
      text: what.
    """
    return text * 100_000

def fail(why: str) -> None:
    """Fails.

    Args:
      why: the reason.
    """
    raise KeyError(why)

def stay() -> None:
    """Waits for ever."""
    threading.Event().wait(30)

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
    assert [each["function"]["name"] for each in tools.schemas] == ["add", "meet", "shout", "fail", "stay", "later"]
    calls = (call("meet", name="a"), call("meet", name="b"), call("add", a=1), call("add", a=1, b=41))
    result, state = tools.step({}, None, Action("", calls))
    assert contents(result) == ["a", "b", "2", "42"]
    assert (result.episode_done, state, result.metrics) == (False, b"", COUNTS | {"tool_calls": 4})
    assert tools.step({}, b"", Action("it is 42")) == (StepResult(episode_done=True, metrics={"tool_calls": 0}), b"")


def test_a_call_that_fails_is_answered_with_what_went_wrong(tools: FunctionTools):
    calls = (call("fail", why="no"), call("add", c=3), call("shout", text="ab"))
    result, _ = tools.step({}, None, Action("", calls))
    failed, wrong, long = contents(result)
    assert failed == "Error: KeyError: 'no'"
    assert wrong == "Error: add cannot be called so: missing a required argument: 'a'"
    assert long.endswith(f"... and {200_000 - MAX_ANSWER // 3} more characters")
    assert result.metrics == COUNTS | {"tool_calls": 3, "tool_errors": 2}
    assert not tools.has_hung


def test_a_call_that_takes_too_long_leaves_the_others_their_answers(tools: FunctionTools):
    calls = (call("add", a=1), call("stay"), call("later", text="async"))
    result, _ = tools.step({}, None, Action("", calls), timeout_s=0.3)
    assert contents(result) == ["2", "Error: no answer within 0.3 s", "async"]
    assert result.metrics == {"tool_calls": 3, "tool_errors": 1, "tool_timeouts": 1}
    assert tools.has_hung, "its thread goes on"


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
        ("class Box: ...", "must define a function .* environment.kind=class, environment.name=Box"),
        ("def f(): ...", "f has no docstring"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        FunctionTools(module_of(text), text)


class Counter:
    """Counts up to the row's limit."""

    def reset(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def up(self, by: int) -> str:
        """Counts.

        Args:
          by: how many.
        """
        self.count += by
        return f"{self.count} of {self.limit}"

    def get_reward(self) -> float:
        return self.count / self.limit


def test_an_object_goes_on_from_its_bytes():
    counts, row = MethodTools(Counter), {"limit": 10}
    assert [each["function"]["name"] for each in counts.schemas] == ["up"]
    result, state = counts.step(row, None, Action("", (call("up", by=2), call("up", by=3))))
    assert contents(result) == ["2 of 10", "5 of 10"]
    again, other = counts.step(row, state, Action("", (call("up", by=4),)))
    assert contents(again) == ["9 of 10"]
    assert contents(counts.step(row, state, Action("", (call("up", by=1),)))[0]) == ["6 of 10"], "bytes do not change"
    end, _ = counts.step(row, other, Action("done"))
    assert (end.reward, end.episode_done) == (0.9, True)


class Guess:
    """Number guessing, with hints."""

    def __init__(self, number: int) -> None:
        self.number, self.turns = number, 0

    def step(self, action: Action) -> Any:
        self.turns += 1
        match action.text:
            case str(text) if text.isdigit():
                found = int(text)
                if found == self.number:
                    return StepResult(1.0, True, metrics={"turns": self.turns})
                return StepResult(0.0, False, "higher" if found < self.number else "lower")
            case "lock":
                self.lock = threading.Lock()
                return StepResult(next_observation="locked")
            case "nothing":
                return StepResult()
            case "nan":
                return StepResult(float("nan"), True)
            case "system":
                return StepResult(next_observation=[{"role": "system", "content": "x"}])
        return None


def test_a_native_environment():
    episodes = NativeEpisodes(Guess, "Guess")  # pyright: ignore[reportArgumentType]
    row, state, answers = {"number": 5}, None, []
    for text in ("3", "8", "5"):
        result, state = episodes.step(row, state, Action(text))
        answers += [message["content"] for message in result.messages]
    assert answers == ["higher", "lower"]
    assert (result.reward, result.episode_done, result.metrics) == (1.0, True, {"turns": 3})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("?", "Guess.step must return a StepResult, found NoneType"),
        ("nothing", "an episode that is not over needs a next_observation"),
        ("nan", "Guess.step: reward must be a finite number .*, found nan"),
        ("system", "messages with the role user or tool"),
        ("lock", "Guess cannot be pickled, as it is between two turns: cannot pickle"),
    ],
)
def test_answers_that_are_none(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        NativeEpisodes(Guess, "Guess").step({"number": 5}, None, Action(text))  # pyright: ignore[reportArgumentType]


def test_functions_of_a_program_share_a_loop():
    """What one has opened (a client's connections) another one goes on with."""
    made = "import asyncio\nasync def run():\n    return asyncio.get_running_loop()\nschemas = 3\n"
    call = calls_of(module_of(made))
    assert call("run", {}) is call("run", {"row": 1})
    assert (call("schemas", {}), call("problem", {})) == (3, None)
