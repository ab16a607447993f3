"""Functions of the user's: a Python file and a name in options, read, run and checked.

Reading and running are apart: a run reads the file once, and whichever process needs the function runs that text. So a
file that is changed or deleted later changes nothing, and a reward file never runs in the trainer.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl.config.inputs import MODULE_PREFIX, reading

_MAX_ERROR_CHARS = 500


@dataclass(frozen=True)
class UserFile:
    """A Python file as it was when the run began."""

    path: str
    text: str


def read_user_file(option: str, path: str) -> UserFile:
    """Reads the file that `option` names. Raises ValueError, or OSError with its name, if it is none that can run."""
    file = Path(path).expanduser().resolve()
    if not file.exists():
        raise ValueError(f"{option}: no such file: {file}")
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"{option} must name a Python file (.py), found {file}")
    try:
        with reading(file):
            text = importlib.util.decode_source(file.read_bytes())
    except SyntaxError as error:  # in its first lines, which may name an encoding
        raise ValueError(f"{option}: {file} cannot be read as text: {error.msg}") from None
    return UserFile(str(file), text)


@functools.cache
def user_function(
    option: tuple[str, str], file: UserFile, name: str, arguments: tuple[str, ...], takes_all: bool = True
) -> Callable[..., Any]:
    """Runs the user's file, once per process for each option that names it, and checks the function in it. Raises
    ValueError where either is wrong. `option`: those that give the file and `name`; `arguments`: the names that the
    function is called with, one of which it must take without `takes_all`."""
    of_path, of_name = option
    module = user_module(of_path, file)
    function = getattr(module, name, None)
    if not callable(function):
        found = _functions(module, of_name) if function is None else type(function).__name__
        raise ValueError(f"{of_name}: {file.path} must define a function {name!r}, found {found}")
    if isinstance(function, type):
        raise ValueError(f"{of_name}: {file.path}: {name} is a class: name an instance of it, as x in x = {name}()")
    for kind, is_kind in (
        ("an async one: have an ordinary one call asyncio.run", inspect.iscoroutinefunction),
        ("a generator", inspect.isgeneratorfunction),
    ):
        if any(is_kind(each) or inspect.isasyncgenfunction(each) for each in (function, function.__call__)):
            raise ValueError(f"{of_name}: {file.path}: {name} must be an ordinary function, found {kind}")
    wanted = f"{of_name}: {file.path}: {name} must take ({', '.join(arguments)}), by these names"
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise ValueError(f"{wanted}; found a function without a signature that can be read") from None
    if takes_all:
        try:
            signature.bind(**dict.fromkeys(arguments))
        except TypeError as error:
            raise ValueError(f"{wanted}; found {signature}: {error}") from error
    elif not any(each.name in arguments or each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        raise ValueError(f"{of_name}: {file.path}: {name} must take one of {', '.join(arguments)}; found {signature}")
    return function


@functools.cache
def user_module(option: str, file: UserFile) -> ModuleType:
    """Runs the user's file that `option` names, once per process. Raises ValueError where it fails."""
    # by a unique name: the file may be called math.py, and two runs' files may be called the same
    module_name = f"{MODULE_PREFIX}{hashlib.sha256(f'{option} {file.path}'.encode()).hexdigest()[:12]}"
    module = ModuleType(module_name)
    module.__file__ = file.path
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    # the lines that tracebacks show; without a time of change, so that the file on the disk is not asked again
    linecache.cache[file.path] = (len(file.text), None, file.text.splitlines(keepends=True), file.path)
    try:
        exec(compile(file.text, file.path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(
            f"{option}: importing {file.path} failed{_line(error, file.path)} with {_text(error)}"
        ) from error
    return module


def _functions(module: ModuleType, option: str) -> str:
    """The names that a file defines instead of a missing function, as the end of an error."""
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    if len(names) == 1:
        return f"{names[0]}: {option}={names[0]}"
    return f"{', '.join(names[:10])} ({option} names one)" if names else "nothing"


def _line(error: BaseException, path: str) -> str:
    """Where in the user's file: the deepest of its lines that was running, or the one that cannot be read."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f" in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" in line {lines[-1]}" if lines else ""


def _text(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    message = " ".join(message.split())[:_MAX_ERROR_CHARS]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
