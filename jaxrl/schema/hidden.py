"""Takes secrets out of texts that come from outside, or show an option, before they are shown or kept.

Lookups are bounded, so that the time grows with a text's length only.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from urllib.parse import quote, quote_plus

_SHOWN = "***"
# up to the last @, unless what follows the colon is a port
_OF_URL = r"(?<=//)(?:[^\s/?#:\"'<>]{1,300}:(?!\d+[/?#])[^\s\"'<>]{0,300}|[^\s/?#\"'<>]{0,300})(?=@)"


def hider(key: str = "") -> Callable[[str], str]:
    """A function that puts `***` in place of users and passwords in URLs, and of `key` (printable ASCII; empty: none):
    verbatim, percent-encoded, or escaped as in JSON, Python or HTML."""
    forms = {key, quote(key, safe=""), quote(key), quote_plus(key), json.dumps(key)[1:-1], repr(key)[1:-1]}
    forms |= {html.escape(key), html.escape(key, quote=False)}
    longest_first = sorted(filter(None, forms), key=len, reverse=True)
    pattern = re.compile("|".join([_OF_URL, *map(re.escape, longest_first)]))
    return lambda text: pattern.sub(_SHOWN, text)
