"""Completion in shells: `jaxrl completion bash|zsh|fish` prints a script, which calls `jaxrl` at each Tab.

Options of the configuration end in `=`; after it come names, or files where the option is a path. argcomplete walks our
own parser, so a new command or option needs no line here. Never imports jax: a Tab takes as long as `jaxrl --help`.
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
from jaxrl.config.reference import options, sections


def script(shell: str) -> str:
    """The script for bash, zsh or fish: `eval "$(jaxrl completion bash)"`."""
    return shellcode(["jaxrl"], shell=shell)


def answer_shell(parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Writes the completions of the words before the cursor, and ends the process. Only such a script calls it."""
    for command in commands.values():
        for action in command._actions:
            action.completer = _completer(action)  # pyright: ignore[reportAttributeAccessIssue]
    # options of a command are offered behind a dash: they would be lost among the configuration's
    argcomplete.autocomplete(parser, always_complete_options=False)


def _completer(action: argparse.Action) -> Any:
    shown = action.metavar if isinstance(action.metavar, str) else ""
    if shown == OVERRIDE:
        return overrides
    if "--config" in action.option_strings:
        return config_files
    if shown == "SECTION":
        return _of([*sections(), *(option.path for option in options())])
    if shown == "PROMPT":
        return SuppressCompleter()
    return _of(shown[1:-1].split(",")) if shown.startswith("{") else FilesCompleter()


def _of(words: Iterable[str]) -> ChoicesCompleter:
    return ChoicesCompleter(dict.fromkeys(words, ""))


def overrides(*, prefix: str, **_: Any) -> list[str]:
    """Completes `section.option=value`."""
    every = {option.path: option for option in options() if ".NAME." not in option.path}
    path, equals, value = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in every]
    if path not in every:
        return []
    values = FilesCompleter()(value) if every[path].names else every[path].choices
    return [f"{path}={each}" for each in values]


def config_files(*, prefix: str, **_: Any) -> list[str]:
    """Completes a configuration file; where no folder `configs` is here, those that come with jaxrl as well."""
    from jaxrl.config.files import OWN

    found = list(FilesCompleter(("yaml", "yml", "gin"))(prefix))
    if not Path(OWN.name).exists():
        names = (file.relative_to(OWN.parent).as_posix() for file in OWN.rglob("*.yaml"))
        found += sorted(name for name in names if name.startswith(prefix))
    return found
