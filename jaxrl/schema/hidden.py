"""Takes secrets out of texts that come from outside, or show an option, before they are shown or kept.

Lookups are bounded, so that the time grows with a text's length only.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable

_SHOWN = "***"
# up to the last @, unless what follows the colon is a port
_OF_URL = r"(?<=//)(?:[^\s/?#:\"'<>]{1,300}:(?!\d+[/?#])[^\s\"'<>]{0,300}|[^\s/?#\"'<>]{0,300})(?=@)"
_BASE64 = {"+": "(?:[+-]|%2[Bb])", "/": r"(?:\\?/|_|%2[Ff])"}
_LEAST_BASE64 = 4  # characters of which base64 is looked for; fewer are in many words


def hider(key: str = "") -> Callable[[str], str]:
    """A function that puts `***` in place of users and passwords in URLs, and of `key` (printable ASCII; empty: none).

    The key is found verbatim, percent-encoded, escaped as in JSON, Python or HTML, in hexadecimal, and in base64. Each
    is also found as a part of a longer text that was encoded.
    """
    forms = [_OF_URL, *(["".join(map(_written, key)), *_in_base64(key)] if key else [])]
    pattern = re.compile("|".join(forms))
    return lambda text: pattern.sub(_SHOWN, text)


def _written(character: str) -> str:
    """A pattern of the ways to write a character."""
    number, raw = ord(character), rf"\\{{0,4}}{re.escape(character)}"
    coded = rf"(?i:(?:%(?:25){{0,2}}|\\{{1,4}}(?:u00|x)|&\#x0{{0,4}})?{number:02x};?)|&\#0{{0,4}}{number};"
    named = {html.escape(character), "+" if character == " " else character} - {character}
    return f"(?:{'|'.join([*map(re.escape, named), raw, coded])})"


def _in_base64(key: str) -> list[str]:
    """Patterns of what base64 makes of the key, by where in three bytes it begins. The outermost characters also hold
    bits of its neighbours."""
    found: list[str] = []
    for before, first in enumerate((0, 2, 3)):
        data = bytes(before) + key.encode()
        inner = base64.b64encode(data).decode()[first : len(data) * 4 // 3]
        if len(inner) >= _LEAST_BASE64:
            body = r"(?:\s|\\[nr]){0,2}".join(_BASE64.get(each, each) for each in inner)
            found.append(f"[A-Za-z0-9+/_-]?{body}[A-Za-z0-9+/_-]?={{0,2}}")
    return found
