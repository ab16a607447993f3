"""Responses in the layouts of public data sets and real models, and the reward that `reward.kind=math` gives them.

A row with `given` compares an answer, without looking for it in a response.
"""

import json
from pathlib import Path

from jaxrl.rewards.math import equal, score

ROWS = [json.loads(line) for line in Path(__file__).with_name("math.jsonl").read_text("utf-8").splitlines()]


def test_responses():
    said = {
        row["id"]: (
            row,
            *(equal(row["given"], row["answer"]) if "given" in row else score(row["response"], row["answer"])),
        )
        for row in ROWS
    }
    assert {name: (reward, info) for name, (row, reward, info) in said.items() if reward != row["expect"]} == {}
