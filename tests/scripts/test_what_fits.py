"""The table of what fits on a card is what the memory plan says."""

from __future__ import annotations

from pathlib import Path

import pytest
import what_fits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "adapters-2026-11-27.md"


def test_the_page_has_what_the_script_prints(capsys: pytest.CaptureFixture[str]):
    assert what_fits.main() == 0
    assert capsys.readouterr().out in PAGE.read_text(encoding="utf-8")
