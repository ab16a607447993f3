"""What the command line itself refuses: commands, options and their values, files to write, prompts.

What a command finds in the files that it is given is the other classes' business.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import Refusal, cases

from jaxrl.cli import main

COMMANDS = (
    "train, simulate, tune, generate, serve, eval, export, score, explain-config, explain-layout, profile, hosts, "
    "options, completion, report"
)


def a_file(folder: Path) -> None:
    (folder / "file.txt").write_text("mine")


EXCLUDED = "generate: --system and --raw exclude each other"

REFUSED = (
    ("an unknown command", "trian", "unknown command 'trian': did you mean train?"),
    ("another case", "Train", "unknown command 'Train': did you mean train?"),
    ("a command's other name", "evaluate", "unknown command 'evaluate': did you mean eval?"),
    ("the name of a package", "verl", "unknown command 'verl': give one of " + COMMANDS),
    ("an empty command", "''", "no command is given: give one of " + COMMANDS),
    ("no command", "", "no command is given: give one of " + COMMANDS),
    ("an option before the command", "--verbose train", "train: unknown option '--verbose'"),
    ("an option and no command", "--verbose", "no command is given: give one of " + COMMANDS),
    (
        "a configuration file for a command",
        "config.yaml",
        "'config.yaml' is not a command: did you mean train --config config.yaml?",
    ),
    ("a command with a line end", "'tra\nin'", "unknown command 'tra\\nin': did you mean train?"),
    ("a very long command", "x" * 500, f"unknown command '{'x' * 60}…': give one of {COMMANDS}"),
    ("an unknown option", "train --confg x.yaml", "train: unknown option '--confg': did you mean --config?"),
    ("an unknown option with a value", "train --overrides=a.b=1", "train: unknown option '--overrides'"),
    ("an option of another command", "train --model m", "train: unknown option '--model': did you mean --help?"),
    (
        "an option of the configuration with dashes",
        "train --trainer.run_dir runs/z",
        "train: unknown option '--trainer.run_dir': write trainer.run_dir=runs/z",
    ),
    (
        "the same with =",
        "train --rollout.n=4 trainer.seed=1",
        "train: unknown option '--rollout.n': write rollout.n=4",
    ),
    ("the same without a value", "eval --rollout.n", "eval: unknown option '--rollout.n': write rollout.n=VALUE"),
    (
        "a configuration file without --config",
        "train own.yaml",
        "train: override 'own.yaml' must have the form section.option=value: did you mean --config own.yaml?",
    ),
    (
        "a plus sign of Hydra",
        "train +trainer.foo=3",
        "override '+trainer.foo=3': there is no + here, since every option has a default: write trainer.foo=3",
    ),
    ("a system message without a template", "generate --model m --raw --system x hello", EXCLUDED),
    ("a short option that there is not", "generate --model m -k 3 hello", "generate: unknown option '-k'"),
    ("an ambiguous beginning", "generate --m x hello", "generate: --m may mean --model, --max-tokens, --min-p"),
    ("an ambiguous beginning in profile", "profile --max 3", "profile: --max may mean --max-batch, --max-context"),
    ("no value for --config", "train --config", "train: --config needs a value"),
    ("an empty --config", "train --config ''", "train: --config must not be empty, found ''"),
    ("a blank --config", "train '--config=  '", "train: --config must not be empty, found ' '"),
    ("two sections", "options rollout actor", "options: 'actor' is one argument too many"),
    (
        "two runs that are none",
        "report one two",
        "one is not a run: it has none of metrics.jsonl, samples.jsonl, run.json",
    ),
    (
        "a section that is none",
        "options rolout",
        "options: there is no section and no option 'rolout': did you mean rollout?",
    ),
    ("no shell", "completion", "completion: {bash,zsh,fish} must be given"),
    ("no run to report", "report", "report: RUN must be given"),
    ("an empty run to report", "report ''", "report: RUN must not be empty, found ''"),
    ("a report into a folder", "report run --out .", "report: --out (.) is a folder: name a file in it"),
    ("an empty --out of a report", "report run --out ''", "report: --out must not be empty, found ''"),
    (
        "a report under a file",
        "report run --out file.txt/x.html",
        "report: --out (file.txt/x.html) cannot be written: {tmp}/file.txt is not a folder",
    ),
    ("no source to export", "export", "export: RUN|MODEL, folder must be given"),
    ("no folder to export to", "export '{model}'", "export: folder must be given"),
    ("an empty folder to export to", "export '{model}' ''", "export: folder must not be empty, found ''"),
    ("an empty source", "export '' out", "export: RUN|MODEL must not be empty, found ''"),
    (
        "an unknown dtype to export",
        "export '{model}' out --dtype fp16",
        "export: --dtype must be one of float32, bfloat16, float16, found 'fp16'",
    ),
    (
        "an integer dtype",
        "export '{model}' out --dtype int8",
        "export: --dtype must be one of float32, bfloat16, float16, found 'int8'",
    ),
    ("three arguments to export", "export a b c", "export: 'c' is one argument too many"),
    ("no model", "generate hello", "generate: --model must be given"),
    ("no value for --model", "generate --model", "generate: --model needs a value"),
    ("an empty model", "generate --model '' hello", "generate: --model must not be empty, found ''"),
    (
        "no tokens",
        "generate --model '{model}' --max-tokens 0 hello",
        "generate: --max-tokens must be a whole number from 1 to 1048576, found 0",
    ),
    (
        "fewer than no tokens",
        "generate --model '{model}' --max-tokens -5 hello",
        "generate: --max-tokens must be a whole number from 1 to 1048576, found -5",
    ),
    (
        "tokens in words",
        "generate --model '{model}' --max-tokens many hello",
        "generate: --max-tokens must be a whole number from 1 to 1048576, found 'many'",
    ),
    (
        "half a token",
        "generate --model '{model}' --max-tokens 1.5 hello",
        "generate: --max-tokens must be a whole number from 1 to 1048576, found '1.5'",
    ),
    (
        "more tokens than any context",
        "generate --model '{model}' --max-tokens 1000000000 hello",
        "generate: --max-tokens must be a whole number from 1 to 1048576, found 1000000000",
    ),
    ("no value for --max-tokens", "generate --model '{model}' --max-tokens", "generate: --max-tokens needs a value"),
    (
        "thousands of digits",
        "generate --model m hello --max-tokens " + "9" * 5000,
        f"generate: --max-tokens must be a whole number from 1 to 1048576, found '{'9' * 60}…'",
    ),
    (
        "a temperature that is no number",
        "generate --model '{model}' --temperature nan hello",
        "generate: --temperature must be a number from 0 to 1000, found nan",
    ),
    (
        "an infinite temperature",
        "generate --model '{model}' --temperature inf hello",
        "generate: --temperature must be a number from 0 to 1000, found inf",
    ),
    (
        "a temperature below 0",
        "generate --model '{model}' --temperature=-0.5 hello",
        "generate: --temperature must be a number from 0 to 1000, found -0.5",
    ),
    (
        "a temperature in words",
        "generate --model '{model}' --temperature warm hello",
        "generate: --temperature must be a number from 0 to 1000, found 'warm'",
    ),
    (
        "a decimal comma",
        "generate --model '{model}' --temperature 0,7 hello",
        "generate: --temperature must be a number from 0 to 1000, found '0,7'",
    ),
    (
        "top-p of 0",
        "generate --model '{model}' --top-p 0 hello",
        "generate: --top-p must be a number above 0 and at most 1, found 0",
    ),
    (
        "top-p above 1",
        "generate --model '{model}' --top-p 1.5 hello",
        "generate: --top-p must be a number above 0 and at most 1, found 1.5",
    ),
    (
        "top-p in percent",
        "generate --model '{model}' --top-p 90% hello",
        "generate: --top-p must be a number above 0 and at most 1, found '90%'",
    ),
    (
        "top-p that is no number",
        "generate --model '{model}' --top-p nan hello",
        "generate: --top-p must be a number above 0 and at most 1, found nan",
    ),
    (
        "top-k below -1",
        "generate --model '{model}' --top-k -2 hello",
        "generate: --top-k must be a whole number from -1 to 1048576, found -2",
    ),
    (
        "half a top-k",
        "generate --model '{model}' --top-k 0.5 hello",
        "generate: --top-k must be a whole number from -1 to 1048576, found '0.5'",
    ),
    (
        "min-p above 1",
        "generate --model '{model}' --min-p 1.01 hello",
        "generate: --min-p must be a number from 0 to 1, found 1.01",
    ),
    (
        "min-p below 0",
        "generate --model '{model}' --min-p=-0.1 hello",
        "generate: --min-p must be a number from 0 to 1, found -0.1",
    ),
    ("an empty stop string", "generate --model '{model}' --stop '' hello", "generate: --stop must not be empty"),
    (
        "one of two stop strings empty",
        "generate --model '{model}' --stop x --stop '' hello",
        "generate: --stop must not be empty",
    ),
    ("no value for --stop", "generate --model '{model}' hello --stop", "generate: --stop needs a value"),
    (
        "no responses",
        "generate --model '{model}' -n 0 hello",
        "generate: -n must be a whole number from 1 to 100000, found 0",
    ),
    (
        "fewer than no responses",
        "generate --model '{model}' -n -1 hello",
        "generate: -n must be a whole number from 1 to 100000, found -1",
    ),
    (
        "a million responses",
        "generate --model '{model}' -n 1000000 hello",
        "generate: -n must be a whole number from 1 to 100000, found 1000000",
    ),
    (
        "a seed below 0",
        "generate --model '{model}' --seed -1 hello",
        "generate: --seed must be a whole number from 0 to 4294967295, found -1",
    ),
    (
        "a seed of more than 32 bits",
        "generate --model '{model}' --seed 4294967296 hello",
        "generate: --seed must be a whole number from 0 to 4294967295, found 4294967296",
    ),
    (
        "a seed in words",
        "generate --model '{model}' --seed random hello",
        "generate: --seed must be a whole number from 0 to 4294967295, found 'random'",
    ),
    (
        "an unknown dtype",
        "generate --model '{model}' --dtype bf16 hello",
        "generate: --dtype must be one of float32, bfloat16, found 'bf16': did you mean bfloat16?",
    ),
    (
        "a dtype of another command",
        "generate --model '{model}' --dtype float16 hello",
        "generate: --dtype must be one of float32, bfloat16, found 'float16': did you mean bfloat16?",
    ),
    (
        "no tensor parallelism",
        "generate --model '{model}' --tp 0 hello",
        "generate: --tp must be a whole number from 1 to 16384, found 0",
    ),
    (
        "a flag with a value",
        "generate --model '{model}' --raw=yes hello",
        "generate: --raw takes no value, found 'yes'",
    ),
    (
        "a flag with an empty value",
        "generate --model '{model}' --json= hello",
        "generate: --json takes no value, found ''",
    ),
    (
        "a prompt in another encoding",
        "generate --model '{model}' 'caf\udce9'",
        "generate: PROMPT must be UTF-8 text, found '\\udce9' in it",
    ),
    (
        "a stop string in another encoding",
        "generate --model '{model}' --stop '\udcff' hello",
        "generate: --stop must be UTF-8 text, found '\\udcff' in it",
    ),
    ("neither model nor shape", "explain-layout", "explain-layout: --model or --shape must be given"),
    (
        "both model and shape",
        "explain-layout --model m --shape tiny",
        "explain-layout: --shape and --model exclude each other",
    ),
    ("an empty shape", "explain-layout --shape ''", "explain-layout: --shape must not be empty, found ''"),
    (
        "a million devices",
        "explain-layout --shape tiny --devices 1000000",
        "explain-layout: --devices must be a whole number from 0 to 16384, found 1000000",
    ),
    (
        "fewer than no devices",
        "explain-layout --shape tiny --devices -1",
        "explain-layout: --devices must be a whole number from 0 to 16384, found -1",
    ),
    (
        "devices in words",
        "explain-layout --shape tiny --devices all",
        "explain-layout: --devices must be a whole number from 0 to 16384, found 'all'",
    ),
    (
        "tp beside the devices",
        "explain-layout --shape tiny --devices 8 --tp 3",
        "rollout.layout: tp (3) on 8 devices must be one of 1, 2, 4, 8",
    ),
    (
        "max-tp below tp",
        "explain-layout --shape tiny --devices 8 --tp 4 --max-tp 2",
        "--max-tp (2), which weights are padded for, must be a multiple of --tp (4)",
    ),
    (
        "max-tp of 0",
        "explain-layout --shape tiny --devices 8 --max-tp 0",
        "explain-layout: --max-tp must be a whole number from 1 to 16384, found 0",
    ),
    (
        "a folder as --svg",
        "explain-layout --shape tiny --devices 2 --svg '{tmp}'",
        "explain-layout: --svg ({tmp}) is a folder: name a file in it",
    ),
    (
        "a file above --png",
        "explain-layout --shape tiny --devices 2 --png file.txt/x.png",
        "explain-layout: --png (file.txt/x.png) cannot be written: {tmp}/file.txt is not a folder",
    ),
    (
        "an empty --png",
        "explain-layout --shape tiny --devices 2 --png ''",
        "explain-layout: --png must not be empty, found ''",
    ),
    (
        "fewer than no devices to plan for",
        "explain-config --devices -8",
        "explain-config: --devices must be a whole number from 0 to 16384, found -8",
    ),
    (
        "no memory that is a number",
        "explain-config --device-gib nan",
        "explain-config: --device-gib must be a number from 0 to 100000, found nan",
    ),
    (
        "memory with a unit",
        "explain-config --device-gib 80GB",
        "explain-config: --device-gib must be a number from 0 to 100000, found '80GB'",
    ),
    (
        "less than no memory",
        "explain-config --device-gib=-80",
        "explain-config: --device-gib must be a number from 0 to 100000, found -80",
    ),
    ("no run to tune", "tune", "tune: --run must be given"),
    ("a run without its option", "tune run", "tune: --run must be given"),
    (
        "an unknown rule",
        "tune --run run --rule tail",
        "tune: --rule must be one of tail_batching, partial_rollout, found 'tail'",
    ),
    (
        "values in words",
        "tune --run run --values 1.1,many",
        "tune: --values must be numbers with commas between them, as 1.1,1.25, found '1.1,many'",
    ),
    (
        "an empty list",
        "tune --run run --values ''",
        "tune: --values must be numbers with commas between them, as 1.1,1.25, found ''",
    ),
    (
        "a value below 1",
        "tune --run run --values 0.5",
        "--values must be at least 1, found 0.5",
    ),
    ("no seeds", "tune --run run --seeds 0", "tune: --seeds must be a whole number from 1 to 1000, found 0"),
    (
        "too many seeds",
        "tune --run run --seeds 100000",
        "tune: --seeds must be a whole number from 1 to 1000, found 100000",
    ),
    ("no processes", "tune --run run --processes 0", "tune: --processes must be a whole number from 1 to 256, found 0"),
    (
        "too many processes",
        "tune --run run --processes 5000",
        "tune: --processes must be a whole number from 1 to 256, found 5000",
    ),
    (
        "fewer than no steps",
        "tune --run run --steps -1",
        "tune: --steps must be a whole number from 1 to 100000, found -1",
    ),
    ("a folder as --out of tune", "tune --run run --out .", "tune: --out (.) is a folder: name a file in it"),
    (
        "factors of another rule",
        "tune --run run --rule partial_rollout --prompt-factors 1.5",
        "--prompt-factors and --response-factors belong to --rule tail_batching, not partial_rollout",
    ),
    (
        "both kinds of factors",
        "tune --run run --values 1.5 --prompt-factors 1.5",
        "--values sets both factors of tail batching: leave out --prompt-factors and --response-factors",
    ),
    (
        "steps that are all left out",
        "tune --run run --rule partial_rollout --steps 1",
        "--steps (1) must be above 8, which are left out while a buffer fills",
    ),
    ("an empty --json of hosts", "hosts --json ''", "hosts: --json must not be empty, found ''"),
    ("a folder as --json of hosts", "hosts --json .", "hosts: --json (.) is a folder: name a file in it"),
    ("no repeats", "profile --repeats 0", "profile: --repeats must be a whole number from 1 to 1000, found 0"),
    ("half a repeat", "profile --repeats 2.5", "profile: --repeats must be a whole number from 1 to 1000, found '2.5'"),
    (
        "a batch below 0",
        "profile --max-batch -1",
        "profile: --max-batch must be a whole number from 0 to 1048576, found -1",
    ),
    (
        "tokens beyond 32 bits",
        "profile --token-budget 4294967296",
        "profile: --token-budget must be a whole number from 0 to 2147483647, found 4294967296",
    ),
    (
        "no table",
        "profile 'model.path={model}'",
        "profile: give the table's file with --out, or as rollout.layout.profile",
    ),
    ("a folder as the table", "profile --out .", "profile: --out (.) is a folder: name a file in it"),
    ("a folder as --out of eval", "eval --out .", "eval: --out (.) is a folder: name a file in it"),
    (
        "a file above --out of eval",
        "eval --out file.txt/x/y.jsonl",
        "eval: --out (file.txt/x/y.jsonl) cannot be written: {tmp}/file.txt is not a folder",
    ),
    ("an empty --out of eval", "eval --out=", "eval: --out must not be empty, found ''"),
    ("an empty --checkpoint", "eval --checkpoint ''", "eval: --checkpoint must not be empty, found ''"),
)
REFUSALS = [Refusal(name, tuple(shlex.split(line)), sentence, a_file) for name, line, sentence in REFUSED]


@cases(REFUSALS)
def test_is_refused(refusal: Refusal, refused: Callable[[Refusal], None]):
    refused(refusal)


def test_the_class_has_its_size():
    assert len(REFUSALS) >= 95


def test_values_after_options_count(capsys: pytest.CaptureFixture[str]):
    late = ("train", "trainer.seed=1", "--config", "no.yaml", "trainer.seed=2")
    assert main(late) == 2
    assert capsys.readouterr().err == "jaxrl: no.yaml: no such config file\n"
