"""What the options of environments refuse, each with the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxrl.config import ConfigError, from_mapping

TOOLS = {"kind": "tools", "path": "tools.py"}


@pytest.mark.parametrize(
    ("environment", "others", "words"),
    [
        ({"kind": "tools"}, {}, "environment.path is missing: environment.kind is tools, which needs a Python file"),
        (TOOLS | {"python": "python3"}, {}, "environment.python (python3) needs environment.kind openai or verifiers"),
        (
            TOOLS | {"max_trajectory_tokens": 65},
            {"data": {"max_response_length": 64}},
            "environment.max_trajectory_tokens (65 tokens) must be at most data.max_response_length (64 tokens)",
        ),
        (
            TOOLS | {"group": "G"},
            {"algorithm": {"filter_groups": {"enable": True}}},
            "environment.group excludes algorithm.filter_groups.enable",
        ),
    ],
)
def test_what_does_not_go_together(environment: dict[str, Any], others: dict[str, Any], words: str):
    sections = {"model": {"path": "m"}, "environment": environment, "data": {"train_files": ["x"]}}
    for name, section in others.items():
        sections[name] = {**sections.get(name, {}), **section}
    with pytest.raises(ConfigError, match=re.escape(words)):
        from_mapping(sections)
