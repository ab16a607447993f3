"""Whatever is wrong with a file that a user hands in, the error names the file."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrl.config.inputs import reading, strict_json


@pytest.mark.parametrize(
    ("content", "read", "words"),
    [
        (b"caf\xe9", lambda p: p.read_text("utf-8"), "file: not UTF-8 text (byte 3)"),
        (b'{"a": ', lambda p: json.loads(p.read_text()), "file: not valid JSON (Expecting value, column 7)"),
        (
            gzip.compress(b"x" * 99, mtime=0)[:-9],
            lambda p: gzip.GzipFile(p).read(),
            "file: damaged or cut off (Compressed file",
        ),
        (b"[" * 200_000, lambda p: json.loads(p.read_text()), "file: nested too deeply"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, read: Callable[[Path], object], words: str):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"file: ") as caught, reading(file):
        read(file)
    assert str(caught.value).startswith(str(tmp_path))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1, "b": {"c": 2, "c": 2}}', "key 'c' stands twice in one object"),
        ('{"a": NaN}', "NaN is no number in JSON"),
        ("9" * 5000, "a whole number has 5000 digits, and at most 400 are read"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_what_pythons_json_lets_pass_is_refused(content: str, words: str):
    with pytest.raises(ValueError, match=f"^{re.escape(f'file, line 3: {words}')}$"), reading("file", line=3):
        strict_json(content)
