"""A real tokenizer, which takes seconds to read."""

from pathlib import Path

import pytest

from jaxrl.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smol(smollm2: Path) -> Tokenizer:
    """SmolLM2's; tests change copies of it."""
    return Tokenizer.from_path(smollm2)
