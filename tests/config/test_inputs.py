"""Whatever is wrong with a file that a user hands in, the error names the file."""

from __future__ import annotations

import re

import pytest

from jaxrl.config.inputs import reading, strict_json


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1, "b": {"c": 2, "c": 2}}', "key 'c' stands twice in one object"),
        ('{"a": NaN}', "NaN is no number in JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a": "\\ud800"}', "'a' holds half a character (\\ud800 without its other half)"),
        ('["\\udc00"]', "it holds half a character (\\udc00 without its other half)"),
    ],
)
def test_what_pythons_json_lets_pass_is_refused(content: str, words: str):
    with pytest.raises(ValueError, match=f"^{re.escape(f'file, line 3: {words}')}$"), reading("file", line=3):
        strict_json(content)
