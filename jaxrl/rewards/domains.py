"""The scorer of a run's data: one for each domain (`reward.domains`), with parts (`reward.parts`), in one process.

A worker process holds the scorers of all domains, and a sample's source chooses among them, so any free worker takes
any sample. Domains that an endpoint or the devices score (`jaxrl.rewards.reward_pool`) have only their parts here,
numbers beside the scorer's own.

Source: weighted sums as in DeepSeek-R1 (accuracy and format); a penalty that grows with the length as in DAPO's
equation 13. Departure: `length` falls over all that follows `free_tokens`, where DAPO's buffer lies at the end
(`reward.overlong_buffer`, which shapes training alone).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jaxrl.config import Config
from jaxrl.config.domains import domains
from jaxrl.config.rewards import PartSection
from jaxrl.rewards.request import OWN_COLUMNS, ScoreRequest, as_reward
from jaxrl.rewards.scorers import Scorer, has_conversations, scorer_of


@dataclass(frozen=True, slots=True)
class RewardPart:
    """A part of a reward. May raise where it is asked, which makes the whole sample an error."""

    section: PartSection
    max_tokens: int = 0  # of a response
    function: Scorer | None = None  # of kind custom; it has the signature of a custom scorer

    def load(self) -> None:
        re.compile(self.section.pattern, re.DOTALL)
        if self.function is not None:
            self.function.load()

    def value(self, request: ScoreRequest) -> float:
        if self.function is not None:
            return as_reward(self.function(request)[0])
        if self.section.kind == "format":
            return float(re.fullmatch(self.section.pattern, request.response, re.DOTALL) is not None)
        free = self.section.free_tokens
        over = max(request.num_tokens - free, 0)
        return 0.0 - min(over / (self.max_tokens - free), 1.0)  # not -0.0, as a page would show it


@dataclass(frozen=True, slots=True)
class DomainScorer:
    """Asks the scorer of a sample's domain, and for the parts. `by_source`: that of other sources has the empty name;
    None: another place has it."""

    by_source: Mapping[str, Scorer | None]
    parts: Mapping[str, RewardPart]

    @property
    def loads(self) -> str:
        scorers = [scorer.loads for scorer in self.by_source.values() if scorer is not None]
        return " and ".join(dict.fromkeys([*scorers, *(f"reward.parts.{name}: loading it" for name in self.parts)]))

    def load(self) -> None:
        for each in (*self.by_source.values(), *self.parts.values()):
            if each is not None:
                each.load()

    def __call__(self, request: ScoreRequest) -> tuple[Any, dict[str, Any]]:
        scorer = self.by_source.get(request.source, self.by_source[""])
        values = {name: part.value(request) for name, part in self.parts.items()}
        reward, said = (0.0, {}) if scorer is None else scorer(request)
        return reward, {**said, "parts": values} if values else said


def build_scorer(config: Config, rows: Iterable[Iterable[str]] | None = None) -> Scorer:
    """The worker processes' scorer. `rows`: the columns of each row of the data (`Problem.extra`), with `answer` where
    it has one; a function that takes any other is refused when the workers load it. Raises ValueError for settings that
    would make every sample fail, or a file that cannot be read."""
    columns = None
    if rows is not None:
        messages = ("messages",) if has_conversations(config) else ()
        columns = frozenset(chain(OWN_COLUMNS, messages, *rows))
    parts: dict[str, RewardPart] = {}
    for name, section in config.reward.parts.items():
        function, option = None, f"reward.parts.{name}"
        if section.kind == "custom":
            from jaxrl.rewards.custom import CustomScorer

            function = CustomScorer.of(option, section, columns, has_conversations(config))
        parts[name] = RewardPart(section, config.data.max_response_length, function)

    by_source = {
        source: scorer_of(config, domain, columns) if domain.place == "workers" else None
        for source, domain in domains(config.reward).items()
    }
    scorer = by_source[""]
    return scorer if len(by_source) == 1 and scorer is not None and not parts else DomainScorer(by_source, parts)


def refuse_tests(config: Config, where: str, request: ScoreRequest) -> None:
    """Raises ValueError with a row's place where `reward.kind=code` would find no tests in it."""
    of = domains(config.reward)
    if (of.get(request.source) or of[""]).kind == "code":
        from jaxrl.rewards.programs import checks_of

        try:
            checks_of(request, config.reward.code.tests_key)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
