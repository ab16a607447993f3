"""Domains of a run's data: how samples are scored, by their prompt's source (`reward.domains`), and what is refused.

The scorers are built by `jaxrl.rewards.domains`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator

from jaxrl.config.options import Config
from jaxrl.config.rewards import DomainSection, Extract, PartSection, Place, RewardKind, RewardSection
from jaxrl.schema.declared import shown

_MAX_SHOWN = 8  # sources in a sentence


class Domain(DomainSection):
    """How samples of one source are scored: `reward.domains`, with the defaults of `reward` filled in."""

    extract: Extract = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    source: str = ""  # empty: all sources without a domain of their own
    timeout_option: str = ""  # that sets `timeout_s`, for errors
    place: Place = "workers"

    @property
    def option(self) -> str:
        return f"reward.domains.{self.source}" if self.source else "reward"


def domains(reward: RewardSection) -> dict[str, Domain]:
    """All domains by source, that of other sources (the empty name) first."""
    others = DomainSection(kind=reward.kind, path=reward.path, name=reward.name)
    return {source: _domain(source, each, reward) for source, each in {"": others, **reward.domains}.items()}


def _domain(source: str, section: DomainSection, reward: RewardSection) -> Domain:
    limit = section.timeout_s, f"reward.domains.{source}.timeout_s"
    limit_s, limit_option = _timeout(section.kind, reward) if section.timeout_s < 0 else limit
    extract = reward.extract if section.extract == "inherit" else section.extract
    filled = vars(section) | {"extract": extract, "timeout_s": limit_s}
    return Domain(**filled, source=source, timeout_option=limit_option, place=_place(section.kind, reward))


def _timeout(kind: RewardKind, reward: RewardSection) -> tuple[float, str]:
    """Seconds that scoring may take where a domain does not say (0: no limit), and the option that sets them. Of code
    each test case has a limit, which the sandbox keeps."""
    if kind == "code":
        return 0.0, "reward.timeout_s"
    of_math, of_all = reward.math_timeout_s, reward.timeout_s
    if kind in ("math", "auto") and of_math and (not of_all or of_math < of_all):
        return of_math, "reward.math_timeout_s"
    return of_all, "reward.timeout_s"


def _place(kind: RewardKind, reward: RewardSection) -> Place:
    model = reward.model_of(kind)
    return "workers" if model is None else model.place(kind)


def is_staged(reward: RewardSection) -> bool:
    """Whether a verdict is more than one scorer's in a worker process."""
    return bool(reward.domains or reward.parts) or _place(reward.kind, reward) != "workers"


def needs_workers(reward: RewardSection) -> bool:
    """Whether worker processes have anything to score."""
    return bool(reward.parts) or any(each.place == "workers" for each in domains(reward).values())


def problems(c: Config) -> Iterator[str]:
    """Why the options of section `reward` cannot be combined."""
    if "" in c.reward.domains:
        yield "reward.domains: a source must have a name, found an empty one; reward.kind is for all other sources"
    found = domains(c.reward).values()
    for domain in found:
        yield from _of_file(domain.option, domain)
        if domain.kind == "task" and not c.data.task:
            yield f"{domain.option}.kind is task, which needs data.task: the scorer is the task's own"
        if domain.kind == "environment" and not c.environment.is_on:
            yield f"{domain.option}.kind is environment, which needs environment.kind: its turns have the rewards"
    option_of = {domain.kind: domain.option for domain in reversed(found)}  # the first of each kind
    if why := c.reward.judge.problem(option_of, has_answers=bool(c.data.answer_key or c.data.task)):
        yield why
    for name, part in c.reward.parts.items():
        yield from _of_part(f"reward.parts.{name}", part, c)


def _of_file(option: str, scorer: Domain | PartSection) -> Iterator[str]:
    if scorer.kind == "custom" and not scorer.path:
        yield f"{option}.path is missing: {option}.kind is custom, which needs a Python file"
    if scorer.path and scorer.kind != "custom":
        yield f"{option}.path ({scorer.path}) needs {option}.kind=custom, found {scorer.kind}"


def _of_part(option: str, part: PartSection, c: Config) -> Iterator[str]:
    yield from _of_file(option, part)
    if part.kind == "format":
        if not part.pattern:
            yield f"{option}.pattern is missing: {option}.kind is format, which compares the response with it"
        try:
            re.compile(part.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            yield f"{option}.pattern must be a regular expression, found {shown(part.pattern)}: {error}"
    elif part.pattern:
        yield f"{option}.pattern ({shown(part.pattern)}) needs {option}.kind=format, found {part.kind}"
    longest = c.data.max_response_length
    if part.kind == "length" and part.free_tokens >= longest:
        yield (
            f"{option}.free_tokens ({part.free_tokens} tokens) must be below data.max_response_length ({longest} "
            "tokens): between them the part falls from 0 to -1"
        )
    elif part.kind != "length" and part.free_tokens:
        yield f"{option}.free_tokens ({part.free_tokens}) needs {option}.kind=length, found {part.kind}"


def source_problem(c: Config, sources: Collection[str]) -> str | None:
    """Why domains do not fit the data's sources, as a sentence; None if they do."""
    named, found = c.reward.domains, sorted(set(sources))
    for source in named:
        if source not in found:
            near = difflib.get_close_matches(source, found, n=1)
            more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
            listed = ", ".join(found[:_MAX_SHOWN]) + more
            hint = f"did you mean {near[0]}?" if near else f"the data's sources are {listed}"
            return f"reward.domains.{source}: no prompt has the source {source!r}: {hint}"
    others = [source for source in found if source not in named]
    if named and others and c.reward.kind in ("auto", "math") and not c.data.answer_key and not c.data.task:
        return (
            f"data.answer_key is empty: the source {others[0]!r} has no domain in reward.domains, and "
            f"reward.kind={c.reward.kind} compares with a reference answer"
        )
    return None


def unread(c: Config) -> Iterator[tuple[str, frozenset[str] | None, str]]:
    """Options of section `reward` that are not read: the section, their names (None for all), and why."""
    kinds = c.reward.kinds
    for domain in domains(c.reward).values():
        if domain.kind != "custom":
            yield domain.option, frozenset({"name"}), f"{domain.option}.kind is {domain.kind}"
        if domain.kind not in ("auto", "math", "task") and domain.source:
            yield domain.option, frozenset({"extract"}), f"{domain.option}.kind is {domain.kind}"
    for name, part in c.reward.parts.items():
        if part.kind != "custom":
            yield f"reward.parts.{name}", frozenset({"name"}), f"reward.parts.{name}.kind is {part.kind}"
    if "code" not in kinds or c.reward.code.timeout == "fixed":
        yield "data", frozenset({"reference_time_key"}), "no test case has an adaptive limit (reward.code.timeout)"
    if "code" not in kinds:
        yield "reward.code", None, "no reward's kind is code"
    elif c.reward.code.score == "all":
        yield "reward.code", frozenset({"max_failing_s"}), "reward.code.score is all"
    yield from c.reward.judge.unread_with(kinds)
