"""A reward function of the user's (`reward.kind=custom`).

It is called with those of these that it takes, by name:

- `response`, `answer` (the reference), `question`, and every other column of the data;
- verl's `solution_str`, `ground_truth`, `data_source`, and `extra_info`, a dict of all other columns;
- TRL's `prompts` and `completions`, lists with one text each, or with one list of messages where prompts are
  conversations; then each column is a list of one as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrl.config.functions import UserFile, read_user_file, user_function
from jaxrl.rewards.request import A_REWARD, ScoreRequest, as_reward
from jaxrl.rewards.tracebacks import shown_path

if TYPE_CHECKING:
    from jaxrl.config.rewards import DomainSection, PartSection

RESPONSE = ("response", "solution_str", "completions")
"""The function must take one of these arguments."""
_OWN = ("response", "solution_str", "answer", "ground_truth", "data_source", "extra_info")
_OWN_OF_LISTS = ("prompts", "completions", "answer")
_REFERENCE = ("answer", "ground_truth")
_SHOWN_KEYS = 10


@dataclass(frozen=True, slots=True)
class CustomScorer:
    """Calls the function, which returns a number, or a mapping with the number under "score" and anything else to
    record. A function that takes lists returns a list of one."""

    file: UserFile
    name: str = "compute_score"
    option: str = "reward"
    # of the data, with `answer` where a row has one, and of `ScoreRequest.extra`; None: not known at the start
    columns: frozenset[str] | None = None
    conversations: bool = False  # whether prompts are lists of messages

    @classmethod
    def of(
        cls, option: str, section: DomainSection | PartSection, columns: frozenset[str] | None, conversations: bool
    ) -> CustomScorer:
        """The function that a section, `option`, names. Raises ValueError or OSError where its file cannot be read."""
        return cls(read_user_file(f"{option}.path", section.path), section.name, option, columns, conversations)

    @property
    def loads(self) -> str:
        return f"{self.option}.path: importing {self.file.path}"

    def load(self) -> None:
        parameters = inspect.signature(self._function()).parameters
        if self.columns is not None:
            own = set(_OWN_OF_LISTS if "completions" in parameters else _OWN)
            unknown = () if "answer" in self.columns else own.intersection(_REFERENCE)
            self._refuse_unknown(parameters, (self.columns | own).difference(unknown))

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

    def _refuse_unknown(self, parameters: Mapping[str, inspect.Parameter], known: Collection[str]) -> None:
        for name, each in parameters.items():
            must = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            if must and name not in known:
                rule = f"which is no column of the data; it may take {', '.join(sorted(known))}"
                if name in _REFERENCE and "answer" not in known:
                    rule = f"and no row of the data has one (data.answer_key); {name}=None takes rows without"
                raise ValueError(f"{self.option}.path: {self._who} takes {name!r}, {rule}")

    def _arguments(self, parameters: Mapping[str, inspect.Parameter], request: ScoreRequest) -> dict[str, Any]:
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        columns: dict[str, Any] = dict(request.extra)
        of_lists = "completions" in parameters
        answer = columns.get("answer") if request.answer is None else request.answer  # with data.answer_key empty
        if of_lists:
            question: Any = columns.get("question")
            response: Any = request.response
            if self.conversations:
                messages = columns.get("messages") or [{"role": "user", "content": question}]
                question = messages[: len(messages) - len(request.turns)]
                response = list(request.turns) or [{"role": "assistant", "content": response}]
            columns |= dict(zip(_OWN_OF_LISTS, (question, response, answer), strict=True))
        else:
            texts = request.response, request.response, answer, answer
            columns |= dict(zip(_OWN, (*texts, request.source, dict(columns)), strict=True))
        self._refuse_unknown(parameters, columns)
        if not takes_any:
            columns = {name: columns[name] for name in parameters if name in columns}
        return {name: [value] for name, value in columns.items()} if of_lists else columns
