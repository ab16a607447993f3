"""`jaxrl options`: every option as text for a terminal of 80 columns, or as JSON.

Without a name it lists all, a line each; with one, what `find` finds, with texts. Never imports jax.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jaxrl.config.options import Config
from jaxrl.config.reference import OptionDoc, options, sections
from jaxrl.config.verl_options import RENAMED, advice, advice_by_word

_WIDTH = 80
_SHORT = 3
"""Characters of a last name, such as `lr`, that other names contain by chance."""
_NAME, _DEFAULT = 27, 16
"""Columns of the list of all options; a longer name or default takes its line for itself."""


def options_text(name: str = "") -> str:
    """The options that `find` finds; all of them, a line each, for an empty name."""
    if not name:
        return _overview(options())
    found = find(name)
    if len(found) == 1 and found[0].path == name:
        return _whole(found[0])
    said = sections().get(name) or (name in RENAMED and f"of verl or TRL, here {RENAMED[name]}")
    about = [*textwrap.wrap(f"{name}: {said}", _WIDTH, break_on_hyphens=False), ""] if said else []
    return "\n".join([*about, "\n\n".join(_block(option) for option in found)])


def options_json(name: str = "") -> str:
    return json.dumps([asdict(option) for option in (find(name) if name else options())], indent=1)


def schema_json() -> str:
    """The JSON schema of a configuration file, by which editors complete options and mark what is wrong."""
    return json.dumps(Config.model_json_schema(), indent=1)


def find(name: str) -> list[OptionDoc]:
    """The options that match, by the first of these tests that finds any: the exact name; the section; a prefix of the
    name; a name of verl's or TRL's; the short last name; a word of the name that begins so, or a value that is the
    word; all words in the name or the description. Raises ValueError if none matches."""
    every, name = options(), name.rstrip(".=")
    same = RENAMED.get(name, "").split(" and ")
    none = f"options: there is no section and no option {name!r:.80}"
    for fits in (
        lambda option: option.path == name,
        lambda option: option.path.startswith(f"{name}."),
        lambda option: option.path.startswith(name),
        lambda option: name in RENAMED and (option.path in same or option.path.rpartition(".")[2] == name),
        lambda option: option.path.rpartition(".")[2] == name and len(name) <= _SHORT,
        lambda option: _begins(name, option.path) or name.lower() in option.choices,
        lambda option: all(_begins(word, f"{option.path} {option.doc}") for word in name.split()),
    ):
        if found := [option for option in every if fits(option)]:
            return found
    of_verl = advice(name)
    if (said := of_verl[1] if of_verl else advice_by_word(name)) is not None:
        raise ValueError(f"{none}: {said}")
    names = [*sections(), *(option.path for option in every)]
    last = {option.path.rpartition(".")[2]: option.path for option in every}
    near = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name, list(last), n=1)
    hint = f"did you mean {last.get(near[0], near[0])}?" if near else "jaxrl options lists them all"
    raise ValueError(f"{none}: {hint}")


def _begins(word: str, text: str) -> bool:
    """Whether a word of a text begins so; `_` and `.` part the words of a name."""
    return re.search(rf"(?<![a-z0-9]){re.escape(word)}", text, re.IGNORECASE) is not None


def _overview(every: Sequence[OptionDoc]) -> str:
    lines: list[str] = []
    before = None
    for option in every:
        section, _, name = option.path.rpartition(".")
        if section != before:
            lines += ["", section]
            before = section
        lines.append(_line(name, shown(option.default), option.allowed))
    lines += ["", "jaxrl options SECTION, or an option, shows their texts too: jaxrl options hosts"]
    return "\n".join(lines[1:])


def _line(name: str, default: str, allowed: str) -> str:
    head = f"  {name:<{_NAME}} {_cut(default, _WIDTH - _NAME - 4):<{_DEFAULT}} "
    if len(head) <= _NAME + _DEFAULT + 4:
        return head + _cut(allowed, _WIDTH - len(head))
    return f"{head.rstrip()}\n{'':{_NAME + _DEFAULT + 4}}{_cut(allowed, _WIDTH - _NAME - _DEFAULT - 4)}"


def _block(option: OptionDoc) -> str:
    value = "   (empty)" if shown(option.default) == "empty" else shown(option.default)
    head = f"{option.path}={_cut(value, _WIDTH - len(option.path) - 1)}"
    return "\n".join([head, *_wrapped(f"{option.allowed}. {option.doc}")])


def _whole(option: OptionDoc) -> str:
    known = [
        ("default", shown(option.default)),
        ("type", option.names or option.type),
        ("bounds", option.bounds),
        ("at most", option.cap),
        ("in YAML", _yaml(option)),
    ]
    lines = [option.path, *_wrapped(option.doc), ""]
    for title, text in known:
        if text:
            first, *rest = textwrap.wrap(text, _WIDTH - 14, break_long_words=False, break_on_hyphens=False)
            lines += [f"    {title:<9} {first}", *(f"{'':14}{more}" for more in rest)]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _yaml(option: OptionDoc) -> str:
    """The option with its default as a line of YAML: `rollout: {n: 8}`."""
    names = option.path.split(".")
    return f"{': {'.join(names)}: {json.dumps(option.default)}{'}' * (len(names) - 1)}"


def shown(value: Any) -> str:
    """A default as the command line takes it; `empty` where it is no text, no list and no mapping."""
    if value in ("", [], {}):
        return "empty"
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
