"""Which tests a run of limited time begins with: other files each day, so that all come round."""

from collections.abc import Sequence
from datetime import date
from itertools import groupby
from typing import Protocol, TypeVar

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, fall into the widest gap that earlier ones left


class InFile(Protocol):
    @property
    def path(self) -> object: ...


Test = TypeVar("Test", bound=InFile)


def from_days_file(items: Sequence[Test], day: date) -> list[Test]:
    """`items`, file after file as they come, beginning with the file whose turn it is on `day`."""
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    first = int(day.toordinal() * GOLDEN % 1 * len(files))
    return [test for file in files[first:] + files[:first] for test in file]
