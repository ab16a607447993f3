"""configs/algorithms: one file per published method, each with the settings that make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from jaxrl.config import to_mapping
from jaxrl.config.files import load

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "algorithms"


PAGE = FOLDER.parents[1] / "docs" / "your-algorithm.md"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml"))


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
