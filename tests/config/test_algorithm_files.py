"""configs/algorithms: one file per published method, each with the settings that make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from trainer_fixtures import group_of

from jaxrl.config import to_mapping
from jaxrl.config.files import load
from jaxrl.mechanisms.dynamic_sampling import DynamicSampling
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.rounds.shaping import RewardShaping
from jaxrl.training import advantages
from jaxrl.types import SampleKey

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "algorithms"


PAGE = FOLDER.parents[1] / "docs" / "your-algorithm.md"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize(
    ("lengths", "scored", "kept", "expected"),
    [
        ((8, 8, 29, 32), (1.0, 1.0, 1.0, 1.0), False, None),  # all right: nothing but lengths to learn
        ((32, 8, 8, 8), (1.0, 0.0, 0.0, 0.0), True, (0.0, -1.0, -1.0, -1.0)),  # right beats wrong at any length
    ],
)
def test_dapo_filters_by_accuracy_and_rewards_what_is_right_at_any_length(
    lengths: tuple[int, ...], scored: tuple[float, ...], kept: bool, expected: tuple[float, ...] | None
):
    config = load(FOLDER / "dapo.yaml", [])
    shaping = RewardShaping.configured(config)
    assert shaping is not None
    given = [Verdict(0.0, SampleKey(0, 0, i), reward) for i, reward in enumerate(scored)]
    verdicts = [shaping.shaped(each, length) for each, length in zip(given, lengths, strict=True)]
    group = group_of(lengths, [verdict.reward for verdict in verdicts])
    filtering = DynamicSampling.of_config(config)
    assert filtering is not None
    assert filtering.keeps(group, verdicts) == kept
    if expected is not None:
        assert tuple(verdict.reward for verdict in verdicts) == expected
        found, _ = advantages.compute([group], config.algorithm)
        np.testing.assert_allclose([each[0] for each in found], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


# ---------------------------------------------------------------- the table of docs/your-algorithm.md


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their options' whole names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def rows_of_the_table() -> list[tuple[list[str], str, str, list[str]]]:
    """Presets, option and value of each row of the page's table, and what paper and verl have."""
    table = PAGE.read_text(encoding="utf-8").partition("| preset | option |")[2].partition("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [(NAMES if row[0] == "all" else row[0].split(", "), row[1].strip("`"), row[2], row[3:]) for row in found]


def test_the_table_says_what_the_files_give():
    configs = {name: flat(to_mapping(load(FOLDER / f"{name}.yaml", []))) for name in NAMES}
    said = {}
    for names, option, ours, (paper, verl, _) in rows_of_the_table():
        assert paper, (names, option)
        assert verl, (names, option)
        for name in names:
            assert (name, option) not in said, "a second row"
            said[name, option] = yaml.safe_load(ours)
    assert said == {(name, option): configs[name][option] for name, option in said}
