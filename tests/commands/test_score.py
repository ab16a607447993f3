"""`jaxrl score`: responses of a file, scored without a model."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxrl.cli import main

SLOW_FIRST = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "slow":
        time.sleep(0.3)
    if solution_str == "raise":
        raise KeyError("x")
    return {"score": float(len(solution_str)), "level": extra_info["level"], "question": extra_info["question"]}
"""


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def scored(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    assert main(["score", "--out", str(folder / "out.jsonl"), *arguments]) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_math(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [
        {"question": "6+6", "answer": "so it is #### 12", "response": "It is 12."},
        {"question": "6+6", "answer": 12, "response": r"\boxed{13}"},
    ]
    lines = scored(tmp_path, "--responses", write(tmp_path / "a.jsonl.gz", rows), "reward.kind=math")
    assert [(line["row"], line["source"], line["reward"], line["status"]) for line in lines] == [
        (1, "a", 1.0, "ok"),
        (2, "a", 0.0, "ok"),
    ]
    assert lines[1]["info"] == {"extracted": "13", "extracted_by": "boxed", "compared_by": "number"}
    assert capsys.readouterr().out == "2 responses, mean reward 0.5, 1 with a reward of 1 or more\n"


def test_lines_keep_the_files_order_and_failures_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """The first response is the last to be scored, and there are more of them than go at once."""
    (tmp_path / "reward.py").write_text(SLOW_FIRST)
    texts = ["slow", "raise", *("x" * (i % 7) for i in range(300))]
    rows = [{"response": text, "level": i} for i, text in enumerate(texts)]
    lines = scored(
        tmp_path,
        *("--responses", write(tmp_path / "a.jsonl", rows), "reward.kind=custom", "reward.num_workers=2"),
        f"reward.path={tmp_path / 'reward.py'}",
    )
    assert [line["row"] for line in lines] == list(range(1, 303))
    assert [line["reward"] for line in lines] == [4.0, 0.0, *(float(i % 7) for i in range(300))]
    error = f"KeyError: 'x' ({tmp_path / 'reward.py'}, line 7, in compute_score)"
    assert lines[1]["info"] == {"error": error}
    assert capsys.readouterr().out.endswith(f"1 errors (the last one: {error})\n")
    assert f"reward 0 for {tmp_path / 'a.jsonl'}, line 2: {error}" in caplog.text
