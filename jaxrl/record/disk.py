"""What the operating system said when a file could not be written, however many layers reported it.

TensorStore, under Orbax, and safetensors raise errors of their own with the system's number in the text. An error of a
background thread, or one that came while another was being handled, hangs behind the error that arrives.
"""

from __future__ import annotations

import errno
import os
import re

_NUMBER = re.compile(r"os_error_code='(\d+)'|\bOS error (\d+)\b", re.IGNORECASE)


def system_error(error: BaseException) -> OSError | None:
    """The operating system's error behind `error`, or None. One without space comes before others."""
    found, pending, seen = list[OSError](), [error], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        pending += [behind for behind in (each.__cause__, each.__context__) if behind is not None]
        if isinstance(each, OSError) and each.errno is not None:
            found.append(each)
        elif match := _NUMBER.search(str(each)):
            number = int(match[1] or match[2])
            found.append(OSError(number, os.strerror(number)))
    return next((each for each in found if is_full(each)), found[0] if found else None)


def is_full(error: OSError) -> bool:
    """Whether there is no space for what was to be written, on the device or in the user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: OSError) -> str:
    """Why, in a few words for a sentence."""
    return "no space left on the device" if error.errno == errno.ENOSPC else (error.strerror or str(error)).lower()
