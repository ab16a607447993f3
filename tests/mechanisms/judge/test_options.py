"""When a judge may take a turn, and which options are refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl.config import ConfigError, from_mapping

ENDPOINT = {"endpoint": "http://localhost:8000/v1", "endpoint_model": "m"}


@pytest.mark.parametrize(
    ("judge", "sentence"),
    [
        ({}, "reward.kind=judge needs one of reward.judge.model and reward.judge.endpoint, found neither"),
        ({**ENDPOINT, "endpoint": "http://me:secret@h/v1"}, "found one with a name or password in it"),
        ({**ENDPOINT, "prompt": "{answer}"}, "reward.judge.prompt must have the field {response}, found '{answer}'"),
        ({**ENDPOINT, "score_pattern": "("}, "reward.judge.score_pattern ('(') is no regular expression: "),
        ({**ENDPOINT, "num_samples": 2}, "reward.judge.num_samples (2) needs reward.judge.temperature above 0"),
    ],
)
def test_refused(judge: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as refused:
        from_mapping({"model": {"path": "m"}, "reward": {"kind": "judge", "judge": judge}})
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)
