"""The program for OpenEnv's environments, with a client like that of openenv-core 0.3.0, and a policy that is told what
to say."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from chat_server import chat_server, says

from jaxrl.config.functions import read_user_file, user_module
from jaxrl.environments import worker

pytest.importorskip("openai")
ARGS = {"url": "http://here", "action": "guess", "observation": "text"}


class Client:
    """Counts down to zero from its seed; the step that is refused is `no`."""

    begins = "It is {}."

    def __init__(self, base_url: str) -> None:
        assert base_url == ARGS["url"]
        self.is_open = False

    async def __aenter__(self) -> Client:
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False

    async def reset(self, seed: int) -> Any:
        self.left = seed % 3 + 1
        return self._result(self.begins.format(self.left), None)

    async def step(self, action: dict[str, str]) -> Any:
        assert self.is_open
        if action["guess"] == "no":
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        self.left -= 1
        return self._result(f"{action['guess']}: {self.left}", 0.5)

    def _result(self, text: str, reward: float | None) -> Any:
        return SimpleNamespace(observation={"text": text, "left": self.left}, reward=reward, done=self.left == 0)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    core = ModuleType("openenv.core")
    monkeypatch.setattr(core, "GenericEnvClient", Client, raising=False)
    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    file = Path(worker.__file__).parent / "shipped" / "openenv.py"
    return user_module("environment.path", read_user_file("environment.path", str(file)))


def row_of(program: ModuleType, left: int, **args: Any) -> dict[str, Any]:
    for index in range(100):
        row = asyncio.run(program.problem(index, 0, ARGS["url"], **args))
        if row["seed"] % 3 + 1 == left:
            return row
    raise AssertionError("no seed does")


def played(program: ModuleType, row: dict[str, Any], said: list[str], **args: Any) -> tuple[dict[str, Any], list[str]]:
    """(what comes of it, the last request's messages from users)."""
    with chat_server([says(text) for text in said]) as server:
        found = asyncio.run(program.run(row, server.url, "key", **ARGS, **args))
        asked = server.seen[-1]["messages"]
        assert len(server.seen) == len(said)
    return found, [message["content"] for message in asked if message["role"] == "user"]


def test_rows_are_what_a_reset_shows(program: ModuleType):
    rows = [asyncio.run(program.problem(i, 1, ARGS["url"], "text", "Count.")) for i in range(9)]
    assert len({row["seed"] for row in rows}) == 9
    for row in rows:
        assert row["messages"] == [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": f"It is {row['seed'] % 3 + 1}."},
        ]
    (message,) = row_of(program, 2)["messages"]
    assert message["content"] == '{"text": "It is 2.", "left": 2}'


def test_an_episode(program: ModuleType):
    found, shown = played(program, row_of(program, 3, observation="text"), ["a", "no", " b ", "c"])
    assert found == {"score": 1.5, "steps": 4, "errors": 1}
    assert shown == ["It is 3.", "a: 2", "Error: Server error: Invalid message (code: VALIDATION_ERROR)", "b: 1"]


def test_what_is_said_is_searched_for_an_action(program: ModuleType):
    row = row_of(program, 2, observation="text")
    found, shown = played(program, row, ["It is 7, I say.", "Hm.", "8"], pattern=r"\d+")
    assert found == {"score": 1.0, "steps": 3, "errors": 1}
    assert shown == ["It is 2.", "7: 1", r"Error: an answer must have in it what fits \d+"]


def test_what_is_refused(program: ModuleType, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"observation: found no 'words' among \['left', 'text'\]"):
        asyncio.run(program.problem(0, 0, ARGS["url"], "words"))
    row = row_of(program, 2, observation="text")
    monkeypatch.setattr(Client, "begins", "Now it is {}.")
    with pytest.raises(ValueError, match=r"the same each time, found 'Now it is 2\.', and 'It is 2\.' before"):
        asyncio.run(program.run(row, "http://nowhere", "key", **ARGS))
