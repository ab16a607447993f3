"""The scorer of a run's data: one for each domain (`reward.domains`), all in one worker process.

Purpose: `build_scorer(config)` is what the pool's workers load. A process holds the scorers of all domains, and a
sample's source says which of them is asked: so any free worker takes any sample, and n domains on w workers are w
processes, not n times w. What keeps a slow domain from taking all of them are the pool's limits
(`jaxrl.rewards.domain_limits`).

Domains that an endpoint or the devices score (`jaxrl.rewards.router`) have only their parts here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.config import Config
from jaxrl.config.domains import Domain, domains
from jaxrl.rewards.parts import Weighted, build_parts
from jaxrl.rewards.programs import checks_of
from jaxrl.rewards.scorers import Scorer, ScoreRequest, scorer_of


@dataclass(frozen=True, slots=True)
class DomainScorer:
    """Asks the scorer of a sample's domain. `by_source` has that of other sources under the empty name."""

    by_source: Mapping[str, Scorer]

    @property
    def preload(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module for each in self.by_source.values() for module in each.preload))

    @property
    def loads(self) -> str:
        return " and ".join(dict.fromkeys(each.loads for each in self.by_source.values()))

    def load(self) -> None:
        for each in self.by_source.values():
            each.load()

    def __call__(self, request: ScoreRequest) -> tuple[Any, dict[str, Any]]:
        scorer = self.by_source.get(request.source)
        return (self.by_source[""] if scorer is None else scorer)(request)


def build_scorer(config: Config) -> Scorer:
    """What worker processes score with; they have nothing to do where all is scored elsewhere and there are no parts
    (`jaxrl.config.domains.needs_workers`).

    Raises ValueError for settings that would make every sample fail.
    """
    parts = build_parts(config)

    def scorer(domain: Domain) -> Scorer:
        own = scorer_of(config, domain) if domain.place == "workers" else None
        return own if own is not None and domain.weight == 1 and not parts else Weighted(own, domain.weight, parts)

    built = {source: scorer(domain) for source, domain in domains(config.reward).items()}
    return DomainScorer(built) if len(built) > 1 else built[""]


def refuse_tests(config: Config, where: str, request: ScoreRequest) -> None:
    """Raises ValueError with a row's place where `reward.kind=code` would find no tests in it."""
    of = domains(config.reward)
    if (of.get(request.source) or of[""]).kind == "code":
        try:
            checks_of(request, config.reward.code.tests_key)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
