"""One way to run the cases of the battery, for every class of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from refusals import Refusal, check_all


@pytest.fixture
def refused(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Iterable[Refusal]], None]:
    """Runs cases, each in a folder of its own, and checks what came of them."""
    return partial(check_all, folder=tmp_path, model=tiny_model, capsys=capsys, monkeypatch=monkeypatch)
