"""Responses in the layouts of public data sets and real models, and the reward that `reward.kind=math` gives them."""

import json
from pathlib import Path

from jaxrl.rewards.math import score

ROWS = [json.loads(line) for line in Path(__file__).with_name("math.jsonl").read_text("utf-8").splitlines()]


def test_responses():
    said = {row["id"]: (row, *score(row["response"], row["answer"])) for row in ROWS}
    assert {name: (reward, info) for name, (row, reward, info) in said.items() if reward != row["expect"]} == {}
