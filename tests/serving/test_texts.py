"""Text that grows with a response: the pieces are the whole, and nothing of a stop string is handed out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.serving.generation import GrowingText


@pytest.fixture(scope="module")
def of_bytes(tiny_model: Path) -> Tokenizer:
    """A token per byte: characters come in pieces."""
    return Tokenizer.from_path(tiny_model)


@pytest.fixture(scope="module")
def of_words(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_path(smollm2)


PARTS = ("hello ", "é", "漢字", "🙂", "👩‍👩‍👧", "\n", "  ", "#### 4", "ab", "a", "<|im_end|>", "�")
STOPS = ((), ("ab",), ("字🙂", "zz"), ("#### ", "##"), ("aab", "\n\n", "a"))


@given(data=st.data())
def test_pieces_are_the_text_before_the_first_stop_string(
    data: st.DataObject, of_bytes: Tokenizer, of_words: Tokenizer
):
    tokenizer = data.draw(st.sampled_from((of_bytes, of_words)))
    ids = tokenizer.encode("".join(data.draw(st.lists(st.sampled_from(PARTS), max_size=12))))
    stops = data.draw(st.sampled_from(STOPS))
    text, pieces, place, ends = GrowingText(tokenizer, stops), [], 0, not ids
    while not ends:  # the engine ends a response at its first stop string
        new = ids[place : place + data.draw(st.integers(1, 5))]
        place += len(new)
        ends = place == len(ids) or any(stop in tokenizer.decode(ids[:place]) for stop in stops)
        pieces.append(text.add(new, ends=ends))
    whole = tokenizer.decode(ids)
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert "".join(pieces) == text.text == whole[: min(found, default=None)]
