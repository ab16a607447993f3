"""Every `jaxrl` command of README, CONTRIBUTING, docs/ and of the headers in configs/: its arguments are known, and its
configuration loads."""

from __future__ import annotations

import shutil
from itertools import takewhile
from pathlib import Path

import pytest
from pages import ROOT, Command, page_commands

from jaxrl.cli import _parser
from jaxrl.commands.arguments import parse
from jaxrl.config.files import load

COMMANDS = [command for command in page_commands() if command.words[0] == "jaxrl"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_the_arguments_and_the_configuration_are_known(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "examples"):
        Path(name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "configs" / "quickstart.yaml", "run.yaml")  # a reader's own
    words = takewhile(lambda word: word not in ("|", ">"), command.words[1:])
    options = parse(*_parser(), list(words))
    if hasattr(options, "config"):
        load(options.config, [*([] if options.config else ["model.path=m"]), *options.overrides])
