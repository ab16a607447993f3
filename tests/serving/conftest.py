"""A server in the test's own process, without HTTP: clients talk to its routes."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import LENGTH, ROWS, Talk, talk_to

from jaxrl.text import TextEngine


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> TextEngine:
    return TextEngine.from_path(
        f"random:{tiny_model}", max_length=LENGTH, num_slots=ROWS, decode_steps=4, top_logprobs=20
    )


@pytest.fixture
def talk(engine: TextEngine) -> Talk:
    return talk_to(engine)
