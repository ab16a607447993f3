"""The tables of what fits on a card, and on several, are what the memory plan says."""

from __future__ import annotations

from pathlib import Path

import pytest
import what_fits

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "arguments"),
    [
        ("benchmarks/adapters-2026-11-27.md", ()),
        ("performance.md", ("--devices", "8")),
        ("performance.md", ("--states",)),
    ],
)
def test_the_page_has_what_the_script_prints(page: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert what_fits.main(arguments) == 0
    assert capsys.readouterr().out in (DOCS / page).read_text(encoding="utf-8")
