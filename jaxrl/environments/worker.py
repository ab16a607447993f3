"""What the worker processes of environments are asked, and how they answer: one turn at a time, of any trajectory.

Purpose: `EpisodeScorer` is handed to a pool of worker processes in place of a reward's scorer, and so has all that they
have: foreign code in a process of its own, limits of time and memory, a log, an end with all descendants. A turn's
reward is its score, and all else that the environment says is the score's `info`, which is JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.request import Request, urlopen

from jaxrl.config.functions import UserFile, user_module
from jaxrl.environments.env import Action, Schema, Trajectory
from jaxrl.environments.kinds import (
    Episodes,
    FunctionTools,
    MethodTools,
    NativeEpisodes,
    OtherPython,
    Program,
    accepted,
    calls_of,
    result_of,
)
from jaxrl.rewards.request import as_reward

MAX_STATE_BYTES = 1 << 19
"""Of a pickled environment; it travels with each of its turns."""
_CLASSES = ("class", "native")  # kinds of which a file may have several
STARTED = "/started"
"""Where a program's process says that it begins, under the policy's address."""
EnvironmentKind = Literal["tools", "class", "native", "openai", "verifiers"]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn to be answered.

    Attributes:
      row: of the data; `tools` in it names those that the model may call.
      state: of the environment; None: it has to begin.
      text: what the model has said, without special tokens.
      timeout_s: of its calls.
    """

    row: Mapping[str, Any]
    state: bytes | None
    text: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SchemaRequest:
    """What the model may call. `name`: of the class, where there are several."""

    name: str


@dataclass(frozen=True, slots=True)
class ProblemRequest:
    """Rows of the environment's own, from one number to another."""

    first: int
    last: int
    seed: int


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A program to be run: a whole trajectory.

    Attributes:
      row: of the data, with `messages`.
      base_url, api_key: of the policy, as clients of OpenAI's API take them.
    """

    row: Mapping[str, Any]
    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Trajectories of one prompt, to be compared. `row`: of the data."""

    row: Mapping[str, Any]
    trajectories: tuple[Trajectory, ...]


Asked = TurnRequest | AgentRequest | SchemaRequest | ProblemRequest | GroupRequest


@dataclass(slots=True)
class EpisodeScorer:
    """Answers requests of these kinds with (reward, info); implements `jaxrl.rewards.scorers.Scorer`.

    Attributes:
      kind, name, args, group: as in `environment`.
      file: that `environment.path` names, or what drives verifiers. python: another one to run it; empty: this one.
      max_calls: after which this process is not to be used again; 0: any number.
    """

    kind: EnvironmentKind
    file: UserFile
    name: str
    args: Mapping[str, Any]
    python: str = ""
    group: str = ""
    max_calls: int = 0
    preload: tuple[str, ...] = ()
    _calls: int = 0
    _made: dict[str, Episodes] = field(default_factory=dict)

    @property
    def loads(self) -> str:
        return f"environment.path: importing {self.file.path}"

    @property
    def is_spent(self) -> bool:
        """Whether something goes on in this process that should have ended, or it has answered often enough."""
        return 0 < self.max_calls <= self._calls or any(each.has_hung for each in self._made.values())

    def load(self) -> None:
        if self.kind not in _CLASSES or self.name:
            self._episodes(self.name)
        else:
            user_module("environment.path", self.file)
        if self.group:
            _ = self._group

    def __call__(self, request: Asked) -> tuple[Any, dict[str, Any]]:
        self._calls += isinstance(request, TurnRequest | AgentRequest)
        match request:
            case AgentRequest():
                return self._run(request)
            case SchemaRequest(name=name):
                return 0.0, {"schemas": self._episodes(name or self.name).schemas}
            case ProblemRequest():
                return 0.0, {"problems": [self._problem(n, request.seed) for n in range(request.first, request.last)]}
            case TurnRequest():
                return self._step(request)
            case GroupRequest():
                return 0.0, {"rewards": self._compare(request)}

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """With the columns that all rows have, and those of its own that go before them."""
        own: Mapping[str, Any] = row.get("env_args") or {}
        return {**row, **self.args, **own}

    def _run(self, request: AgentRequest) -> tuple[Any, dict[str, Any]]:
        program = self._episodes(self.name)
        assert isinstance(program, Program)
        begun = Request(request.base_url + STARTED, b"", {"Authorization": f"Bearer {request.api_key}"})
        urlopen(begun, timeout=60).close()
        found = program.run(self.name or "run", self._row(request.row), request.base_url, request.api_key)
        if not isinstance(found, Mapping):
            return found, {}
        return found["score"], {name: value for name, value in found.items() if name != "score"}

    def _step(self, request: TurnRequest) -> tuple[float, dict[str, Any]]:
        row = self._row(request.row)
        episodes = self._episodes(row.get("environment") or self.name)
        action = Action.of(request.text, schemas_for(row, episodes.schemas))
        result, state = episodes.step(row, request.state, action, request.timeout_s)
        if len(state) > MAX_STATE_BYTES:
            raise ValueError(
                f"the environment takes {len(state)} bytes between two turns, above the {MAX_STATE_BYTES} that it may"
            )
        return result.reward, {
            "done": result.episode_done,
            "messages": [dict(message) for message in result.messages],
            "state": base64.b64encode(state).decode(),
            "metrics": dict(result.metrics),
        }

    def _compare(self, request: GroupRequest) -> list[float]:
        make, row = self._group, self._row(request.row)
        rewards = result_of(make(**accepted(make, row)).compute_group_rewards(request.trajectories))
        return [as_reward(reward, "compute_group_rewards: each reward must be") for reward in rewards]

    @property
    def _group(self) -> Callable[..., Any]:
        made: Any = getattr(user_module("environment.path", self.file), self.group, None)
        if not callable(getattr(made, "compute_group_rewards", None)):
            where = f"environment.group: {self.file.path}"
            raise ValueError(f"{where} defines no class {self.group!r} with a method compute_group_rewards")
        return made

    def _problem(self, number: int, seed: int) -> dict[str, Any]:
        episodes = self._episodes(self.name)
        if isinstance(episodes, Program):
            row: Any = episodes.problem(number, seed)
        else:
            problem = getattr(user_module("environment.path", self.file), "problem", None)
            row = problem(number, seed) if callable(problem) else None
        if row is None:
            raise ValueError(
                f"{self.file.path} defines no function problem(index, seed), which makes rows: give data.train_files"
            )
        messages = episodes.first_messages(row | dict(self.args))
        return {"row": row, "messages": [dict(message) for message in messages]}

    def _episodes(self, name: str) -> Episodes:
        """Of a class, or of all functions of the file. Raises ValueError where the file does not have it."""
        if name not in self._made:
            self._made[name] = self._of_file(name)
        return self._made[name]

    def _of_file(self, name: str) -> Episodes:
        if self.python:
            return Program(OtherPython(self.python, self.file.path), self.args)
        module = user_module("environment.path", self.file)
        if self.kind == "tools":
            return FunctionTools(module, self.file.text)
        if self.kind == "openai":
            return Program(calls_of(module), self.args)
        made = getattr(module, name, None)
        if not callable(made):
            raise ValueError(f"environment.name: {self.file.path} defines no class {name!r}")
        if self.kind == "native":
            return NativeEpisodes(made, name)
        if not isinstance(made, type):
            raise ValueError(f"environment.name: {self.file.path}: {name} must be a class, found {made!r:.80}")
        return MethodTools(made)


def schemas_for(row: Mapping[str, Any], schemas: Sequence[Schema]) -> list[Schema]:
    """Those that the model may call in a row: all, or those that its column `tools` names. Raises ValueError for a name
    that is none."""
    named = row.get("tools")
    if named is None:
        return list(schemas)
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    missing = [name for name in named if name not in by_name]
    if missing:
        raise ValueError(f"the column 'tools' names {missing[0]!r}, and there are {', '.join(by_name) or 'none'}")
    return [by_name[name] for name in named]
