"""Where a stop string ends a response, by itself and in an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from replay_worker import ReplayWorker

from jaxrl.data.stops import stop_string_check
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.types import SampleKey, SamplingParams

KEY = SampleKey(0, 0, 0)


class Bytes:
    """One token per character."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids)


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


def test_a_stop_string_ends_a_request_in_the_engine():
    worker = ReplayWorker({KEY: 30})
    engine = Engine(worker, BatcherConfig(decode_steps=4), stop_check=stop_string_check(Bytes()))
    whole = Engine(ReplayWorker({KEY: 30}), BatcherConfig(decode_steps=4)).generate(
        [Request(0, KEY, (1, 2), SamplingParams(max_tokens=40))]
    )[0]
    stop = Bytes().decode(whole.token_ids.tolist())[9:12]
    text = Bytes().decode(whole.token_ids.tolist())
    cut = engine.generate([Request(0, KEY, (1, 2), SamplingParams(max_tokens=40, stop_strings=(stop,)))])[0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids.tolist() == whole.token_ids.tolist()[: text.index(stop) + len(stop)]
