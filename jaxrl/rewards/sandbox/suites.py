"""The cases of a test program, run in the checker's process, and what became of each.

Tests come in these forms:

- calls: a name, and arguments with the expected value of each call (LiveCodeBench, APPS);
- a function `check(candidate)` (HumanEval): each statement of its body that holds an assertion is a case, with the
  statements before it;
- statements (MBPP): each statement that holds an assertion is a case, with those before it;
- test functions and classes (KodCode, in pytest's manner): each is a case, with all its parameters.

A name that the tests do not define is the problem's own if its prompt defines it (a helper of HumanEval's), Python's or
numpy's if it is one of theirs (`_Names`), and the program's otherwise. `import solution` gives the program's names.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import itertools
import json
import math
import os
import sys
import time
import types
import unittest
from collections.abc import Callable
from typing import Any, NoReturn, cast

from jaxrl.rewards.sandbox import pytest_like
from jaxrl.rewards.sandbox.checker import Link
from jaxrl.rewards.sandbox.program import RESULT, fresh_streams

_MAX_WHY = 300
_MODULES = {*sys.stdlib_module_names, "numpy", "pytest"}
_ALIASES = {"np": "numpy"}
_HELPERS = ("collections", "copy", "datetime", "decimal", "fractions", "math", "typing")
Case = Callable[[], None]


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
    link = Link()
    try:
        cases = _calls(link, job) if job["shape"] == "calls" else _Suite(link, job).cases
    except Exception as error:  # tests that are no Python
        _say(broken=f"{type(error).__name__}: {error}"[:_MAX_WHY])
        os._exit(0)
    _say(cases=len(cases))
    load_error: BaseException | None = None
    is_loaded = False
    most_s, failing_s = job.get("max_failing_s"), 0.0
    for index in range(job.get("first", 0), len(cases)):
        _say(start=index)
        start, why = time.perf_counter(), ""
        try:
            if not is_loaded:  # in the time of the first case that is run
                is_loaded = True
                try:
                    link.loaded()
                except BaseException as error:
                    load_error = error
                else:
                    _say(loaded=True)
            if load_error is not None:  # no case is right then, not even one that asserts nothing of the program
                raise load_error
            cases[index]()
        except BaseException as error:
            why = _describe(error)
        seconds = time.perf_counter() - start
        _say(end=index, ok=not why, why=why, seconds=seconds)
        failing_s += seconds if why else 0.0
        if link.is_gone or (why and most_s is not None and failing_s >= most_s):
            os._exit(0)
    _say(done=True)
    os._exit(0)


def _say(**message: Any) -> None:
    os.write(RESULT, json.dumps(message).encode() + b"\n")


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_MAX_WHY] if str(error) else type(error).__name__
    except BaseException:
        return type(error).__name__


def _calls(link: Link, job: dict[str, Any]) -> list[Case]:
    def case(arguments: list[Any], expected: Any) -> Case:
        def work() -> None:
            value = link.named(job["name"])(*map(_with_numbers, arguments) if job["has_number_keys"] else arguments)
            if not same(value, expected) and not (job["is_wrapped"] and same(value, expected[0])):
                raise AssertionError(f"{job['name']} returned {value!r:.100}")

        return work

    return [case(arguments, expected) for arguments, expected in job["cases"]]


def _with_numbers(argument: Any) -> Any:
    """A dict with numbers for keys, if all of them are written so."""
    try:
        return {int(key): value for key, value in argument.items()}
    except (AttributeError, ValueError):
        return argument


def same(value: Any, expected: Any) -> bool:
    """Whether a value is the expected one, which JSON gives: a tuple is a list, a bool is no number, keys are text."""
    if isinstance(value, tuple | list) and isinstance(expected, list):
        return len(value) == len(expected) and all(same(a, b) for a, b in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, dict):
        by_text = {key if isinstance(key, str) else json.dumps(key): item for key, item in value.items()}
        return by_text.keys() == expected.keys() and all(same(by_text[key], expected[key]) for key in expected)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or (isinstance(expected, float) and math.isclose(value, expected))
    return type(value) is type(expected) and value == expected


class _Names(dict[str, Any]):
    """The names of the tests; those that are not there are looked up when they are needed.

    `math.isclose` is Python's, whatever the program calls `math`: a module is what has the attributes that the tests
    ask of its name. A bare `isclose` is Python's as well, unless the tests call nothing else, which is what they test.

    Args:
      entry: the function that is tested, where the tests say so.
    """

    def __init__(self, link: Link, tree: ast.Module, entry: str):
        super().__init__(__name__="tests", __builtins__=builtins)
        self._link, self._entry = link, entry
        self._attributes, self._bare = _uses(tree)
        self._tests_another = bool(entry) or any(_helper(name) is None for name in self._bare)

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
        attributes, module = self._attributes.get(name), _ALIASES.get(name, name)
        if attributes and module in _MODULES:
            found = importlib.import_module(module)
            if all(hasattr(found, attribute) for attribute in attributes):
                return found
        return _helper(name) if name in self._bare and self._tests_another else None


def _helper(name: str) -> Any:
    modules = map(importlib.import_module, _HELPERS)
    return next((vars(m)[name] for m in modules if name in getattr(m, "__all__", vars(m)) and name[0] != "_"), None)


def _uses(tree: ast.Module) -> tuple[dict[str, set[str]], set[str]]:
    """What tests use and do not define: by name, the attributes that they ask of it; and the names that stand alone."""
    nodes = list(ast.walk(tree))
    owners = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    inner = {node.value for node in owners}
    attributes: dict[str, set[str]] = {}
    for node in owners:
        attributes.setdefault(cast(ast.Name, node.value).id, set()).add(node.attr)
    defined = {getattr(node, "name", None) or getattr(node, "arg", None) for node in nodes} | set(dir(builtins))
    defined |= {node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and node not in inner}
    return attributes, bare - defined


class _Solution(types.ModuleType):
    def __init__(self, link: Link):
        super().__init__("solution")
        self._link = link

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["_link"].named(name)
        except NameError as error:
            raise AttributeError(str(error)) from None


class _Suite:
    def __init__(self, link: Link, job: dict[str, Any]):
        sys.modules["solution"], sys.modules["pytest"] = _Solution(link), pytest_like.module()
        self._link = link
        self._setup: list[Case] = []  # what is left to run before the first case
        self._setup_error: BaseException | None = None
        tree = ast.parse(job["text"], "tests.py")
        entry = str(job.get("entry_point") or "")
        self._names = _Names(link, tree, entry)
        check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
        if entry and check is not None:
            # the problem's own helpers and imports, as the prompt defines them
            self._setup.append(lambda: self._run(ast.parse(job["before"], "prompt.py").body)())
            self._names_check(tree, check, entry)
        else:
            self.cases = self._of_module(tree)

    def _names_check(self, tree: ast.Module, check: ast.FunctionDef, entry: str) -> None:
        def bind() -> None:
            self._names[check.args.args[0].arg] = self._names["candidate"] = self._link.named(entry)

        has_return = any(isinstance(node, ast.Return) for node in check.body for node in _own_nodes(node))
        others = [node for node in tree.body if node is not check and not _calls_check(node)]
        if has_return or len(check.args.args) != 1:  # its body is no sequence of cases
            self._setup += [self._run([*others, check]), bind]
            self.cases = [self._case(lambda: self._names["check"](self._names["candidate"]))]
        else:
            self._setup += [self._run(others), bind]
            self.cases = self._groups(check.body)

    def _of_module(self, tree: ast.Module) -> list[Case]:
        tests = [case for node in tree.body for case in self._of_test(node)]
        if not tests:
            return self._groups(tree.body)
        self._setup.append(self._run([node for node in tree.body if not _is_main(node)]))
        return [self._case(test) for test in tests]

    def _of_test(self, node: ast.stmt) -> list[Case]:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            return [lambda name=node.name: _call_with_parameters(self._names[name])]
        if isinstance(node, ast.ClassDef):
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            return [
                lambda kind=node.name, method=method: self._call_method(kind, method)
                for method in methods
                if method.startswith("test")
            ]
        return []

    def _call_method(self, kind: str, method: str) -> None:
        made = self._names[kind]
        instance = made(method) if isinstance(made, type) and issubclass(made, unittest.TestCase) else made()
        for name in ("setup_method", "setUp"):
            if hasattr(instance, name):
                getattr(instance, name)()
        _call_with_parameters(getattr(instance, method))

    def _groups(self, statements: list[ast.stmt]) -> list[Case]:
        """A case for each statement with an assertion, with those before it; those after the last belong to it."""
        groups: list[list[ast.stmt]] = [[]]
        for statement in statements:
            groups[-1].append(statement)
            if _asserts(statement):
                groups.append([])
        last = groups.pop()
        if groups:
            groups[-1] += last
        else:
            groups.append(last)
        return [self._case(self._run(group)) for group in groups]

    def _run(self, statements: list[ast.stmt]) -> Case:
        code = compile(ast.Module(statements, []), "tests.py", "exec")
        return lambda: exec(code, self._names)

    def _case(self, work: Case) -> Case:
        def case() -> None:
            while self._setup:
                try:
                    self._setup.pop(0)()
                except BaseException as error:
                    self._setup_error = error
                    self._setup.clear()
            if self._setup_error is not None:
                raise self._setup_error
            work()

        return case


def _asserts(statement: ast.stmt) -> bool:
    is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    return not is_definition and any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _own_nodes(node: ast.AST) -> list[ast.AST]:
    """A node and what is below it, without the bodies of functions in it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return [node]
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _own_nodes(child))]


def _calls_check(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "check"


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"


def _call_with_parameters(function: Any) -> None:
    """Calls a test function, once for each combination of its parameters."""
    parameters = getattr(function, pytest_like.PARAMETERS, [])
    for rows in itertools.product(*(rows for _, rows in parameters)):
        named: dict[str, Any] = {}
        for (names, _), row in zip(parameters, rows, strict=True):
            named |= dict(zip(names, row, strict=True))
        function(**named)
