"""Environments in a Python file: functions as tools, a class with methods as tools, an `Env`, or a program.

The kinds share a form: `schemas` says what the model may call, `first_messages` what it is asked in a row of the
environment's own, and `step` answers a turn (state None: the first) and returns the state after it, as bytes, so that
another process may answer the next turn. `has_hung`: a call did not end in time and still runs, so this process must
not be used again.

Source: a class with `reset(**row)` and `get_reward()` is what TRL's `environment_factory` takes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import pickle
import re
import subprocess
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl.data.tool_calls import ToolCall, call_id
from jaxrl.environments import program_server
from jaxrl.environments.env import Action, Message, Schema, StepResult, as_messages, checked
from jaxrl.environments.program_server import accepted
from jaxrl.environments.schemas import signature_of, tool_schema
from jaxrl.rewards.request import as_reward

MAX_AT_ONCE = 16
"""Calls of one turn that run at the same time."""
MAX_ANSWER = 65_536
"""Characters of a turn's answers, divided among its calls; an answer says how much of it was left out."""
Row = Mapping[str, Any]
_NO_CALLS = {"tool_calls": 0.0}  # so that a run in which nothing is called shows 0


class FunctionTools:
    """Functions as tools. An episode ends with the first turn that calls none, and adds no reward. A call that takes
    longer than `timeout_s` is answered with an error; 0: no limit."""

    def __init__(self, module: ModuleType, text: str) -> None:
        self._functions = public_functions(module, text)
        if not self._functions:
            raise ValueError(f"{module.__name__} must define a function without _ before its name, as a tool")
        self.schemas = [tool_schema(function, name) for name, function in self._functions.items()]
        self.has_hung = False

    def step(self, row: Row, state: bytes | None, action: Action, timeout_s: float = 0.0) -> tuple[StepResult, bytes]:
        if not (action.calls or action.is_unread):
            return StepResult(episode_done=True, metrics=_NO_CALLS), b""
        result, in_time = answers(self._functions, action, timeout_s)
        self.has_hung = not in_time
        return result, b""

    def first_messages(self, row: Row) -> tuple[Message, ...]:
        return as_messages(row["question"])


class MethodTools:
    """A class whose public methods are tools: `reset(**row)` begins an episode, and `get_reward()` scores it after the
    first turn that calls nothing. Calls of a turn share the object, and so run one after another."""

    has_hung = False

    _OWN = ("reset", "get_reward")

    def __init__(self, made: type) -> None:
        self._made = made
        members = inspect.getmembers(made, lambda value: callable(value) and not inspect.isclass(value))
        names = [name for name, _ in members if not name.startswith("_")]
        for name in self._OWN:
            if name not in names:
                raise ValueError(f"{made.__name__} must have a method {name}")
        self._names = [name for name in names if name not in self._OWN]
        alone = {name for name in names if isinstance(inspect.getattr_static(made, name), staticmethod | classmethod)}
        self.schemas = [tool_schema(getattr(made, name), name, is_method=name not in alone) for name in self._names]

    def step(self, row: Row, state: bytes | None, action: Action, timeout_s: float = 0.0) -> tuple[StepResult, bytes]:
        episode = self._begun(row) if state is None else pickle.loads(state)
        if not (action.calls or action.is_unread):
            reward = as_reward(result_of(episode.get_reward()), f"{self._made.__name__}.get_reward must return")
            return StepResult(reward, episode_done=True, metrics=_NO_CALLS), b""
        methods = {name: getattr(episode, name) for name in self._names}
        result, _ = answers(methods, action, at_once=1)  # a thread that went on would change what is pickled
        return result, _pickled(episode)

    def first_messages(self, row: Row) -> tuple[Message, ...]:
        return as_messages(row["question"])

    def _begun(self, row: Row) -> Any:
        episode = self._made()
        result_of(episode.reset(**accepted(episode.reset, row)))
        return episode


class NativeEpisodes:
    """An `Env`: a class, or a function that makes one, called with the columns of the row that it takes."""

    has_hung = False

    def __init__(self, make: Callable[..., Any], name: str) -> None:
        self._make, self._name = make, name
        self.schemas: list[Schema] = list(getattr(make, "schemas", ()))

    def step(self, row: Row, state: bytes | None, action: Action, timeout_s: float = 0.0) -> tuple[StepResult, bytes]:
        env = self._begun(row) if state is None else pickle.loads(state)
        result = checked(result_of(env.step(action)), self._name)
        return result, b"" if result.episode_done else _pickled(env)

    def first_messages(self, row: Row) -> tuple[Message, ...]:
        return as_messages(self._begun(row).initial_observation())

    def _begun(self, row: Row) -> Any:
        return self._make(**accepted(self._make, row))


class Program:
    """A file whose function drives the policy itself (`jaxrl.mechanisms.turns.agents`). `call`: calls a function of the
    file by its name, with arguments by name. `args`: `environment.args`, and under `id` `environment.id`."""

    def __init__(self, call: Callable[[str, Row], Any], args: Row) -> None:
        self._call, self._args = call, args
        self.schemas: list[Schema] = list(call("schemas", args) or ())

    @property
    def has_hung(self) -> bool:
        return isinstance(self._call, OtherPython) and self._call.has_ended

    def first_messages(self, row: Row) -> tuple[Message, ...]:
        return as_messages(row["messages"] if "messages" in row else row["question"])

    def problem(self, index: int, seed: int) -> dict[str, Any]:
        return self._call("problem", {"index": index, "seed": seed, **self._args})

    def run(self, name: str, row: Row, base_url: str, api_key: str) -> Any:
        """Plays a trajectory; returns its reward, or a mapping with it under `score`."""
        found = self._call(name, {"row": row, "base_url": base_url, "api_key": api_key, **self._args})
        if found is None:
            raise ValueError(f"the file has no function {name!r}, or it has returned no reward")
        return found


Episodes = FunctionTools | MethodTools | NativeEpisodes


def calls_of(module: ModuleType) -> Callable[[str, Row], Any]:
    """A callable that calls a file's functions in this process; a missing function returns None."""
    loop = asyncio.Runner()  # one for all: what is kept between calls, such as connections, may belong to it

    def call(name: str, given: Row) -> Any:
        return program_server.called(getattr(module, name, None), given, loop)

    weakref.finalize(call, loop.close)
    return call


class OtherPython:
    """Calls functions of a file under another Python, in a process that stays (`jaxrl.environments.program_server`).
    Raises ValueError if it cannot be started, or a call fails there."""

    def __init__(self, python: str, path: str) -> None:
        command = [python, "-P", str(Path(program_server.__file__)), path]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise ValueError(f"environment.python: {python} cannot be run: {error}") from None

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.communicate()  # it exits at the end of its input

    def __call__(self, name: str, given: Row) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, "given": given}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"the process of environment.python ended with status {self._process.wait()}")
        found = json.loads(line)
        if "error" in found:
            raise ValueError(found["error"])
        return found["value"]


def public_functions(module: ModuleType, text: str) -> dict[str, Callable[..., Any]]:
    """The functions that a file defines, also decorated and partial ones, and its callable instances of classes that it
    defines. Names that begin with `_` are left out, and so is `problem`, which makes rows."""
    defined = {*re.findall(r"^(?:async )?def (\w+)", text, re.MULTILINE)}

    def is_own(name: str, value: Any) -> bool:
        if name in defined or isinstance(value, functools.partial):
            return True
        made = value if inspect.isroutine(value) else type(value)
        return callable(value) and not inspect.isclass(value) and made.__module__ == module.__name__

    public = ((name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "problem")
    return {name: value for name, value in public if is_own(name, value)}


def _pickled(episode: Any) -> bytes:
    try:
        return pickle.dumps(episode)
    except Exception as error:  # whatever is in it
        name = type(episode).__name__
        raise ValueError(f"{name} cannot be pickled, as it is between two turns: {error}"[:1000]) from None


def result_of(value: Any) -> Any:
    async def awaited(found: Awaitable[Any]) -> Any:
        return await found

    return asyncio.run(awaited(value)) if inspect.isawaitable(value) else value


def answers(
    functions: Mapping[str, Callable[..., Any]], action: Action, timeout_s: float = 0.0, at_once: int = MAX_AT_ONCE
) -> tuple[StepResult, bool]:
    """Runs calls and answers them in their order; one that fails, names no tool or takes too long is answered with an
    error. Returns whether all have ended."""
    if action.is_unread:
        text = f"Error: this call cannot be read. Tools are: {', '.join(functions)}"
        return StepResult(next_observation=[tool_message(text)], metrics={"tool_calls": 1, "tool_errors": 1}), True
    threads = ThreadPoolExecutor(min(at_once, len(action.calls)))
    room = MAX_ANSWER // len(action.calls)
    running = [threads.submit(_answer, functions.get(call.name), call, room) for call in action.calls]
    done, late = wait(running, timeout_s or None)
    threads.shutdown(wait=False, cancel_futures=True)
    found = [each.result() if each in done else (f"Error: no answer within {timeout_s:g} s", False) for each in running]
    messages = [tool_message(text, *each) for (text, _), each in zip(found, enumerate(action.calls), strict=True)]
    errors = sum(not is_well for _, is_well in found)
    counts = {"tool_calls": len(found), "tool_errors": errors, "tool_timeouts": len(late)}
    return StepResult(next_observation=messages, metrics=counts), not late


def tool_message(text: str, number: int = 0, call: ToolCall | None = None) -> Message:
    """The answer to a call, by its number in the turn; None: a call that cannot be read."""
    message = {"role": "tool", "content": text, "tool_call_id": call_id(number)}
    return message if call is None else message | {"name": call.name, "tool_call_id": call.id or call_id(number)}


def _answer(function: Callable[..., Any] | None, call: ToolCall, room: int) -> tuple[str, bool]:
    """(the answer, `room` characters at most, whether the call succeeded)."""
    if function is None:
        return f"Error: {call.name} is no tool of this conversation", False
    arguments = json.loads(call.arguments)
    try:
        signature_of(function).bind(**arguments)
    except TypeError as error:
        return f"Error: {call.name} cannot be called so: {error}", False
    try:
        value = result_of(function(**arguments))
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except BaseException as error:  # anything that the user's function raises, sys.exit() too, or returns
        return f"Error: {type(error).__name__}: {error}"[:1000], False
    more = len(text) - room
    return (text if more <= 0 else f"{text[:room]}... and {more} more characters"), True
