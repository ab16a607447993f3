"""Responses in the layouts of public data sets and real models, and the reward that `reward.kind=math` gives them."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl.rewards.math import score

ROWS = [json.loads(line) for line in Path(__file__).with_name("math.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in ROWS])
def test_response(row: dict[str, Any]):
    reward, info = score(row["response"], row["answer"])
    assert reward == row["expect"], info
