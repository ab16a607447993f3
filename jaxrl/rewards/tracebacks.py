"""Where a scorer failed: the line in the user's file, and the traceback for `rewards.log`."""

from __future__ import annotations

import contextlib
import os
import traceback
from types import TracebackType

from jaxrl.config.inputs import MODULE_PREFIX

_MAX_CHARS = 16_000  # of one traceback


def error_location(error: BaseException) -> str:
    """`my_reward.py, line 2, in compute_score`: the innermost frame in a file of the user's, or else the innermost of
    all. Empty for a ValueError of ours, whose sentence says what is wrong, and where there is no traceback."""
    found, last = None, error.__traceback__
    each = error.__traceback__
    while each is not None:
        found, last, each = each if _is_users(each) else found, each, each.tb_next
    if found is None and last is not None:
        is_ours = str(last.tb_frame.f_globals.get("__name__")).partition(".")[0] == "jaxrl"
        found = None if is_ours and isinstance(error, ValueError) else last
    if found is None:
        return ""
    code = found.tb_frame.f_code
    return f"{shown_path(code.co_filename)}, line {found.tb_lineno}, in {code.co_name}"


def shown_path(path: str) -> str:
    """A path as a user would write it: from the working folder if it lies below it."""
    with contextlib.suppress(OSError, ValueError):
        short = os.path.relpath(path)
        if os.path.isabs(path) and not short.startswith(os.pardir):
            return short
    return path


def _is_users(at: TracebackType) -> bool:
    names = at.tb_frame.f_globals
    is_ours = str(names.get("__name__")).startswith(MODULE_PREFIX)
    return is_ours and at.tb_frame.f_code.co_filename == names.get("__file__")


def place_and_traceback(error: BaseException) -> tuple[str, str]:
    """Type and place of an error, and its traceback from the user's file on, at most `_MAX_CHARS` of it. Never raises:
    it is a user's error, whose own methods may fail."""
    try:
        place = f"{type(error).__name__} {error_location(error)}"
        first = error.__traceback__
        while first is not None and not _is_users(first):
            first = first.tb_next
        text = "".join(traceback.format_exception(type(error), error, first or error.__traceback__))
        if len(text) > _MAX_CHARS:  # the end of it says what was raised
            text = f"{text[: _MAX_CHARS // 2]}\n...\n{text[-_MAX_CHARS // 2 :]}"
        return place, text
    except BaseException:
        return "", ""
