"""YAML as configuration files use it: strict where plain YAML would change a value or drop one in silence.

A key that appears twice is refused. `1e-6` is a number (YAML 1.1 would read text), a date is text. `010` and `1:30`
are refused: YAML 1.1 reads them as 8 and 90, and later versions otherwise. Anchors and merges work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from jaxrl.config.inputs import ConfigError, one_line, reading

_MERGE = "tag:yaml.org,2002:merge"
_DATE = "tag:yaml.org,2002:timestamp"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """Safe YAML without dates, in which a number means what it looks like."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
for _first, _found in _Loader.yaml_implicit_resolvers.items():  # the class's own since the call above
    _Loader.yaml_implicit_resolvers[_first] = [(tag, pattern) for tag, pattern in _found if tag != _DATE]


def parse_yaml(text: str, place: str, lines: bool = True) -> tuple[Any, yaml.Node | None]:
    """The value of a text and its node, which has the lines; `lines`: errors name them as well. Raises ConfigError
    where the text is not YAML, or is refused: see the module's docstring."""
    with reading(place):
        loader = None
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            if node is None:
                return None, None
            _check(node, set())
            return _unshared(loader.construct_document(node)), node
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f", line {mark.line + 1}" if mark and lines else ""
            raise ConfigError(f"{place}{where}: {_problem(error, lines)}") from None
        except (yaml.YAMLError, ValueError, TypeError) as error:  # such as a date that does not exist
            raise ConfigError(f"{place}: not valid YAML ({one_line(str(error))})") from None
        finally:
            if loader is not None:
                loader.dispose()


_STAR = (
    " (to YAML * begins an alias: put text with it in quotation marks; a pattern of files on this machine is not "
    "filled in, each file is named: docs/your-data.md)"
)

_BRACKET = ' (to YAML { begins a mapping and [ a list: put text that begins with one in quotation marks, "{...}")'


def _problem(error: yaml.MarkedYAMLError, is_file: bool) -> str:
    problem = error.problem or "not valid YAML"
    if problem.startswith("but ") and error.context:
        problem = f"{error.context}, {problem}"
    if error.context == "while scanning an alias":
        return one_line(problem) + _STAR
    cut_off = is_file and problem.endswith("'<stream end>'")
    if ("flow" in (error.context or "") or problem.endswith(("'{'", "'['"))) and not cut_off:
        return one_line(problem) + _BRACKET
    return one_line(problem)


def _check(node: yaml.Node, seen: set[int]) -> None:
    """Raises MarkedYAMLError for what the module's docstring refuses."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(node)
        for each in node.value:
            _check(each[0], seen)
            _check(each[1], seen)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check(each, seen)
    else:
        _refuse_misread(node)


def _refuse_twice(node: yaml.MappingNode) -> None:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        line = key.start_mark.line + 1
        if key.value in seen:
            raise yaml.MarkedYAMLError(
                None, None, f"{key.value!r} is given twice, first in line {seen[key.value]}", key.start_mark
            )
        seen[key.value] = line


def _refuse_misread(node: yaml.Node) -> None:
    if node.tag not in _NUMBERS:
        return
    digits = node.value.lstrip("+-").replace("_", "")
    if ":" in digits:
        problem = f"{node.value} would be read to base 60: write a plain number, or put it in quotation marks"
    elif re.fullmatch(r"0[0-7]+", digits):
        problem = f"{node.value} would be read to base 8, as {int(digits, 8)}: leave out the leading 0"
    else:
        return
    raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)


def _unshared(value: Any) -> Any:
    """Copies of all lists and mappings: an alias and its anchor are one object, and an override must change one."""
    match value:
        case dict():
            return {key: _unshared(element) for key, element in value.items()}
        case list():
            return [_unshared(element) for element in value]
        case _:
            return value


def yaml_places(node: yaml.Node | None, prefix: str, file: str) -> Iterator[tuple[str, str]]:
    """(option, `file, line 3`) of all keys under a node, and of the items of lists (`a.b[1]`)."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = f"{prefix}.{key.value}" if prefix else key.value
                yield name, f"{file}, line {key.start_mark.line + 1}"
                yield from yaml_places(value, name, file)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield f"{prefix}[{i}]", f"{file}, line {item.start_mark.line + 1}"
            yield from yaml_places(item, f"{prefix}[{i}]", file)
