"""What test programs use of pytest: `raises`, `approx`, `mark.parametrize`, `fail` and `skip`.

pytest itself takes a third of a second to import, reads files, and need not be installed where samples are scored.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

PARAMETERS = "jaxrl_parameters"
"""The attribute of a test function that holds what it is called with: (names, rows) of each decorator."""


class Skipped(Exception):
    """A test skipped itself; it has not passed."""


class _Raises:
    def __init__(self, kinds: Any, match: str | None = None):
        self._kinds, self._match = kinds, match
        self.value: Any = None
        self.type: Any = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> bool:
        if error is None:
            raise AssertionError(f"did not raise {self._kinds}")
        if not isinstance(error, self._kinds):
            return False
        self.value, self.type = error, kind
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{self._match!r} does not match {str(error)!r}")
        return True


def _raises(kinds: Any, *work: Any, match: str | None = None, **named: Any) -> Any:
    context = _Raises(kinds, match)
    if not work:
        return context
    with context:
        work[0](*work[1:], **named)
    return context


class _Approx:
    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False):
        self._expected, self._rel, self._abs, self._nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, other: object) -> bool:
        return self._is_near(other, self._expected)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    def _is_near(self, value: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return (
                isinstance(value, dict)
                and value.keys() == expected.keys()
                and all(self._is_near(value[key], expected[key]) for key in expected)
            )
        if isinstance(expected, list | tuple):
            return (
                isinstance(value, list | tuple)
                and len(value) == len(expected)
                and all(self._is_near(a, b) for a, b in zip(value, expected, strict=True))
            )
        if not isinstance(value, int | float | complex) or not isinstance(expected, int | float | complex):
            return type(value) is type(expected) and value == expected
        if value == expected:
            return True
        if isinstance(expected, float) and math.isnan(expected):
            return self._nan_ok and isinstance(value, float) and math.isnan(value)
        if isinstance(expected, float) and math.isinf(expected):
            return False
        relative = (1e-6 if self._rel is None and self._abs is None else self._rel or 0.0) * abs(expected)
        return abs(value - expected) <= max(relative, 1e-12 if self._abs is None else self._abs)


def _parametrize(names: str | Sequence[str], rows: Sequence[Any], **_: Any) -> Callable[[Any], Any]:
    words = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def mark(function: Any) -> Any:
        there = getattr(function, PARAMETERS, [])
        setattr(function, PARAMETERS, [*there, (words, [row if len(words) > 1 else (row,) for row in rows])])
        return function

    return mark


class _Mark:
    parametrize = staticmethod(_parametrize)

    def __getattr__(self, _: str) -> Any:
        def mark(*arguments: Any, **named: Any) -> Any:
            if len(arguments) == 1 and callable(arguments[0]) and not named:
                return arguments[0]
            return lambda function: function

        return mark


def _fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


def _skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def module() -> types.ModuleType:
    made = types.ModuleType("pytest")
    made.__dict__.update(raises=_raises, approx=_Approx, mark=_Mark(), fail=_fail, skip=_skip, param=lambda *v, **_: v)
    return made
