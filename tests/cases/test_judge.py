"""What a judge says, and the reward that the default options make of it; null: its text holds no score."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.verdicts import JudgeText

ROWS = [json.loads(line) for line in Path(__file__).with_name("judge.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in ROWS])
def test_verdict(row: dict[str, Any]):
    reward, info = JudgeText(Judge.Options()).read([row["verdict"]])
    found = None if "error" in info else reward
    assert found == (None if row["reward"] is None else pytest.approx(row["reward"]))
