"""A function in a Python file of the user's, named by two options: a scorer, or a filter for groups."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def user_function(path: str, name: str, section: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Imports the user's file and checks the function in it, which is called with `arguments` by their names.

    Raises ValueError if either is wrong; the message begins with an option of `section`, which names both.
    """
    if not Path(path).is_file():
        raise ValueError(f"{section}.path: no such file: {path}")
    # by a name of its own: the file may be called math.py, and two runs' files may be called the same
    module_name = f"jaxrl_user_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{section}.path must name a Python file (.py), found {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(f"{section}.path: importing {path} failed with {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise ValueError(f"{section}.name: {path} must define a function {name!r}, found {found}")
    _check_signature(function, f"{path}: {name}", arguments)
    return function


def _check_signature(function: Callable[..., Any], what: str, arguments: tuple[str, ...]) -> None:
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{what} must be an ordinary function, found an async one")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        wanted = ", ".join(arguments)
        raise ValueError(f"{what} must take ({wanted}), by these names; found {signature}: {error}") from error
