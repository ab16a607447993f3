"""The sentence and the exit status with which a command ends on an error; a bug has none.

Imports little: `jaxrl.cli` answers `--help` at once.
"""

from __future__ import annotations

import os
import re

MAX_SENTENCE = 2000
"""Characters; a longer one quotes what it should not."""


def answer(error: BaseException) -> tuple[str, int] | None:
    """The sentence and the exit status for an error; None for a bug."""
    from jaxrl.record.disk import is_full
    from jaxrl.types import RunFailed

    match error:
        case OSError() if is_full(error):
            return f"{_named(error.filename)}no space left on the device", 1
        case OSError() if error.strerror:
            return _named(error.filename) + error.strerror.lower(), 2
        case ValueError() | OSError():
            return str(error), 2
        case RunFailed():
            return str(error), 1
        case MemoryError():
            return f"out of memory ({error})" if str(error) else "out of memory", 1
    return None


def one_line(text: str) -> str:
    """A sentence without line ends and control characters, and not longer than a screen."""
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "?", " ".join(text.split()))
    return text if len(text) <= MAX_SENTENCE else text[:MAX_SENTENCE] + "…"


def _named(filename: object) -> str:
    return f"{os.fsdecode(filename)}: " if isinstance(filename, str | bytes) else ""
