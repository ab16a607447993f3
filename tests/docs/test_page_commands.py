"""Every command of README, CONTRIBUTING, docs/ and of the headers in configs/ runs, or is listed with a reason.

A command that a page gains is taken up by itself: it runs as written in a folder that holds what it names, with the
options of a rule below added where it does not give them. If it names something new, or nothing fits it, its test
fails until `RULES`, or what `page_world.World` makes, is completed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from page_world import SMALL, World, environment
from pages import Command, page_commands
from runs import asked

from jaxrl.cli import _parser, main
from jaxrl.commands.arguments import parse
from jaxrl.config.files import load
from jaxrl.runtime.stop import Stop

COMMANDS = page_commands()


# ---------------------------------------------------------------- what cannot run, looked at


def read_arguments(words: tuple[str, ...]) -> None:
    """The arguments are known, and its configuration is one."""
    options = parse(*_parser(), words)
    if hasattr(options, "config"):
        own = ["model.path=none"] if words[0] == "score" else []
        kind = [f"reward.kind={options.kind}"] if getattr(options, "kind", None) else []
        load(options.config, [*own, *kind, *options.overrides])


# ---------------------------------------------------------------- how each runs


@dataclass(frozen=True, eq=False)
class Rule:
    """How commands run that a pattern fits, from their beginning; the first rule that fits counts.

    Attributes:
      added: options for commands that do not give them.
      how: `here` (in this process, `jaxrl` alone), `process`, or the name of a shell. What sets variables is never
        run here.
      more: what the command needs and does not name.
      before: what the shell has read before.
      slow: only with --slow; by default its arguments are read.
      begins: by default it begins, up to its first step; all of it with --slow.
      cannot: why it does not run; the arguments of a command of ours are read then.
    """

    pattern: str
    added: Mapping[str, str] = field(default_factory=dict)
    how: str = "here"
    more: tuple[str, ...] = ()
    before: str = ""
    slow: bool = False
    begins: bool = False
    cannot: str = ""


ON_TWO = {"trainer.num_devices": "2"}
PROFILED = ON_TWO | {"--max-batch": "4", "--token-budget": "1024", "--repeats": "1"}
ON_EIGHT = {"trainer.num_devices": "8"}
JUDGE = {"reward.judge.model": "random:tiny", "reward.judge.resident_layers": "1"}
MIXED = {"data.train_batch_size": "4", "data.max_response_length": "32"}  # its quotas, and a part's free tokens
LEARNS = {"actor.optim.lr_warmup_steps": "0"}  # of one step
TURNS = {name: value for name, value in SMALL.items() if name != "rollout.stop"} | {  # which they refuse
    "data.max_prompt_length": "640",
    "actor.ppo_max_token_len_per_gpu": "1024",
}
ALGORITHM = {  # some have two updates of three prompts; rewards that differ; a step after the critic's own
    "data.train_batch_size": "6",
    "reward.kind": "custom",
    "reward.path": "out/reward.py",
    "trainer.total_training_steps": "2",
}
PROFILE = ".cache/jaxrl/profiles/smollm2-135m-cpu8.json"
RULES = (
    Rule(r"pip install|\./scripts/|python -m (pytest|coverage)", cannot="installs, or is this suite"),
    Rule(r"python (scripts/(gpu|compile|sabotage|mutants)|tests/)", cannot="needs a GPU, or minutes"),
    Rule(r"ray start|curl|lm_eval", cannot="needs a cluster, a server or a package"),
    Rule(r"jaxrl train .*hosts.num=", cannot="needs Ray; tests/runtime/test_cluster.py has such runs"),
    Rule(r"jaxrl train .*agents_sdk", cannot="needs openai-agents; tests/mechanisms/turns has its protocol"),
    Rule(
        r"jaxrl serve", cannot="goes on until it is stopped: test_page_blocks.py runs servers with the page's clients"
    ),
    Rule(r"eval .*bash", how="bash"),
    Rule(r"eval .*zsh", how="zsh", before="autoload -U compinit; compinit -u; "),
    Rule(r"jaxrl completion fish", how="fish"),
    Rule(r"printf|python -c", how="bash", more=("out/tiny",)),
    Rule(r"python examples/", {"--model": "random:tiny"}, how="process", slow=True),
    Rule(r"jaxrl (options|report|score|explain-layout|explain-config|export)"),
    Rule(r"jaxrl generate", {"--max-tokens": "16"}),
    Rule(r"jaxrl tune", {"--seeds": "2"}),
    Rule(r"jaxrl eval", SMALL),
    Rule(r"jaxrl replay", cannot="needs a sample of the reader's own run: tests/commands/test_replay.py draws some"),
    Rule(r"jaxrl check-numerics", cannot="ends with 1 where a bit differs: tests/commands/test_check_numerics.py"),
    Rule(r"jaxrl simulate .*run.yaml", {"data.train_batch_size": "128"}),
    Rule(r"jaxrl simulate .*steps=100", slow=True),
    Rule(r"jaxrl simulate", {"trainer.total_training_steps": "3"}),
    Rule(r"jaxrl profile .*adaptive_layout", SMALL | ON_EIGHT | {"--repeats": "1"}, slow=True),
    Rule(r"jaxrl profile", PROFILED, slow=True),
    Rule(r"jaxrl (sft|dpo|train) .*runs/sft", SMALL | LEARNS | {"model.lora_rank": "0"}, slow=True),
    Rule(r"jaxrl (sft|dpo)", SMALL | LEARNS, slow=True),
    Rule(r"jaxrl train .*run.yaml", ON_TWO, slow=True),
    Rule(r"jaxrl train .*(Qwen/|openai/)", SMALL, how="process", more=("hub",), slow=True),
    Rule(r"jaxrl train .*adaptive_layout", SMALL | ON_EIGHT, more=(PROFILE,), slow=True),
    Rule(r"jaxrl train .*stream_trainer", SMALL | ON_TWO, slow=True),
    Rule(r"jaxrl train .*(calculator|frozen_lake|guessing|python|search|wordle).yaml", TURNS, slow=True),
    Rule(r"jaxrl train .*judge", SMALL | JUDGE, slow=True),
    Rule(r"jaxrl train .*mixed_domains", SMALL | MIXED, slow=True),
    Rule(r"jaxrl train .*distillation", SMALL | {"algorithm.teacher.path": "random:tiny"}, slow=True),
    Rule(r"jaxrl train .*algorithms/", SMALL | ALGORITHM, more=("out/reward.py",), slow=True),
    Rule(r"jaxrl train .*(chain_sum.yaml trainer.run_dir=runs/a|quickstart|tail_batching)", SMALL, begins=True),
    Rule(r"jaxrl train", SMALL, slow=True),
)


def rule_of(command: Command) -> Rule:
    text = " ".join(command.words)
    fitting = [rule for rule in RULES if re.match(rule.pattern, text)]
    assert fitting, f"{command.place}: no rule says how to run {command.text!r}"
    return fitting[0]


def run(command: Command, folder: Path, stop: Stop | None = None) -> None:
    """As a reader would, with the rule's options. `stop`: where one was asked for, a run begins and takes no step."""
    rule = rule_of(command)
    missing = {name: value for name, value in rule.added.items() if command.given(name) is None}
    added = [
        word for name, value in missing.items() for word in ([f"{name}={value}"] if "." in name else [name, value])
    ]
    words = [*command.words, *added]
    if rule.how == "here" and not command.variables:
        assert words[0] == "jaxrl"
        assert main(words[1:], stop) == 0
        return
    assert stop is None
    how = words
    if rule.how not in ("here", "process"):
        if shutil.which(rule.how) is None:
            pytest.skip(f"{rule.how} is not installed")
        assert not missing
        how = [rule.how, "-c", rule.before + command.text]
    done = subprocess.run(
        how,
        cwd=folder,
        env=environment(folder, dict(command.variables)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if how is not words:
        assert done.stderr == "", "a shell goes on where $(...) or a pipe has failed"


def written_by(command: Command) -> list[str]:
    """What the command says that it writes."""
    found = [command.given("--out"), *re.findall(r"> (\S+)$", command.text)]
    if command.words[:2] == ("jaxrl", "export"):
        is_adapter = command.words[2] == "runs/lora" and "--merge" not in command.words
        found.append(f"{command.words[3]}/{'adapter_' * is_adapter}model.safetensors")
    if command.words[:2] == ("jaxrl", "train") and (run_dir := command.given("trainer.run_dir")):
        found += [f"{run_dir}/report.html", f"{run_dir}/checkpoints"]
    return [name for name in found if name]


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def some(chosen: Callable[[Rule], object], marked: Callable[[Rule], object] = lambda rule: False) -> list[Any]:
    """Commands whose rules are chosen, some of them slow."""
    found = [(command, rule_of(command)) for command in COMMANDS]
    return [
        pytest.param(command, id=command.place, marks=[pytest.mark.slow] if marked(rule) else [])
        for command, rule in found
        if chosen(rule)
    ]


@pytest.mark.parametrize("command", some(lambda rule: not rule.cannot, lambda rule: rule.slow or rule.begins))
def test_a_command_runs(command: Command, world: World, folder: Path, request: pytest.FixtureRequest):
    if command.words[:2] == ("jaxrl", "explain-config"):
        request.getfixturevalue("smollm2")
    world.place_for(command, folder, *rule_of(command).more)
    run(command, folder)
    for name in written_by(command):
        assert (folder / name).exists(), name


@pytest.mark.parametrize("command", some(lambda rule: rule.begins))
def test_a_run_begins(command: Command, world: World, folder: Path):
    """`World` trains on configs/chain_sum.yaml to the end; the others are built in all their parts."""
    world.place_for(command, folder, *rule_of(command).more)
    run(command, folder, asked())
    for name in written_by(command):
        assert (folder / name).exists(), name


@pytest.mark.parametrize("command", some(lambda rule: rule.cannot or rule.slow))
def test_a_command_that_does_not_run_by_default_is_read(command: Command, world: World, folder: Path):
    world.reading_place(folder)
    if command.words[0] == "jaxrl":
        read_arguments(command.words[1:])


def test_every_rule_is_used():
    used = [rule_of(command) for command in COMMANDS]
    assert [rule.pattern for rule in RULES if rule not in used] == []
