"""What `jaxrl profile` and `jaxrl tune` are asked for, by Python callers as well: numbers within bounds."""

import re

import pytest

from jaxrl.commands.profile import ProfileOptions
from jaxrl.commands.tune import TuneOptions


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"repeats": 0}, "--repeats must be at least 1, found 0"),
        ({"repeats": 5000}, "--repeats must be at most 1000 (every point takes that many times as long), found 5000"),
        ({"max_batch": -1}, "--max-batch must be at least 0, found -1"),
        ({"token_budget": -1}, "--token-budget must be at least 0, found -1"),
        ({"max_context": -5}, "--max-context must be at least 0, found -5"),
    ],
)
def test_profile(options, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        ProfileOptions(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "--steps must be at least 1, found 0"),
        ({"seeds": 10**6}, "--seeds must be at most 1000 (each is a run of its own), found 1000000"),
        ({"processes": 10**5}, "--processes must be at most 256 (each has a Python of its own), found 100000"),
        ({"values": (1.1, float("nan"))}, "--values must be at least 1, found nan"),
        (
            {"response_factors": (101,)},
            "--response-factors must be at most 100 (a round would launch that many batches at once), found 101",
        ),
    ],
)
def test_tune(options, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        TuneOptions(**options)
