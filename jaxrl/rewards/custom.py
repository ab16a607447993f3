"""A reward function of the user's (`reward.kind=custom`).

It is called with those of these that it takes, by name:

- `response`, `answer` (the reference), `question`, and every other column of the data;
- verl's `solution_str`, `ground_truth`, `data_source`, and `extra_info`, a dict of all other columns;
- TRL's `prompts` and `completions`, lists with one text each; then each column is a list of one as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.config.functions import UserFile, user_function
from jaxrl.rewards.request import A_REWARD, ScoreRequest, as_reward
from jaxrl.rewards.tracebacks import shown_path

RESPONSE = ("response", "solution_str", "completions")
"""The function must take one of these arguments."""
_SHOWN_KEYS = 10


@dataclass(frozen=True, slots=True)
class CustomScorer:
    """Calls the function, which returns a number, or a mapping with the number under "score" and anything else to
    record. A function that takes lists returns a list of one."""

    file: UserFile
    name: str = "compute_score"
    option: str = "reward"
    preload: tuple[str, ...] = ()

    @property
    def loads(self) -> str:
        return f"{self.option}.path: importing {self.file.path}"

    def load(self) -> None:
        self._function()

    def __call__(self, request: ScoreRequest) -> tuple[Any, dict[str, Any]]:
        function = self._function()
        parameters = inspect.signature(function).parameters
        result = function(**self._arguments(parameters, request))
        if "completions" in parameters and isinstance(result, list) and len(result) == 1:
            (result,) = result
        if not isinstance(result, Mapping):
            return self._number(result, "found"), {}
        if "score" not in result:
            keys = ", ".join(f"{key!r:.40}" for key in list(result)[:_SHOWN_KEYS]) or "none"
            more = f" and {len(result) - _SHOWN_KEYS} more" if len(result) > _SHOWN_KEYS else ""
            raise ValueError(f"{self._who} returned a mapping without 'score'; its keys: {keys}{more}")
        if ours := {"own_reward", "parts"}.intersection(result):
            raise ValueError(f"{self._who} returned {min(ours)!r} beside 'score', a name for what jaxrl itself adds")
        score = self._number(result["score"], "found under 'score'")
        return score, {key: value for key, value in result.items() if key != "score"}

    @property
    def _who(self) -> str:
        return f"{shown_path(self.file.path)}: {self.name}"

    def _number(self, value: Any, found: str) -> float:
        try:
            return as_reward(value)
        except ValueError:
            rule = f"must return {A_REWARD}, or a mapping with one under 'score'"
            raise ValueError(f"{self._who} {rule}; {found}: {value!r:.200} ({type(value).__name__})") from None

    def _function(self) -> Callable[..., Any]:
        names = f"{self.option}.path", f"{self.option}.name"
        return user_function(names, self.file, self.name, RESPONSE, takes_all=False)

    def _arguments(self, parameters: Mapping[str, inspect.Parameter], request: ScoreRequest) -> dict[str, Any]:
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        columns = dict(request.extra)
        of_lists = "completions" in parameters
        if of_lists:
            found = {**columns, "prompts": columns.get("question"), "completions": request.response}
        else:
            found = {"solution_str": request.response, "ground_truth": request.answer, "data_source": request.source}
            found |= {"extra_info": columns, "response": request.response}
        found |= {"answer": request.answer}
        for name, each in parameters.items():
            if name not in found and name in columns:
                found[name] = columns[name]
            elif (
                name not in found
                and each.default is each.empty
                and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            ):
                there = ", ".join(sorted(columns))
                raise ValueError(f"{self._who} takes {name!r}, which is no column of the data; there are {there}")
        found = {name: value for name, value in found.items() if takes_any or name in parameters}
        return {name: [value] for name, value in found.items()} if of_lists else found
