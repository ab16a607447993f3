"""What the command line itself refuses: commands, options and their values, files to write, prompts.

What a command finds in the files that it is given is the other classes' business.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from refusals import Refusal

from jaxrl.cli import main

COMMANDS = (
    "train, sft, dpo, simulate, tune, generate, serve, eval, export, replay, score, check-numerics, explain-config, "
    "explain-layout, profile, options, completion, report"
)
REFUSED = {
    "trian": "unknown command 'trian': did you mean train?",
    "evaluate": "unknown command 'evaluate': did you mean eval?",
    "''": "no command is given: give one of " + COMMANDS,
    "": "no command is given: give one of " + COMMANDS,
    "--verbose train": "train: unknown option '--verbose'",
    "--verbose": "no command is given: give one of " + COMMANDS,
    "config.yaml": "'config.yaml' is not a command: did you mean train --config config.yaml?",
    "'tra\nin'": "unknown command 'tra\\nin': did you mean train?",
    "x" * 500: f"unknown command '{'x' * 60}…': give one of {COMMANDS}",
    "train --config-path=conf --config-name=x": (
        "train: unknown option '--config-path': --config takes a file's whole path"
    ),
    "train --confg x.yaml": "train: unknown option '--confg': did you mean --config?",
    "train --overrides=a.b=1": "train: unknown option '--overrides'",
    "train --trainer.run_dir runs/z": "train: unknown option '--trainer.run_dir': write trainer.run_dir=runs/z",
    "train --rollout.n=4 trainer.seed=1": "train: unknown option '--rollout.n': write rollout.n=4",
    "eval --rollout.n": "eval: unknown option '--rollout.n': write rollout.n=VALUE",
    "train own.yaml": (
        "train: override 'own.yaml' must have the form section.option=value: did you mean --config own.yaml?"
    ),
    "train +trainer.foo=3": (
        "override '+trainer.foo=3': there is no + here, since every option has a default: write trainer.foo=3"
    ),
    "generate --model m --raw --system x hello": "generate: --system and --raw exclude each other",
    "generate --model m -k 3 hello": "generate: unknown option '-k'",
    "generate --m x hello": "generate: --m may mean --model, --max-tokens, --min-p",
    "train --config": "train: --config needs a value",
    "train '--config=  '": "train: --config must not be empty, found ' '",
    "options rollout actor": "options: 'actor' is one argument too many",
    "report one two": "one is not a run: it has none of metrics.jsonl, samples.jsonl, run.json",
    "options rolout": "options: there is no section and no option 'rolout': did you mean rollout?",
    "completion": "completion: {bash,zsh,fish} must be given",
    "completion tcsh": "completion: {bash,zsh,fish} must be one of bash, zsh, fish, found 'tcsh'",
    "report": "report: RUN must be given",
    "report ''": "report: RUN must not be empty, found ''",
    "report run --out .": "report: --out (.) is a folder: name a file in it",
    "report run --out ''": "report: --out must not be empty, found ''",
    "report run --out file.txt/x.html": (
        "report: --out (file.txt/x.html) cannot be written: {tmp}/file.txt is not a folder"
    ),
    "export": "export: RUN|MODEL, folder must be given",
    "export m": "export: folder must be given",
    "export m ''": "export: folder must not be empty, found ''",
    "export '' out": "export: RUN|MODEL must not be empty, found ''",
    "export m out --dtype fp16": "export: --dtype must be one of float32, bfloat16, float16, found 'fp16'",
    "generate hello": "generate: --model must be given",
    "generate --model": "generate: --model needs a value",
    "generate --model '' hello": "generate: --model must not be empty, found ''",
    "generate --model m --max-tokens": "generate: --max-tokens needs a value",
    "generate --model m --stop x --stop '' hello": "generate: --stop must not be empty",
    "generate --model m hello --stop": "generate: --stop needs a value",
    "generate --model m --dtype bf16 hello": (
        "generate: --dtype must be one of float32, bfloat16, found 'bf16': did you mean bfloat16?"
    ),
    "generate --model m --raw=yes hello": "generate: --raw takes no value, found 'yes'",
    "generate --model m 'caf\udce9'": "generate: PROMPT must be UTF-8 text, found '\\udce9' in it",
    "generate --model m --stop '\udcff' hello": "generate: --stop must be UTF-8 text, found '\\udcff' in it",
    "explain-layout": "explain-layout: --model or --shape must be given",
    "explain-layout --model m --shape tiny": "explain-layout: --shape and --model exclude each other",
    "explain-layout --shape ''": "explain-layout: --shape must not be empty, found ''",
    "explain-layout --shape tiny --devices 8 --tp 3": "rollout.layout: tp (3) on 8 devices must be one of 1, 2, 4, 8",
    "explain-layout --shape tiny --devices 8 --tp 4 --max-tp 2": (
        "--max-tp (2), which weights are padded for, must be a multiple of --tp (4)"
    ),
    "check-numerics": "check-numerics: --model or --shape must be given",
    "check-numerics --model m --rows 8,": ("check-numerics: --rows must be a whole number from 1 to 4096, found ''"),
    "check-numerics --model m --tp 0,2": "check-numerics: --tp must be a whole number from 1 to 64, found 0",
    "check-numerics --shape tiny --dtype float16": (
        "check-numerics: --dtype must be one of float32, bfloat16, float64, found 'float16': did you mean bfloat16?"
    ),
    "check-numerics --shape tiny rollout.dtyp=float32": (
        "unknown option rollout.dtyp: did you mean rollout.dtype? (command line: rollout.dtyp=float32)"
    ),
    "tune": "tune: --run must be given",
    "tune --run run --rule tail": "tune: --rule must be one of tail_batching, partial_rollout, found 'tail'",
    "tune --run run --values 1.1,many": "tune: --values must be a number from 1 to 100, found 'many'",
    "tune --run run --values ''": "tune: --values must be a number from 1 to 100, found ''",
    "tune --run run --values 0.5": "tune: --values must be a number from 1 to 100, found 0.5",
    "tune --run run --values inf": "tune: --values must be a number from 1 to 100, found inf",
    "tune --run run --prompt-factors 1e6": "tune: --prompt-factors must be a number from 1 to 100, found 1e6",
    "tune --run run --out .": "tune: --out (.) is a folder: name a file in it",
    "tune --run run --rule partial_rollout --prompt-factors 1.5": (
        "--prompt-factors and --response-factors belong to --rule tail_batching, not partial_rollout"
    ),
    "tune --run run --values 1.5 --prompt-factors 1.5": (
        "--values sets both factors of tail batching: leave out --prompt-factors and --response-factors"
    ),
    "tune --run run --rule partial_rollout --steps 8": (
        "--steps (8) must be above 8, which are left out while a buffer fills"
    ),
    "profile 'model.path={model}'": "profile: give the table's file with --out, or as rollout.layout.profile",
    "profile --out .": "profile: --out (.) is a folder: name a file in it",
    "eval --out .": "eval: --out (.) is a folder: name a file in it",
    "eval --out file.txt/x/y.jsonl": (
        "eval: --out (file.txt/x/y.jsonl) cannot be written: {tmp}/file.txt is not a folder"
    ),
    "eval --out=": "eval: --out must not be empty, found ''",
    "eval --checkpoint ''": "eval: --checkpoint must not be empty, found ''",
}
NUMBERS = (
    ("generate --model m hello", "--max-tokens", "a whole number from 1 to 1048576", "0 -5 many 1.5 1000000000"),
    ("generate --model m hello", "--temperature", "a number from 0 to 1000", "nan inf -0.5 warm 0,7"),
    ("generate --model m hello", "--top-p", "a number above 0 and at most 1", "0 1.5 90% nan"),
    ("generate --model m hello", "--top-k", "a whole number from -1 to 1048576", "-2 0.5"),
    ("generate --model m hello", "--min-p", "a number of at least 0 and below 1", "1 1.01 -0.1"),
    ("generate --model m hello", "-n", "a whole number from 1 to 100000", "0 -1 1000000"),
    ("generate --model m hello", "--seed", "a whole number from 0 to 4294967295", "-1 4294967296 random"),
    ("generate --model m hello", "--tp", "a whole number from 1 to 16384", "0"),
    ("explain-layout --shape tiny", "--devices", "a whole number from 0 to 16384", "1000000 -1 all"),
    ("explain-layout --shape tiny", "--max-tp", "a whole number from 1 to 16384", "0"),
    ("explain-config", "--devices", "a whole number from 0 to 16384", "-8"),
    ("explain-config", "--device-gib", "a number from 0 to 100000", "nan 80GB -80 1e30"),
    ("tune --run run", "--seeds", "a whole number from 1 to 1000", "0 100000"),
    ("tune --run run", "--processes", "a whole number from 1 to 256", "0 5000"),
    ("tune --run run", "--steps", "a whole number from 1 to 100000", "-1"),
    ("profile", "--repeats", "a whole number from 1 to 1000", "0 2.5"),
    ("profile", "--max-batch", "a whole number from 0 to 1048576", "-1"),
    ("profile", "--token-budget", "a whole number from 0 to 2147483647", "4294967296"),
)
"""Numbers that an option does not take: the command, the option, what it must be, and values."""


def a_file(folder: Path) -> None:
    (folder / "file.txt").write_text("mine")


def numbers() -> Iterable[Refusal]:
    for command, option, rule, values in NUMBERS:
        for value in values.split():
            shown = repr(value)
            with suppress(ValueError):  # what is a number of the kind is shown as it is
                shown = str((int if "whole" in rule else float)(value)) and value
            arguments = (*command.split(), *((f"{option}={value}",) if option[:2] == "--" else (option, value)))
            yield Refusal(arguments, f"{command.split()[0]}: {option} must be {rule}, found {shown}")


def test_is_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused(Refusal(tuple(shlex.split(line)), sentence, a_file) for line, sentence in REFUSED.items())


def test_numbers_are_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused(numbers())
    long = ("generate", "--model", "m", "hello", "--max-tokens", "9" * 5000)
    rule = "must be a whole number from 1 to 1048576"
    refused([Refusal(long, f"generate: --max-tokens {rule}, found '{'9' * 60}…'")])


def test_values_after_options_count(capsys: pytest.CaptureFixture[str]):
    late = ("train", "trainer.seed=1", "--config", "no.yaml", "trainer.seed=2")
    assert main(late) == 2
    assert capsys.readouterr().err == "jaxrl: no.yaml: no such config file\n"
