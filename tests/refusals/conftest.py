"""One way to run a case of the battery, for every class of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from refusals import Refusal, check


@pytest.fixture
def refused(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Refusal], None]:
    """Runs a case in the test's folder and checks what came of it."""
    return partial(check, folder=tmp_path, model=tiny_model, capsys=capsys, monkeypatch=monkeypatch)
