"""Where a stop string ends a response (tests/scheduling/tokens/test_engine.py: in an engine)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from replayed_backend import Bytes

from jaxrl.data.stops import stop_string_check
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.types import SampleKey, SamplingParams

KEY = SampleKey(0, 0, 0)


def request_with(*stops: str) -> Request:
    return Request(0, KEY, (1,), SamplingParams(stop_strings=stops))


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("abcdef", ("cd",), 4),
        ("abcdef", ("zz",), None),
        ("abcdef", ("f", "bc"), 3),
        ("abcabc", ("abc",), 3),
    ],
)
def test_stop_strings_keep_the_first_prefix_that_holds_one(text: str, stops: tuple[str, ...], kept: int | None):
    ids = np.asarray([ord(c) - 97 for c in text])
    assert stop_string_check(Bytes())(request_with(*stops), ids) == kept


def test_a_stop_string_may_end_inside_a_token_and_characters_may_span_tokens():
    class Pieces:
        words = ("x", "ab", "cd", "é")

        def decode(self, ids: Sequence[int]) -> str:
            data = b"".join(bytes([i - 300]) if i >= 300 else self.words[i].encode() for i in ids)
            return data.decode(errors="replace")

    check = stop_string_check(Pieces())
    assert check(request_with("bc"), [0, 1, 2, 0]) == 3
    first, second = "é".encode()
    assert check(request_with("é"), [0, 300 + first, 300 + second, 1]) == 3
    assert check(request_with("é"), [0, 300 + first]) is None
