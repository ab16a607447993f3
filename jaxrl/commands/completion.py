"""Completion in shells: `jaxrl completion bash|zsh|fish` prints a script, which calls `jaxrl` at each Tab.

Options of the configuration are offered section by section and end in `=`; after it come names, or files where the
option is a path. argcomplete walks our own parser, so a new command or option needs no line here. Never imports jax: a
Tab takes as long as `jaxrl --help`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import argcomplete
from argcomplete.completers import ChoicesCompleter, FilesCompleter, SuppressCompleter
from argcomplete.shell_integration import shellcode

from jaxrl.commands.arguments import OVERRIDE
from jaxrl.config.reference import OptionDoc, options, sections


def script(shell: str) -> str:
    """The script for bash, zsh or fish: `eval "$(jaxrl completion bash)"`."""
    return shellcode(["jaxrl"], shell=shell)


def answer_shell(parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Writes the completions of the words before the cursor, and ends the process. Only such a script calls it."""
    for command in commands.values():
        for action in command._actions:
            if action.metavar == OVERRIDE:
                action.completer = overrides  # pyright: ignore[reportAttributeAccessIssue]
            elif "--config" in action.option_strings:
                action.completer = config_files  # pyright: ignore[reportAttributeAccessIssue]
            elif action.metavar in ("SECTION", "PROMPT"):
                action.completer = _sections if action.metavar == "SECTION" else SuppressCompleter()  # pyright: ignore[reportAttributeAccessIssue]
            elif names := names_of(action):
                action.completer = ChoicesCompleter(dict.fromkeys(names, ""))  # pyright: ignore[reportAttributeAccessIssue]
    # options of a command are offered behind a dash: they would be lost among the configuration's
    argcomplete.autocomplete(parser, always_complete_options=False)


def names_of(action: argparse.Action) -> tuple[str, ...]:
    """The words that the help shows as `{a,b}`; empty where any text may be given."""
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return tuple(shown[1:-1].split(",")) if shown.startswith("{") else ()


def overrides(*, prefix: str, **_: Any) -> Mapping[str, str]:
    """Completes `section.option=value`."""
    every = {option.path: option for option in options() if ".NAME." not in option.path}
    path, equals, value = prefix.partition("=")
    if not equals:
        return _described(next_names([f"{name}=" for name in every], prefix))
    return dict.fromkeys((f"{path}={each}" for each in values_of(every[path], value)), "") if path in every else {}


def config_files(*, prefix: str, **_: Any) -> list[str]:
    """Completes a configuration file; where no folder `configs` is here, those that come with jaxrl as well."""
    from jaxrl.config.files import OWN

    found = list(FilesCompleter(("yaml", "yml", "gin"))(prefix))
    if not Path(OWN.name).exists():
        names = (file.relative_to(OWN.parent).as_posix() for file in OWN.rglob("*.yaml"))
        found += sorted(name for name in names if name.startswith(prefix))
    return found


def _sections(*, prefix: str, **_: Any) -> Mapping[str, str]:
    names = {*sections(), *(option.path for option in options())}
    return _described(next_names(sorted(names), prefix))


def _described(names: Iterable[str]) -> dict[str, str]:
    texts = {option.path: option.doc for option in options()} | sections()
    return {name: " ".join(texts.get(name.rstrip(".="), "").split()) for name in names}


def next_names(paths: Iterable[str], prefix: str) -> list[str]:
    """The completions of `prefix`: up to the next dot, or further where there is only one."""
    fits = [path for path in paths if path.startswith(prefix)]
    at = len(prefix)
    while True:
        heads = list(dict.fromkeys(path[: end + 1] if (end := path.find(".", at)) >= 0 else path for path in fits))
        if len(heads) != 1 or not heads[0].endswith("."):
            return heads
        at = len(heads[0])


def values_of(option: OptionDoc, begun: str) -> Iterable[str]:
    """The values of an option; `begun` is what the user has typed of one."""
    if option.names:
        return FilesCompleter()(begun)
    return option.choices
