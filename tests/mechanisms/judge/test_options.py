"""When a judge may take a turn, and which options are refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl.config import ConfigError, from_mapping
from jaxrl.mechanisms.judge import Judge


@pytest.mark.parametrize(
    ("when", "share", "busy", "allowed"),
    [
        ("gaps", 0.5, 4, True),
        ("gaps", 0.5, 5, False),
        ("gaps", 0.0, 0, True),
        ("gaps", 0.0, 1, False),
        ("gaps", 1.0, 8, True),
        ("after", 1.0, 1, False),
        ("after", 0.0, 0, True),
    ],
)
def test_turns_by_rows(when, share, busy, allowed):
    assert Judge.Options(when=when, busy_share=share).allows_turn(busy, 8) == allowed


ENDPOINT = {"endpoint": "http://localhost:8000/v1", "endpoint_model": "m"}


@pytest.mark.parametrize(
    ("judge", "sentence"),
    [
        ({}, "reward.kind=judge needs one of reward.judge.model and reward.judge.endpoint, found neither"),
        ({**ENDPOINT, "model": "m"}, "needs one of reward.judge.model and reward.judge.endpoint, found both"),
        ({"model": "m", "api_key_env": "K"}, "api_key_env (K) needs reward.judge.endpoint, which is empty"),
        ({**ENDPOINT, "endpoint_model": ""}, "reward.judge.endpoint_model is missing"),
        ({**ENDPOINT, "endpoint": "localhost:8000"}, "must be a URL such as http://localhost:8000/v1, found 'localh"),
        ({**ENDPOINT, "endpoint": "http://"}, "found 'http://'"),
        ({**ENDPOINT, "endpoint": "http://h:99999/v1"}, "found 'http://h:99999/v1'"),
        ({**ENDPOINT, "endpoint": "http://h/a b"}, "found 'http://h/a b'"),
        ({**ENDPOINT, "endpoint": "http://me:secret@h/v1"}, "found one with a name or password in it"),
        ({**ENDPOINT, "endpoint": "http://h/v1?a=b"}, "without a query and a fragment"),
        ({**ENDPOINT, "endpoint": "http://h/v1/chat/completions"}, "without /chat/completions at its end"),
        ({**ENDPOINT, "prompt": "{answer}"}, "reward.judge.prompt must have the field {response}, found '{answer}'"),
        ({**ENDPOINT, "score_pattern": "("}, "reward.judge.score_pattern ('(') is no regular expression: "),
        ({**ENDPOINT, "score_pattern": r"\d+"}, "must have a group"),
        ({**ENDPOINT, "min_score": 10.0}, "reward.judge.min_score (10) must be below reward.judge.max_score (10)"),
        ({**ENDPOINT, "num_samples": 2}, "reward.judge.num_samples (2) needs reward.judge.temperature above 0"),
    ],
)
def test_refused(judge: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as refused:
        from_mapping({"model": {"path": "m"}, "reward": {"kind": "judge", "judge": judge}})
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)


def test_refused_with_other_options():
    judge = {"model": {"path": "m"}, "reward": {"kind": "judge", "judge": ENDPOINT}, "data": {"answer_key": ""}}
    with pytest.raises(ConfigError, match=r"has the field \{answer\}, but data\.answer_key is empty"):
        from_mapping(judge)
    in_a_domain = {"model": {"path": "m"}, "reward": {"domains": {"essays": {"kind": "judge"}}}}
    with pytest.raises(ConfigError, match="found neither"):
        from_mapping(in_a_domain)
    for reward, sentence in (
        ({"kind": "model"}, r"reward\.judge\.model is missing"),
        ({"kind": "model", "judge": {"model": "m", "endpoint": "http://h/v1"}}, r"needs reward\.kind=judge"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            from_mapping({"model": {"path": "m"}, "reward": reward})
