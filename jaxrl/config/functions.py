"""Functions of the user's: a Python file and a name in options, imported and checked."""

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
def user_function(option: tuple[str, str], path: str, name: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Imports the user's file and checks the function in it.

    Args:
      option: the names of the options that give `path` and `name`.
      path: the Python file. It runs once per process for each option that names it.
      name: the function in it.
      arguments: the names that it is called with.

    Raises:
      ValueError: the file or the function is wrong.
    """
    of_path, of_name = option
    function = getattr(_module(of_path, path), name, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise ValueError(f"{of_name}: {path} must define a function {name!r}, found {found}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{path}: {name} must be an ordinary function, found an async one")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        wanted = ", ".join(arguments)
        raise ValueError(f"{path}: {name} must take ({wanted}), by these names; found {signature}: {error}") from error
    return function


def _module(option: str, path: str) -> Any:
    if not Path(path).is_file():
        raise ValueError(f"{option}: no such file: {path}")
    # by a name of its own: the file may be called math.py, and two runs' files may be called the same
    module_name = f"jaxrl_user_{hashlib.sha256(f'{option} {path}'.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{option} must name a Python file (.py), found {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(f"{option}: importing {path} failed with {type(error).__name__}: {error}") from error
    return module
