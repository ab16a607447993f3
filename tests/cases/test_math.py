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


def test_pairs_of_a_grammar():
    """500 pairs of thirteen kinds, half of them one value in two spellings. The grammar that drew them knows which are
    equal; math-verify alone judges 79 of them wrongly."""
    lines = Path(__file__).with_name("math_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    for kind, how, is_equal, answer, reference in map(json.loads, lines):
        assert score(rf"So it is \boxed{{{answer}}}.", reference)[0] == is_equal, (kind, how, answer, reference)
