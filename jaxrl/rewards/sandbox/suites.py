"""The tests, which run in the checker's process, and the outcome of each case.

A name of the program's is a `Remote` here: calling it sends the arguments over, and returns the result, made of
Python's own types. So assertions, expected values, tolerances and random inputs stay on this side. A program fails the
test if it ends its process, prints a verdict, patches builtins or returns an object that equals everything. A test that
looks into the program's code or patches it fails too. Tests come in these forms:

- calls: a name, and arguments with the expected value of each call (LiveCodeBench, APPS);
- a function `check(candidate)` (HumanEval): each statement of its body that holds an assertion is a case, with the
  statements before it;
- statements (MBPP): each statement that holds an assertion is a case, with those before it;
- test functions and classes (KodCode, in pytest's manner): each is a case, with all its parameters.

A name that the tests do not define is the problem's if its prompt defines it (a helper of HumanEval's). Else it is
Python's or numpy's if they have it (`_Names`), or the program's. `import solution` gives the program's names.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import sys
import time
import types
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from jaxrl.rewards.sandbox.program import CALLS, RESULT, fresh_streams
from jaxrl.rewards.sandbox.wire import Peer, Remote

_MAX_WHY = 300
_MODULES = {*sys.stdlib_module_names, "numpy", "pytest"}
_HELPERS = ("collections", "copy", "datetime", "decimal", "fractions", "math", "typing")
Case = Callable[[], object]


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
        """The program's object of this name. Raises NameError."""
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


def run_tests(job: dict[str, Any]) -> NoReturn:
    """Runs the tests of a job, reports each case to the supervisor, and ends the process.

    Args:
      job: `shape`: "calls", with `name` and `cases` of [arguments, expected value]; or "tests", with `text`, and for
        HumanEval `entry_point` and `before` (what the prompt defines before that function). Of calls also `is_wrapped`
        (expected values are lists of one, whose element is right too) and `has_number_keys` (of dicts as arguments).
        `first`: the case to begin with. `max_failing_s`: what wrong cases may take together, after which none is run;
        None: no limit.
    """
    fresh_streams()
    sys.setrecursionlimit(10_000)  # a list of some hundred `ListNode`s crosses
    link = Link()
    try:
        cases = _calls(link, job) if job["shape"] == "calls" else _tests(link, job)
    except Exception as error:  # tests that are no Python
        _say(broken=_describe(error))
        os._exit(0)
    _say(cases=len(cases))
    load_error: BaseException | None = None
    most_s, failing_s = job.get("max_failing_s"), 0.0
    for index in range(first := job.get("first", 0), len(cases)):
        _say(running=index)
        start, why = time.perf_counter(), ""
        try:
            if index == first:  # the program is run in the time of the first case
                load_error = _load(link)
            if load_error is not None:  # no case is right then, not even one that asserts nothing of the program
                raise load_error
            cases[index]()
        except BaseException as error:
            why = _describe(error)
        seconds = time.perf_counter() - start
        _say(result=(index, not why, seconds, why))
        failing_s += seconds if why else 0.0
        if link.is_gone or (why and most_s is not None and failing_s >= most_s):
            os._exit(0)
    _say(done=True)
    os._exit(0)


def _load(link: Link) -> BaseException | None:
    try:
        link.wait()
    except BaseException as error:
        return error
    return _say(loaded=True)


def _say(**message: Any) -> None:
    os.write(RESULT, json.dumps(message).encode() + b"\n")


def _describe(error: BaseException) -> str:
    with contextlib.suppress(BaseException):  # which a text of the program's may raise
        return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_WHY]
    return type(error).__name__


def _calls(link: Link, job: dict[str, Any]) -> list[Case]:
    def case(arguments: list[Any], expected: Any) -> None:
        value = link.named(job["name"])(*map(_with_numbers, arguments) if job["has_number_keys"] else arguments)
        if not same(value, expected) and not (job["is_wrapped"] and same(value, expected[0])):
            raise AssertionError(f"{job['name']} returned {value!r:.100}")

    return [functools.partial(case, *row) for row in job["cases"]]


def _with_numbers(argument: Any) -> Any:
    """A dict with numbers for keys, if all of them are written so."""
    try:
        return {int(key): value for key, value in argument.items()}
    except (AttributeError, ValueError):
        return argument


def same(value: Any, expected: Any) -> bool:
    """Whether a value is the expected one, which JSON gives: a tuple is a list, a bool is no number, keys are text."""
    if isinstance(value, tuple | list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        by_text = {key if isinstance(key, str) else json.dumps(key): item for key, item in value.items()}
        return by_text.keys() == expected.keys() and all(same(by_text[key], expected[key]) for key in expected)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or (isinstance(expected, float) and math.isclose(value, expected))
    return type(value) is type(expected) and value == expected


def _tests(link: Link, job: dict[str, Any]) -> list[Case]:
    tree = ast.parse(job["text"], "tests.py")
    entry = str(job.get("entry_point") or "")
    names = _Names(link, tree, entry)
    sys.modules["solution"] = _solution(link)
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    before: list[Case] = []
    if entry and check is not None:
        others = [node for node in tree.body if node is not check and not _calls_check(node)]
        parameters = [argument.arg for argument in check.args.args]
        is_whole = len(parameters) != 1 or any(isinstance(node, ast.Return) for node in _own_nodes(check.body))
        before.append(lambda: names.running(ast.parse(job["before"], "prompt.py").body)())  # its helpers and imports
        before.append(names.running([*others, check] if is_whole else others))
        before.append(lambda: names.update(dict.fromkeys(["candidate", *parameters[:1]], link.named(entry))))
        cases = [lambda: names["check"](names["candidate"])] if is_whole else _groups(names, check.body)
    elif cases := [case for node in tree.body for case in _of_pytest(names, node)]:
        before.append(names.running([node for node in tree.body if not _is_main(node)]))
    else:
        cases = _groups(names, tree.body)
    prepare = functools.cache(lambda: [work() for work in before])
    return [lambda case=case: (prepare(), case()) for case in cases]


def _groups(names: _Names, statements: list[ast.stmt]) -> list[Case]:
    """A case for each statement with an assertion, with those before it; those after the last belong to it."""
    ends = [at + 1 for at, statement in enumerate(statements) if _asserts(statement)]
    bounds = [0, *ends[:-1], len(statements)]
    return [names.running(statements[start:end]) for start, end in itertools.pairwise(bounds)]


def _asserts(statement: ast.stmt) -> bool:
    is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    return not is_definition and any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes and what is below them, without the bodies of functions in them."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_nodes(ast.iter_child_nodes(node))


def _calls_check(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "check"


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"


def _of_pytest(names: _Names, node: ast.stmt) -> list[Case]:
    """The cases of a function or a class that pytest would collect."""
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
        return [lambda: _call_with_parameters(names[node.name])]
    if not isinstance(node, ast.ClassDef):
        return []
    name = node.name
    methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef) and part.name.startswith("test")]
    return [lambda method=method: _call_method(names[name], method) for method in methods]


def _call_method(kind: type, method: str) -> None:
    instance = kind(method) if issubclass(kind, unittest.TestCase) else kind()
    for name in ("setup_method", "setUp"):
        if hasattr(instance, name):
            getattr(instance, name)()
    _call_with_parameters(getattr(instance, method))


def _call_with_parameters(function: Any) -> None:
    """Calls a test function, once for each combination of its parameters."""
    marks = [mark.args for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    for rows in itertools.product(*(rows for _, rows, *_ in marks)):
        named: dict[str, Any] = {}
        for (words, *_), row in zip(marks, rows, strict=True):
            is_param, is_one = type(row).__name__ == "ParameterSet", isinstance(words, str) and "," not in words
            words = words.replace(",", " ").split() if isinstance(words, str) else words
            named |= dict(zip(words, row.values if is_param else (row,) if is_one else row, strict=True))
        function(**named)


class _Names(dict[str, Any]):
    """The names of the tests; missing ones are looked up on first use.

    `math.isclose` is Python's, even if the program uses the name `math`: a name is a module if the module has the
    attributes that the tests use. A bare `isclose` is Python's as well, unless the tests call nothing else, which is
    what they test.

    Args:
      entry: the function that is tested, where the tests say so.
    """

    def __init__(self, link: Link, tree: ast.Module, entry: str):
        super().__init__(__name__="tests", __builtins__=builtins)
        self._link, self._entry = link, entry
        self._attributes, self._bare = _uses(tree)
        self._tests_another = bool(entry) or any(_helper(name) is None for name in self._bare)

    def running(self, statements: list[ast.stmt]) -> Case:
        code = compile(ast.Module(statements, []), "tests.py", "exec")
        return lambda: exec(code, self)

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        value = None if name == self._entry else self._from_python(name)
        try:
            value = self._link.named(name) if value is None else value
        except NameError:
            raise KeyError(name) from None
        self[name] = value
        return value

    def _from_python(self, name: str) -> Any:
        attributes, module = self._attributes.get(name), "numpy" if name == "np" else name
        if attributes and module in _MODULES:
            found = importlib.import_module(module)
            if all(hasattr(found, attribute) for attribute in attributes):
                return found
        return _helper(name) if name in self._bare and self._tests_another else None


def _helper(name: str) -> Any:
    modules = map(importlib.import_module, _HELPERS)
    return next((vars(m)[name] for m in modules if name in getattr(m, "__all__", vars(m)) and name[0] != "_"), None)


def _uses(tree: ast.Module) -> tuple[dict[str, set[str]], set[str]]:
    """The names that tests use and do not define: by name, the attributes that they use; and the names used alone."""
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    owners = {node.value: node.attr for node in nodes if isinstance(node, ast.Attribute)}
    attributes: dict[str, set[str]] = {}
    for name in names:
        if name in owners:
            attributes.setdefault(name.id, set()).add(owners[name])
    defined = {getattr(node, "name", None) or getattr(node, "arg", None) for node in nodes} | set(dir(builtins))
    defined |= {node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    defined |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    return attributes, {node.id for node in names if node not in owners} - defined


def _solution(link: Link) -> types.ModuleType:
    """The module of `import solution`: the program's names, and none that steers an import."""

    def named(name: str) -> Any:
        try:
            return link.named("" if name.startswith("__") else name)
        except Exception as error:
            raise AttributeError(str(error)) from None

    module = types.ModuleType("solution")
    module.__getattr__ = named
    return module
