"""What `jaxrl explain-config` says of rewards."""

from typing import Any

from jaxrl.config import Config, from_mapping
from jaxrl.rewards.explained import part_lines, reward_rows


def config(data: dict[str, Any] | None = None, **reward: Any) -> Config:
    data = {"answer_key": "answer", "max_response_length": 1500, **(data or {})}
    return from_mapping({"model": {"path": "x"}, "data": data, "reward": reward})


def test_every_place_has_its_limits():
    domains = {
        "gsm8k": {"kind": "math", "timeout_s": 3.0},
        "kodcode": {"kind": "code", "weight": 2.0, "max_concurrent": 6},
        "essays": {"kind": "judge"},
        "mine": {"kind": "custom", "path": "my.py", "name": "score"},
    }
    judge = {"endpoint": "http://localhost:8/v1", "endpoint_model": "qwen", "requests_per_minute": 90.0}
    made = config(domains=domains, judge=judge, num_workers=8)
    assert reward_rows(made)[1:] == [
        ("gsm8k", "math", "3 s a sample", "5 of 8 processes", "1"),
        ("kodcode", "code: all tests", "2 to 30 s a test case", "6 of 8 processes", "2"),
        ("essays", "judge: qwen at http://localhost:8/v1", "60 s a request", "8 requests, 90 a minute", "1"),
        ("mine", "custom: score of my.py", "10 s a sample", "5 of 8 processes", "1"),
        ("other sources", "auto: math", "2 s a sample", "5 of 8 processes", "1"),
    ]
    on_devices = config(kind="judge", judge={"model": "a/folder", "when": "after"})
    assert reward_rows(on_devices)[1][1:4] == ("judge: a/folder", "none", "8 verdicts, after")


def test_parts():
    parts = {
        "tags": {"pattern": "<a>.*", "weight": 0.2},
        "brief": {"kind": "length", "free_tokens": 1000, "weight": 0.5},
        "tone": {"kind": "custom", "path": "my.py", "name": "tone"},
    }
    assert part_lines(config(parts=parts, overlong_buffer={"enable": True, "len": 500})) == [
        "plus 0.2 × tags: format, <a>.*",
        "plus 0.5 × brief: length, from 1,000 to 1,500 tokens",
        "plus 1 × tone: custom, tone of my.py",
        "minus up to 1 over the last 500 of 1,500 tokens, in training",
    ]
