"""From a configuration to its batch rule, and what is refused."""

from __future__ import annotations

from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest
from keyword_options import with_options
from rounds import rule_sections

from jaxrl.config import Config, ConfigError
from jaxrl.mechanisms import batch_rule, composition_problem

LONGEST = 77  # tokens of a response
DOCS = Path(__file__).resolve().parents[2] / "docs"
RULES_PAGE = DOCS / "rollout-rules.md"


def config(**options: Any) -> Config:
    """`rollout__tail_batching__enable=True` and the like, on top of 4 prompts × 3 samples."""
    data = {"train_batch_size": 4, "max_response_length": LONGEST}
    values: dict[str, Any] = {"model": {"path": "m"}, "data": data, "rollout": {"n": 3}}
    return with_options(values, options)


ON = {"enable": True}


@pytest.mark.parametrize("section", rule_sections())
def test_every_rule_is_made_and_has_its_page(section: str):
    rule = batch_rule(config(**{f"rollout__{section}": ON}))
    assert rule.name != "plain batches", f"jaxrl/mechanisms/__init__.py makes no rule of rollout.{section}"
    page = DOCS / "mechanisms" / f"{section}.md"
    title = page.read_text(encoding="utf-8").splitlines()[0]
    assert f"`rollout.{section}`" in title, f"{page.name} needs `rollout.{section}` in its title"
    lines = RULES_PAGE.read_text(encoding="utf-8").splitlines()
    table = takewhile(lambda line: line.startswith("|"), lines[lines.index("## What composes with what") + 2 :])
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    assert rule.name in header, f"{RULES_PAGE.name}: no column {rule.name!r} in what composes with what"
    assert rule.name in [row[0] for row in rows], f"{RULES_PAGE.name}: no row {rule.name!r} in what composes with what"
    assert all(len(row) == len(header) for row in rows)


@pytest.mark.parametrize(("one", "other"), list(combinations(rule_sections(), 2)))
def test_every_rule_excludes_every_other(one: str, other: str):
    problem = composition_problem(config(**{f"rollout__{one}": ON, f"rollout__{other}": ON}))
    names = [batch_rule(config(**{f"rollout__{section}": ON})).name for section in (one, other)]
    assert problem is not None, f"{names[0]} and {names[1]} must exclude each other: `decides` of both"
    assert all(name in problem for name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rollout__partial_rollout": ON | {"max_staleness": 1}, "trainer__one_step_off": True},
            r"rollout\.partial_rollout\.max_staleness \(1 versions\) must be >= 2, or -1 for no cap: .* one-step-off",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        batch_rule(config(**options))
    assert "\n" not in str(caught.value)
