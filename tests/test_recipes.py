"""What makes an environment beside pip: the container's recipe, and the checks before a commit."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CONSTRAINTS = ROOT / "scripts" / "constraints"


def name_of(requirement: str) -> str:
    """`PyYAML>=6` and `pyyaml==6.0.3` name the same package."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=; ]", requirement)[0]).lower()


@pytest.mark.parametrize("file", sorted(CONSTRAINTS.glob("py*.txt")), ids=lambda file: file.name)
def test_what_the_scripts_install_is_pinned(file: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["docs"], *extras["jetstream"], *extras["compile-gpu"]]
    wanted.append("libtpu")  # of jax[tpu], by itself
    lines = file.read_text(encoding="utf-8").split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", line) for line in lines)
    pinned = [name_of(line) for line in lines]
    assert pinned == sorted(set(pinned))
    assert {name_of(each) for each in wanted} - {"jaxrl"} <= set(pinned)
