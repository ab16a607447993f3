"""Runs a program's file under another Python, which need not have jaxrl: nothing but the standard library is imported.

Started with the file's path, it reads a request and writes an answer as a line of JSON each: `call` (the name of a
function of the file) with `given` (its arguments by name), answered by `value` (null where there is no such function),
or by `error`. What the file prints goes to standard error.
"""

import asyncio
import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with asyncio.Runner() as loop:  # one for all: what is kept between calls may belong to it
        made = None
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                made = runpy.run_path(sys.argv[1], run_name="program") if made is None else made
                found = {"value": called(made.get(asked["call"]), asked["given"], loop)}
            except BaseException as error:
                kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
                found = {"error": f"{kind}{error}"}
            # what is numpy's as numbers, and all else that JSON does not have as text
            answers.write(json.dumps(found, default=lambda value: getattr(value, "tolist", value.__str__)()) + "\n")
            answers.flush()


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(given)
    return {each.name: given[each.name] for each in parameters if each.name in given}


def called(function: Any, given: Mapping[str, Any], loop: asyncio.Runner) -> Any:
    """A function's result, awaited if it is async; a value that is no function is returned as it is."""
    if not callable(function):
        return function
    value = function(**accepted(function, given))
    return loop.run(value) if inspect.iscoroutine(value) else value


if __name__ == "__main__":
    main()
