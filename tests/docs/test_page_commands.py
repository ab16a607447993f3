"""Every command of README, CONTRIBUTING, docs/ and of the headers in configs/: those that take seconds run, and the
arguments and configurations of the others are read.

A command that a page gains is taken up by itself: it runs as written in a folder that holds what it names, with the
options of a rule below added where it does not give them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from page_world import SMALL, World, environment
from pages import Command, page_commands
from runs import asked

from jaxrl.cli import _parser, main
from jaxrl.commands.arguments import parse
from jaxrl.config.files import load


@dataclass(frozen=True, eq=False)
class Rule:
    """How commands run that a pattern fits, from their beginning; the first rule that fits counts.

    Attributes:
      added: options for commands that do not give them.
      shell: that runs the command; none: this process.
      more: what the command needs and does not name.
      begins: it begins, up to its first step.
    """

    pattern: str
    added: Mapping[str, str] = field(default_factory=dict)
    shell: str = ""
    more: tuple[str, ...] = ()
    begins: bool = False


RULES = (
    Rule(r"eval .*bash", shell="bash"),
    Rule(r"jaxrl completion fish", shell="fish"),
    Rule(r"printf|python -c", shell="bash", more=("out/tiny",)),
    Rule(r"jaxrl (options|report runs/a|score|explain-layout|explain-config|export runs/a)"),
    Rule(r"jaxrl simulate .*run.yaml", {"data.train_batch_size": "128"}),
    Rule(r"jaxrl simulate --config \S+( simulate.num_devices=8)?$", {"trainer.total_training_steps": "3"}),
    Rule(
        r"jaxrl train .*chain_sum.yaml trainer.run_dir=runs/a",
        SMALL,
        begins=True,
    ),
)
OTHERS = r"jaxrl|\./scripts/|pip install|python (-m|scripts|tests|examples)|ray start|curl|lm_eval|eval"
"""What does not run here: it takes long, or needs a network, a GPU, a server or another package. Those of ours are
read, but for servers that are named by a run."""


def rule_of(command: Command) -> Rule | None:
    text = " ".join(command.words)
    rule = next((rule for rule in RULES if re.match(rule.pattern, text)), None)
    assert rule or re.match(OTHERS, text), f"{command.place}: no rule says how to run {command.text!r}"
    return rule


FOUND = [(command, rule_of(command)) for command in page_commands()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def run(command: Command, rule: Rule, folder: Path) -> None:
    """As a reader would, with the rule's options."""
    missing = {name: value for name, value in rule.added.items() if command.given(name) is None}
    added = [
        word for name, value in missing.items() for word in ([f"{name}={value}"] if "." in name else [name, value])
    ]
    if not rule.shell:
        assert main([*command.words[1:], *added], asked() if rule.begins else None) == 0
        return
    if shutil.which(rule.shell) is None:
        pytest.skip(f"{rule.shell} is not installed")
    done = subprocess.run(
        [rule.shell, "-c", command.text],
        cwd=folder,
        env=environment(folder, dict(command.variables)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (done.returncode, done.stderr) == (0, ""), "a shell goes on where $(...) or a pipe has failed"


def written_by(command: Command) -> list[str]:
    """What the command says that it writes."""
    found = [command.given("--out"), *re.findall(r"> (\S+)$", command.text)]
    if command.words[:2] == ("jaxrl", "export"):
        found.append(f"{command.words[3]}/model.safetensors")
    if command.words[:2] == ("jaxrl", "train") and (run_dir := command.given("trainer.run_dir")):
        found += [f"{run_dir}/report.html", f"{run_dir}/checkpoints"]
    return [name for name in found if name]


RUN = [pytest.param(command, rule, id=command.place) for command, rule in FOUND if rule]


@pytest.mark.parametrize(("command", "rule"), RUN)
def test_a_command_runs(command: Command, rule: Rule, world: World, folder: Path, request: pytest.FixtureRequest):
    if command.words[:2] == ("jaxrl", "explain-config"):
        request.getfixturevalue("smollm2")
    world.place_for(command, folder, *rule.more)
    run(command, rule, folder)
    for name in written_by(command):
        assert (folder / name).exists(), name


READ = [command for command, rule in FOUND if rule is None and command.words[0] == "jaxrl"]


@pytest.mark.parametrize("command", READ, ids=lambda command: command.place)
def test_the_arguments_and_the_configuration_of_the_others_are_known(command: Command, world: World, folder: Path):
    world.reading_place(folder)
    options = parse(*_parser(), command.words[1:])
    if hasattr(options, "config"):
        load(options.config, options.overrides)


def test_every_rule_is_used():
    used = [rule for _, rule in FOUND]
    assert [rule.pattern for rule in RULES if rule not in used] == []
