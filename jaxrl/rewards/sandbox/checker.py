"""What the tests have of the program, in the checker's process.

A name of the program's is a `Remote` here: calling it sends the arguments over, and gives the value that came back,
made of Python's own types. So assertions, expected values, tolerances and random inputs stay on this side. A program
that ends its process, prints a verdict, patches builtins or returns an object that equals everything fails the test.

A list, dict or set that the program changed in place is changed here as well, and the program may call a function that
a test passed to it. A test that looks into the program's code, or patches it, fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxrl.rewards.sandbox.program import CALLS
from jaxrl.rewards.sandbox.wire import Peer, Remote


class ProgramEnded(BaseException):
    """The program's process is gone, or says what is no value. No `Exception`, as tests may expect one of those."""


class CannotCross(BaseException):
    """A test passes something on that has no plain form."""


class Link(Peer):
    """The way to the program's process."""

    def __init__(self) -> None:
        super().__init__(CALLS)
        self.is_gone = False

    def named(self, name: str) -> Any:
        """What the program calls by this name. Raises NameError."""
        return self.ask("name", -1, [name], {})

    def ask(self, what: str, number: int, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        if self.is_gone:
            raise ProgramEnded("the program has ended")
        return super().ask(what, number, arguments, named)

    def do(self, what: str, number: int, *arguments: Any, **named: Any) -> Any:
        if what != "call":  # an attribute of a function of the tests could tell what they expect
            raise TypeError("a program may only call what a test passed to it")
        return self._objects[number](*arguments, **named)

    def ended(self, why: str) -> NoReturn:
        self.is_gone = True
        self.close()
        raise ProgramEnded(why)

    def refer(self, value: Any) -> list[Any]:
        if isinstance(value, Remote) or callable(value):
            return super().refer(value)
        with contextlib.suppress(Exception):  # LeetCode's ListNode: the prompt defines it in the program too
            kind = self.named(type(value).__name__ if type(value).__module__ == "tests" else "")
            made = Remote.__getattr__(kind, "__new__")(kind)
            for name, item in vars(value).items():
                setattr(made, name, item)
            return super().refer(made)
        raise CannotCross(f"a test hands a {type(value).__name__} to the program, which cannot cross to its process")
