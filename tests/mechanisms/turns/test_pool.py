"""Environments in processes of their own: what they do to a turn, and what they cannot do to others."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import from_mapping
from jaxrl.environments.env import Trajectory
from jaxrl.mechanisms.turns.pool import EnvironmentPool, read_answer
from jaxrl.mechanisms.turns.rule import Observed
from jaxrl.types import Prompt, SampleKey

TOOLS = '''
import ctypes, os, sys, time

def act(what: str, value: str = "") -> str:
    """Does it.

    Args:
      what: it is.
      value: of it.
    """
    if what == "say":
        return value
    if what == "stay":
        time.sleep(60)
    elif what == "die":
        os._exit(3)
    elif what == "segfault":
        ctypes.string_at(0)
    elif what == "native":
        sum(iter(int, 1))  # a loop in C
    elif what == "megabyte":
        return "x" * (1 << 20)
    elif what == "memory":
        return str(len(bytearray(1 << 32)))
    elif what == "note":
        with open(value, "a") as file:
            file.write("x")
    elif what == "halves":
        return "\\ud800"
    elif what == "pid":
        return str(os.getpid())
    return what

def _secret(): ...
'''

CLASSES = '''
import os, time

class Box:
    def reset(self, size: int) -> None:
        self.left = size

    def take(self, count: int) -> str:
        """Takes things out of the box.

        Args:
          count: how many.
        """
        if count == 99:
            os._exit(1)
        self.left -= count
        return f"{self.left} left"

    def get_reward(self) -> float:
        return float(self.left == 0)

class Heavy(Box):
    def reset(self, size: int) -> None:
        self.left, self.ballast = size, os.urandom(1 << 20)

class Chat:
    schemas = ()

    def __init__(self, number, seed=0):
        self.number, self.said = number, []

    def initial_observation(self):
        return [{"role": "system", "content": "Play."}, {"role": "user", "content": f"Number {self.number}?"}]

    async def step(self, action):
        from jaxrl.environments.env import StepResult
        self.said.append(action.text)
        if action.text == "wrong":
            return StepResult(next_observation=[{"role": "system", "content": "no"}])
        return StepResult(0.5, len(self.said) == 2, " ".join(self.said), {"said": len(self.said)})

def problem(index, seed):
    return {"number": index + seed}
'''


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[Callable[..., EnvironmentPool]]:
    with ExitStack() as stack:

        def made(text: str = TOOLS, **options: Any) -> EnvironmentPool:
            file = tmp_path / "environment.py"
            file.write_text(text)
            section = {"kind": "tools", "path": str(file), "num_workers": 2, "timeout_s": 1.0} | options
            config = from_mapping({"model": {"path": "m"}, "environment": section, "data": {"train_files": ["x"]}})
            return stack.enter_context(closing(EnvironmentPool(config)))

        yield made


def asked(pool: EnvironmentPool, *turns: tuple[str, bytes | None], row: dict[str, Any] | None = None) -> list[Observed]:
    """Has turns answered at once, each of a sample of its own."""
    pool.schemas(row or {}, "row 1")
    for i, (text, state) in enumerate(turns):
        prompt = Prompt(0, i, (), "", "x", extra=row or {})
        pool.submit(SampleKey(0, i, 0), prompt, text, state)
    found: dict[int, Observed] = {}
    until = time.monotonic() + 60
    while len(found) < len(turns) and time.monotonic() < until:
        found |= {each.key.prompt_index: each for each in pool.completed(0.1)}
    return [found[i] for i in range(len(turns))]


def call(tool: str, **arguments: Any) -> str:
    return f"Well.\n<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def content(answer: Observed) -> str:
    (message,) = answer.messages
    assert message["role"] == "tool"
    return message["content"]


def test_whatever_a_tool_does_the_others_have_their_answers(pool_of: Callable[..., EnvironmentPool]):
    pool = pool_of(max_memory_gib=1.0)
    odd = ["stay", "die", "segfault", "native", "megabyte", "memory", "halves"]
    turns = [
        turn
        for what in odd
        for turn in ((call("act", what=what), None), (call("act", what="say", value=f"not {what}"), None))
    ]
    found = asked(pool, *turns, ("It is done.", b""), (call("nothing"), None))
    for what, answer in zip(odd, found[1::2], strict=False):
        assert content(answer) == f"not {what}"
        assert answer.metrics == {"tool_calls": 1, "tool_errors": 0, "tool_timeouts": 0}
    said = dict(zip(odd, map(content, found[:-2:2]), strict=True))
    assert said["stay"] == "Error: no answer within 1 s"
    assert found[0].metrics == {"tool_calls": 1, "tool_errors": 1, "tool_timeouts": 1}
    assert said["die"] == "Error: the environment's process ended with exit code 3"
    assert said["segfault"].startswith("Error: the environment's process ended with exit code -11")
    assert said["native"] == "Error: no answer within environment.timeout_s (1 s)"
    assert said["megabyte"].endswith(f"... and {(1 << 20) - 65536} more characters")
    assert said["memory"].startswith("Error: MemoryError")
    assert said["halves"] == "?", "half a character is none"
    assert [answer.done for answer in found] == [False] * 14 + [True, False]
    assert content(found[-1]) == "Error: nothing is no tool of this conversation"
    assert {found[0].status, *(each.status for each in found)} == {"ok"}


def test_what_is_cancelled_has_no_answer(pool_of: Callable[..., EnvironmentPool], tmp_path: Path):
    pool = pool_of(num_workers=1)
    pool.schemas({}, "row 1")
    prompt, note = Prompt(0, 0, (), "", "x"), tmp_path / "note"
    pool.submit(SampleKey(0, 0, 0), prompt, call("act", what="stay"), None)
    pool.submit(SampleKey(0, 0, 1), prompt, call("act", what="note", value=str(note)), None)
    pool.cancel([SampleKey(0, 0, 0), SampleKey(0, 0, 1)])
    pool.submit(SampleKey(0, 0, 2), prompt, call("act", what="say", value="here"), None)
    found: list[Observed] = []
    while not found:
        found = pool.completed(0.1)
    assert [each.key.sample_index for each in found] == [2]
    assert not note.exists()


def test_an_object_goes_on_in_any_process(pool_of: Callable[..., EnvironmentPool]):
    pool, row = pool_of(CLASSES, kind="class", name="Box"), {"size": 3, "note": "no parameter of reset"}
    assert [each["function"]["name"] for each in pool.schemas(row, "row 1")] == ["take"]
    (first,) = asked(pool, (call("take", count=1), None), row=row)
    crashed, second = asked(pool, (call("take", count=99), first.state), (call("take", count=2), first.state), row=row)
    assert (content(first), content(second)) == ("2 left", "0 left")
    assert content(crashed).startswith("Error: the environment's process ended")
    assert (crashed.state, crashed.done) == (first.state, False), "as if the call had not been"
    assert crashed.metrics == {"tool_calls": 1, "tool_errors": 1, "tool_crashes": 1}
    last, early = asked(pool, ("Empty.", second.state), ("Enough.", crashed.state), row=row)
    assert (last.done, last.reward, early.done, early.reward) == (True, 1.0, True, 0.0)


def test_columns_of_a_row_are_checked(pool_of: Callable[..., EnvironmentPool]):
    pool = pool_of(CLASSES, kind="class", name="Box")
    for row, words in [
        ({"environment": 3}, "the column 'environment' must name a class, found 3"),
        ({"tools": "take"}, "the column 'tools' must be a list of names, found 'take'"),
        ({"env_args": [1]}, "the column 'env_args' must hold columns by name, found [1]"),
        ({"tools": ["give"]}, "the column 'tools' names 'give', and there are take"),
        ({"environment": "Bag"}, "environment.path: ValueError: environment.name: "),
    ]:
        with pytest.raises(ValueError, match=f"^row 1: {re.escape(words)}"):
            pool.schemas(row, "row 1")
    assert pool.schemas({"environment": ""}, "row 1") == [], "it has no turns"
    for answer in ({"done": 1}, {"done": False, "messages": [], "state": "", "metrics": {}}):
        with pytest.raises(ValueError, match="what its process has sent is no answer"):
            read_answer(SampleKey(0, 0, 0), 0.0, answer)


def test_a_native_environment_makes_its_rows(pool_of: Callable[..., EnvironmentPool]):
    pool = pool_of(CLASSES, kind="native", name="Chat")
    rows = list(pool.problems(0, 1002, seed=7))
    assert rows[1001] == (
        {"number": 1008},
        [{"role": "system", "content": "Play."}, {"role": "user", "content": "Number 1008?"}],
    )
    row = rows[0][0]
    (first,) = asked(pool, ("a", None), row=row)
    second, wrong = asked(pool, ("b", first.state), ("wrong", None), row=row)
    assert (first.messages, first.done, first.reward) == (({"role": "user", "content": "a"},), False, 0.5)
    assert (second.done, second.metrics) == (True, {"said": 2})
    assert (wrong.done, wrong.status) == (True, "error")
    assert "messages with the role user or tool" in wrong.error


GAMES = """
import os, time
import numpy as np
from jaxrl.environments.env import StepResult

class Game:
    def __init__(self, made=None):
        if made == "raises":
            raise RuntimeError("no database")
        self.turns = 0

    def initial_observation(self):
        return "?"

    def step(self, action):
        self.turns += 1
        match action.text:
            case "good":
                return StepResult(1.0, False, "Go on.")
            case "raises":
                raise ConnectionError("the simulator is down")
            case "stays":
                time.sleep(60)
            case "lambda":
                self.kept = lambda: 1
                return StepResult(1.0, False, "?")
            case "metric":
                return StepResult(1.0, True, metrics={"m": float("nan")})
        return StepResult(eval(action.text), True)

"""
MUST = "ValueError: Game.step: reward must be a finite number (at most 3.4e+38, the largest float32), found "


def test_environments_that_fail_say_so_and_no_reward_of_theirs_counts(
    pool_of: Callable[..., EnvironmentPool], tmp_path: Path
):
    """Whatever a step does or returns; and numbers of numpy are numbers."""
    pool = pool_of(GAMES, kind="native", name="Game")
    wrong = {
        "raises": ("error", "ConnectionError: the simulator is down (environment.py, line 21, in step)"),
        "stays": ("timeout", "no answer within environment.timeout_s (1 s)"),
        "lambda": ("error", "ValueError: Game cannot be pickled, as it is between two turns: "),
        "metric": ("error", "metrics must be finite numbers, found {'m': 'nan'}"),
        "None": ("error", f"{MUST}None"),
        "1e308": ("error", f"{MUST}1e+308"),
    }
    rewards = {"1": 1.0, "np.array(0.5)": 0.5, "-3e38": -3e38}
    first, *found = asked(pool, ("good", None), *((text, None) for text in (*wrong, *rewards)))
    assert (first.status, first.done, first.reward) == ("ok", False, 1.0)
    for (text, (status, words)), answer in zip(wrong.items(), found, strict=False):
        assert (answer.status, answer.done, answer.reward) == (status, True, 0.0), text
        assert answer.error.replace(f"{tmp_path}/", "").startswith(words), text
    for (text, reward), answer in zip(rewards.items(), found[len(wrong) :], strict=True):
        assert (answer.status, answer.reward, answer.error) == ("ok", reward, ""), text
    later, unmade = asked(pool, ("raises", first.state), row={}), asked(pool, ("1", None), row={"made": "raises"})
    assert [each.status for each in (*later, *unmade)] == ["error", "error"]
    assert unmade[0].error == f"RuntimeError: no database ({tmp_path}/environment.py, line 9, in __init__)"


GROUPS = (
    CLASSES
    + """
class Contest:
    def __init__(self, size, how=""):
        self.size, self.how = size, how

    async def compute_group_rewards(self, trajectories):
        best = max(each.reward for each in trajectories)
        found = [self.size * (each.reward == best) + len(each.messages) / 10 for each in trajectories]
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "dies":
            os._exit(3)
        return {"": found, "short": found[1:], "nan": [float("nan")] * 2, "none": None}[self.how]
"""
)


def test_trajectories_are_compared(pool_of: Callable[..., EnvironmentPool]):
    """Whatever becomes of one comparison, the others have theirs; a turn that ends meanwhile is not lost."""
    pool = pool_of(GROUPS, kind="class", name="Box", group="Contest", args={"size": 2})
    pool.schemas({"size": 2}, "row 1")
    prompt, said = Prompt(0, 0, (), "", "x", extra={"size": 2}), {"role": "user", "content": "?"}
    pair = [Trajectory((said,) * count, (0.0,), reward, "done") for count, reward in ((2, 0.5), (4, 1.5))]
    pool.submit(SampleKey(0, 0, 0), prompt, call("take", count=1), None)
    hows = ["", "hangs", "dies", "short", "nan", "none", "unknown"]
    found = pool.compared([(Prompt(0, i, (), "", "x", extra={"how": how}), pair) for i, how in enumerate(hows)])
    assert found[0] == pytest.approx([0.2, 2.4])
    assert found[1:3] == [
        "no answer within environment.timeout_s (1 s)",
        "the environment's process ended with exit code 3",
    ]
    assert found[3] == "compute_group_rewards must return 2 finite numbers, one for each trajectory, found [2.4]"
    assert "compute_group_rewards: each reward must be a finite number (at most 3.4e+38, " in found[4]
    assert "TypeError" in found[5]
    assert "KeyError" in found[6]
    answers: list[Observed] = []
    while not answers:
        answers = pool.completed(0.1)
    assert content(answers[0]) == "1 left"
