"""The battery's configuration files: YAML, gin and overrides that cannot be read, or hold what no run can have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

from refusals import Refusal

MODEL = "model:\n  path: m\n"
NO_MODEL = "model.path is missing: give a Hugging Face folder, a .gguf file or org/name of the Hugging Face Hub"
MINI = MODEL + "rollout:\n  n: 4\nactor:\n  ppo_mini_batch_size: 4\n"
NAMES = "abcdefghi"
FORM = " must have the form section.option=value"
ALIASES = (
    "[&a [1,1,1,1,1,1,1,1,1,1,1], &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b,*b], "
    "&d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c], &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]]"
)


def laughs(first: str, line: str, use: str) -> str:
    """Nine lines, each ten times the one before."""
    pairs = pairwise(NAMES)
    return first + "".join(line.format(new, ", ".join([use + old] * 10)) for old, new in pairs)


LISTS = laughs("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n", "{0}: &{0} [{1}]\n", "*")
MERGES = laughs("a: &a {k: 1}\n", "{0}: &{0} {{<<: [{1}]}}\n", "*")
MACROS = laughs("a = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n", "{0} = [{1}]\n", "%") + "rollout.stop = %i\n"


def holds(content: str | bytes, file: str = "run.yaml") -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def in_yaml(sentence: str, content: str | bytes) -> Refusal:
    return in_run_yaml(sentence, holds(content))


def in_gin(sentence: str, content: str | bytes) -> Refusal:
    return Refusal(("train", "--config", "run.gin"), sentence, holds(content, "run.gin"))


def in_run_yaml(sentence: str, prepare: Callable[[Path], object], *overrides: str) -> Refusal:
    return Refusal(("train", "--config", "run.yaml", *overrides), sentence, prepare)


def override(text: str, said: str) -> Refusal:
    return Refusal(("train", text), f"override '{text}'{said}")


REFUSALS = (
    in_yaml(
        "run.yaml: is larger than the 1 MiB that a config file may have: was another file meant, such as data?",
        "x: " + "a" * 20_000_000,
    ),
    in_yaml("run.yaml: nested too deeply", "a: " + "[" * 50_000),
    in_yaml(
        "run.yaml, line 5: more than 100000 values, each use of an alias counted: a config file may have no more", LISTS
    ),
    in_yaml(
        "run.yaml, line 6: more than 100000 values, each use of an alias counted: a config file may have no more",
        MERGES,
    ),
    in_yaml("run.yaml, line 1: an alias holds itself", "rollout: &r\n  stop: *r\n"),
    in_yaml("run.yaml, line 4: expected ',' or '}', but got '<stream end>'", MODEL + "rollout: {n: 4\n"),
    in_yaml("run.yaml, line 6: 'n' is given twice, first in line 4", MODEL + "rollout:\n  n: 4\n  top_p: 1\n  n: 8\n"),
    in_yaml("run.yaml, line 2: found character '\\t' that cannot start any token", "model:\n	path: m\n"),
    in_yaml("run.yaml, line 2: the character U+0000 is not allowed", b"model:\n  path: m\x00\n"),
    in_yaml("run.yaml: not UTF-8 text (byte 28)", b"trainer:\n  project_name: caf\xe9\n"),
    in_yaml("run.yaml: not UTF-8 text but UTF-16: save it as UTF-8", "model: {path: m}".encode("utf-16")),
    in_yaml(
        "rollout: a name must be text, found True (bool): put it in quotation marks (run.yaml, line 1)",
        "rollout:\n  on: 4\n",
    ),
    in_yaml("run.yaml, line 1: found unhashable key", "? [a, b]\n: 1\n"),
    in_yaml(
        "rollout.n must be a whole number, found '2026-11-22' (text) (run.yaml, line 4)",
        MODEL + "rollout:\n  n: 2026-11-22\n",
    ),
    in_yaml(
        "run.yaml, line 4: 010 would be read to base 8, as 8: leave out the leading 0",
        MODEL + "trainer:\n  seed: 010\n",
    ),
    in_yaml(
        "run.yaml, line 4: 1:30 would be read to base 60: write a plain number, or put it in quotation marks",
        MODEL + "reward:\n  timeout_s: 1:30\n",
    ),
    in_yaml("run.yaml, line 2: a number of 5000 digits is too long", "trainer:\n  seed: " + "9" * 5000),
    in_yaml("run.yaml: must hold sections with options, found 'rollout n 4'", "rollout n 4\n"),
    in_yaml(
        "run.yaml, line 1: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.system'",
        "model: !!python/object/apply:os.system [ls]\n",
    ),
    in_yaml(
        "run.yaml, line 2: expected a single document in the stream, but found another document",
        "model: {path: m}\n---\nrollout: {n: 4}\n",
    ),
    in_yaml("run.yaml, line 1: found undefined alias 'other'", "rollout: *other\n"),
    Refusal(
        ("train", "model.path=m", "data.train_files=[*.jsonl]"),
        "override 'data.train_files=[*.jsonl]': expected alphabetic or numeric character, but found '.' (to YAML * "
        "begins an alias: put text with it in quotation marks; a pattern of files on this machine is not filled in, "
        "each file is named: docs/your-data.md)",
    ),
    in_yaml(NO_MODEL, ""),
    in_yaml(
        "unknown option rollout.temprature: did you mean rollout.temperature? (run.yaml, line 4)",
        MODEL + "rollout:\n  temprature: 1\n",
    ),
    in_yaml("unknown option rollout.n: did you mean rollout? (run.yaml, line 3)", MODEL + "rollout.n: 4\n"),
    in_yaml("rollout.n must be at least 1, found 0 (run.yaml, line 4)", MODEL + "rollout:\n  n: 0\n"),
    in_yaml(
        "data.train_files[1] must be text, found 3: put it in quotation marks (run.yaml, line 6)",
        MODEL + "data:\n  train_files:\n    - a.jsonl\n    - 3\n",
    ),
    in_yaml(
        "simulate.tasks.b.weight must be above 0, found 0 (run.yaml, line 4)",
        "simulate:\n  tasks:\n    a: {weight: 1}\n    b: {weight: 0}\n",
    ),
    in_yaml(
        "actor.ppo_mini_batch_size (3 prompts) must divide data.train_batch_size (8 prompts) "
        "(run.yaml, line 4; run.yaml, line 6)",
        MODEL + "actor:\n  ppo_mini_batch_size: 3\ndata:\n  train_batch_size: 8\n",
    ),
    in_yaml(
        "rollout.n must be at least 1, found 0 (run.yaml, line 1)\n"
        "jaxrl: unknown option x: known here: model, data, rollout, actor, critic, algorithm, reward, environment, "
        "trainer, hosts, simulate, serve, sft, dpo (run.yaml, line 1)",
        "x: &x {n: 0}\nrollout:\n  <<: *x\n",
    ),
    in_yaml("rollout.n must be at least 1, found 0 (run.yaml, line 1)", "rollout: {<<: {n: 0}}\n"),
    in_gin(
        "run.gin, line 2: rollout is a section: give its options one by one, as rollout.option = value",
        "model.path = 'm'\nrollout = 3\n",
    ),
    in_gin(
        "run.gin, line 2: train_batch_size is a macro that nothing uses, since it names no section: "
        "did you mean data.train_batch_size?",
        "model.path = 'm'\ntrain_batch_size = 8\n",
    ),
    in_gin("run.gin, line 1: Unable to parse value", "model.path = \n"),
    in_gin("run.gin, line 1: 'models' is no value: text must be in quotation marks", "model.path = models/qwen\n"),
    in_gin(
        "run.gin, line 1: 'true' is no value: text must be in quotation marks, and true is written True",
        "data.shuffle = true\n",
    ),
    in_gin("run.gin, line 1: scopes (eval/...) are not supported: options have one value", "eval/rollout.n = 4\n"),
    in_gin(
        "run.gin, line 1: the reference @size() is not supported: options are plain values", "rollout.n = @size()\n"
    ),
    in_gin("run.gin, line 1: imports are not supported: options are plain values", "import os\n"),
    in_gin("run.gin, line 1: the macro %size is used but never given a value", "rollout.n = %size\n"),
    in_gin("run.gin, line 1: the macro %size is defined by itself", "size = %size\nrollout.n = %size\n"),
    in_gin("run.gin: its macros make more than 100000 values, and a config file may have no more", MACROS),
    in_gin("run.gin: includes itself", "include 'run.gin'\n"),
    in_gin("base.gin: no such config file", "include 'base.gin'\n"),
    in_gin("run.gin: not valid gin (unhashable type: 'list')", "data.task_config = {[1]: 2}\n"),
    in_gin("run.gin: not UTF-8 text (byte 27)", b'trainer.project_name = "caf\xe9"\n'),
    in_gin("run.gin, line 2: rollout.n.x: 'n' is an option, not a section", "rollout.n = 3\nrollout.n.x = 3\n"),
    in_gin("rollout.n must be a whole number, found 1.5 (run.gin, line 2)", "model.path = 'm'\nrollout.n = 1.5\n"),
    in_gin("run.gin, line 2: Expected indentation. Got NAME = n", "rollout:\nn = 4\n"),
    in_gin("model.path must be text, found b'm': put it in quotation marks (run.gin, line 1)", "model.path = b'm'\n"),
    Refusal(
        ("train", "--config", "run.toml"),
        "run.toml: a config file must end in .yaml, .yml, .gin",
        holds("x = 1\n", "run.toml"),
    ),
    override("rollout.n", FORM),
    override("=4", FORM),
    override("rollout..n=4", FORM),
    override(
        "rollout.stop=[a",
        ": expected ',' or ']', but got '<stream end>' (to YAML { begins a mapping and [ a list: put text that begins "
        'with one in quotation marks, "{...}")',
    ),
    override("rollout.n=a: b: c", ": mapping values are not allowed here"),
    override("trainer.seed=007", ": 007 would be read to base 8, as 7: leave out the leading 0"),
    Refusal(
        ("train", f"rollout.stop={ALIASES}"),
        "override 'rollout.stop=[&a [1,1,1,1,1,1,1,1,1,1,1], &b [*...c,*c,*c], &e "
        "[*d,*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]]': more than 100000 values, each use of an alias counted: a config "
        "file may have no more",
    ),
    in_run_yaml("override 'rollout.n.x=3': 'n' is an option, not a section", holds(MINI), "rollout.n.x=3"),
    in_run_yaml("rollout.n must be at least 1, found 0 (command line: rollout.n=0)", holds(MINI), "rollout.n=0"),
    in_run_yaml(
        "actor.ppo_mini_batch_size (4 prompts) must divide data.train_batch_size (9 prompts) (run.yaml, line 6; "
        "command line: data.train_batch_size=9)",
        holds(MINI),
        "data.train_batch_size=9",
    ),
    Refusal(("train", "--config", "none.yaml"), "none.yaml: no such config file"),
    in_run_yaml(
        "run.yaml: cannot be read as a config file: it is a folder", lambda folder: (folder / "run.yaml").mkdir()
    ),
    in_run_yaml(
        "run.yaml: cannot be read as a config file: it is a device",
        lambda folder: (folder / "run.yaml").symlink_to("/dev/zero"),
    ),
    in_run_yaml(
        "run.yaml: cannot be read as a config file: it is a pipe or a socket",
        lambda folder: os.mkfifo(folder / "run.yaml"),
    ),
    in_run_yaml("run.yaml: no such config file", lambda folder: (folder / "run.yaml").symlink_to("gone.yaml")),
    Refusal(("train", "--config", "run.yaml/run.yaml"), "run.yaml/run.yaml: no such config file", holds("")),
    Refusal(("train", "--config", "x" * 300 + ".yaml"), "x" * 300 + ".yaml: file name too long"),
)


def test_refusal(refused: Callable[[Iterable[Refusal]], None]):
    refused(REFUSALS)
