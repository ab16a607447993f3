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
    from jaxrl.record.files import is_full, reason
    from jaxrl.types import RunFailed

    match error:
        case OSError() if error.strerror or is_full(error):
            return _named(error.filename) + reason(error), 1 if is_full(error) else 2
        case ValueError() | OSError():
            return str(error), 2
        case RunFailed():
            return str(error), 1
        case MemoryError():
            return f"out of memory ({error})" if str(error) else "out of memory", 1
        case AssertionError() | RuntimeError() if _is_of_no_devices(error):
            asked = os.environ["JAX_PLATFORMS"]
            return (
                f"JAX_PLATFORMS={asked}: JAX finds no such devices here: unset it to use those that there are, or "
                "install jaxrl[cuda12] or jaxrl[cuda13] for NVIDIA GPUs",
                2,
            )
    return None


def _is_of_no_devices(error: BaseException) -> bool:
    """Whether jax could not start the platforms that the environment asks for. It says so by an assertion, or by a
    RuntimeError, depending on the platform."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    module = "" if where is None else where.tb_frame.f_globals.get("__name__")
    return bool(os.environ.get("JAX_PLATFORMS")) and module == "jax._src.xla_bridge"


def one_line(text: str) -> str:
    """A sentence without line ends, control characters and secrets of URLs, and not longer than a screen."""
    from jaxrl.schema.hidden import hider

    text = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "?", " ".join(hider()(text).split()))
    return text if len(text) <= MAX_SENTENCE else text[:MAX_SENTENCE] + "…"


def _named(filename: object) -> str:
    return f"{os.fsdecode(filename)}: " if isinstance(filename, str | bytes) else ""
