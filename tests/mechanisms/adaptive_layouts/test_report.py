"""The log of layouts, and the picture that a run's page draws of it."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from jaxrl.mechanisms import page_parts
from jaxrl.record.layouts import FILE_NAME
from jaxrl.report.page import write_report


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"step": 1}', "KeyError: 'kind'"),
        ('{"step": 1, "kind": "a", "source": "x", "points": [[1]], "switches": []}', "a point must be three numbers"),
        ('{"step": 1, "kind": "a", "source": "x", "points": [], "switches": [{}]}', "KeyError: 'from_tp'"),
        ("[", "JSONDecodeError"),
    ],
)
def test_the_page_is_made_without_a_damaged_record(tmp_path: Path, line: str, words: str):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / FILE_NAME).write_text(line + "\n")
    text = write_report(tmp_path, parts=page_parts()).read_text()
    assert "layouts.jsonl, line 1: damaged" in text
    assert words in html.unescape(text)
