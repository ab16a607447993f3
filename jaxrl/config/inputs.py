"""Reading what a user hands in: whatever is wrong with a file, the error names it.

Every reader of such a file works inside `with reading(path):`. Errors that the file's own format raises without a word
about the file become one ValueError with its name; the operating system's errors keep their type and get the name.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

import yaml


@contextmanager
def reading(path: str | PathLike[str], line: int | None = None) -> Iterator[None]:
    """Names `path` (and `line`, from 1) in what the block raises.

    Other ValueErrors pass as they are: a reader that knows what is wrong names the file itself.

    Raises:
      ValueError: the content is cut off, damaged, not UTF-8, not JSON, not YAML, or nested too deeply.
      OSError: the operating system's own, with the file's name.
    """
    place = str(path) if line is None else f"{path}, line {line}"
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place}: not valid JSON ({error.msg}, {at})") from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{place}: damaged or cut off ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{place}{at}: not valid YAML ({getattr(error, 'problem', None) or error})") from None
    except RecursionError:
        raise ValueError(f"{place}: nested too deeply") from None
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
