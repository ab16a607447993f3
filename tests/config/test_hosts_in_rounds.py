"""What several hosts exclude because a host has no tokens of the others before a round has ended."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl.config import ConfigError, from_mapping


def config(**sections: Any) -> Any:
    return from_mapping({"model": {"path": "x"}, **sections})


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"algorithm": {"filter_groups": {"enable": True, "path": "f.py"}}, "rollout": {"n": 4}},
            r"algorithm.filter_groups.path \(f.py\) and hosts.num \(2\) exclude each other",
        ),
    ],
)
def test_what_looks_at_tokens_in_the_middle_of_a_round(sections: dict[str, Any], sentence: str):
    config(**sections)
    with pytest.raises(ConfigError, match=sentence):
        config(**sections, hosts={"num": 2})
