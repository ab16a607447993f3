"""The requests that worker processes of environments answer: one turn at a time, of any trajectory.

A pool of worker processes runs `EpisodeScorer` in place of a reward's scorer, with the same limits. A turn's reward is
the score, and all else that the environment says is the score's `info`, which is JSON.
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
    calls_of,
    result_of,
)
from jaxrl.environments.program_server import accepted
from jaxrl.rewards.request import as_reward

MAX_STATE_BYTES = 1 << 19
"""The size of a pickled environment, which travels with each of its turns."""
STARTED = "/started"
"""The path under the policy's address to which a program's process reports its start."""
EnvironmentKind = Literal["tools", "class", "native", "openai", "verifiers"]


@dataclass(slots=True)
class EpisodeScorer:
    """Answers requests with (reward, info); implements `jaxrl.rewards.scorers.Scorer`. A request is the name of a
    method and its arguments. Fields as in `environment`."""

    kind: EnvironmentKind
    file: UserFile  # the one that `environment.path` names, or the driver of verifiers
    name: str
    args: Mapping[str, Any]
    python: str = ""  # another Python to run it; empty: this one
    group: str = ""
    _made: dict[str, Episodes | Program] = field(default_factory=dict)

    @property
    def loads(self) -> str:
        return f"environment.path: importing {self.file.path}"

    @property
    def is_spent(self) -> bool:
        """Whether a call that should have ended still runs in this process."""
        return any(each.has_hung for each in self._made.values())

    def load(self) -> None:
        if self.kind not in ("class", "native") or self.name:  # of which a file may have several
            self._episodes(self.name)
        else:
            user_module("environment.path", self.file)
        if self.group:
            _ = self._group

    def __call__(self, request: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
        name, *arguments = request
        return getattr(self, name)(*arguments)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with `environment.args`, over which its own `env_args` take precedence."""
        own: Mapping[str, Any] = row.get("env_args") or {}
        return {**row, **self.args, **own}

    def schemas(self, name: str) -> tuple[float, dict[str, Any]]:
        """What the model may call. `name`: the class, where there are several."""
        return 0.0, {"schemas": self._episodes(name or self.name).schemas}

    def problems(self, first: int, last: int, seed: int) -> tuple[float, dict[str, Any]]:
        """Rows of the environment's own, from one number to another."""
        return 0.0, {"problems": [self._problem(number, seed) for number in range(first, last)]}

    def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> tuple[Any, dict[str, Any]]:
        """Runs a program for one trajectory. `base_url` and `api_key` are the policy's, as clients of OpenAI's API take
        them; the row has `messages`."""
        program = self._episodes(self.name)
        assert isinstance(program, Program)
        urlopen(Request(base_url + STARTED, b"", {"Authorization": f"Bearer {api_key}"}), timeout=60).close()
        found = program.run(self.name or "run", self._row(row), base_url, api_key)
        if not isinstance(found, Mapping):
            return found, {}
        return found["score"], {name: value for name, value in found.items() if name != "score"}

    def turn(
        self, row: Mapping[str, Any], state: bytes | None, text: str, timeout_s: float
    ) -> tuple[float, dict[str, Any]]:
        """Answers a turn. `state`: of the environment; None: the episode begins. `text`: what the model said, without
        special tokens. `timeout_s`: of its calls."""
        row = self._row(row)
        episodes = self._episodes(row.get("environment") or self.name)
        assert not isinstance(episodes, Program), "a program asks for turns itself"
        action = Action.of(text, schemas_for(row, episodes.schemas))
        result, state = episodes.step(row, state, action, timeout_s)
        if len(state) > MAX_STATE_BYTES:
            raise ValueError(f"the environment takes {len(state)} bytes between two turns, above {MAX_STATE_BYTES}")
        return result.reward, {
            "done": result.episode_done,
            "messages": [dict(message) for message in result.messages],
            "state": base64.b64encode(state).decode(),
            "metrics": dict(result.metrics),
        }

    def compare(self, row: Mapping[str, Any], trajectories: tuple[Trajectory, ...]) -> tuple[float, dict[str, Any]]:
        """Compares trajectories of one prompt."""
        make, row = self._group, self._row(row)
        rewards = result_of(make(**accepted(make, row)).compute_group_rewards(trajectories))
        return 0.0, {"rewards": [as_reward(each, "compute_group_rewards: each reward must be") for each in rewards]}

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

    def _episodes(self, name: str) -> Episodes | Program:
        if name not in self._made:
            self._made[name] = self._loaded(name)
        return self._made[name]

    def _loaded(self, name: str) -> Episodes | Program:
        """The episodes of a class, or of the file. Raises ValueError where the file does not define it."""
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
    """The tools that the model may call in a row: all, or those that its column `tools` names."""
    named = row.get("tools")
    if named is None:
        return list(schemas)
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    missing = [name for name in named if name not in by_name]
    if missing:
        raise ValueError(f"the column 'tools' names {missing[0]!r}, and there are {', '.join(by_name) or 'none'}")
    return [by_name[name] for name in named]
