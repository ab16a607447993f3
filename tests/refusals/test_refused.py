"""What is wrong with an input is one sentence, which names the option or the file, its place, the value and the rule.

One case for each kind of mistake, not one for each sentence; `test_command_lines.py` has those in arguments. Nothing of
a large size is allocated, no code of a file is run, and nothing is written (`tests/support/refusals.py` checks that).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pyarrow
import pyarrow.parquet as parquet
import pytest
from damage import cut, flip, saved
from refusals import Refusal, problems
from tiny import CONFIG, write_tiny_model

from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.safetensors import export_hf
from jaxrl.training import manifest

Prepare = Callable[[Path], object]
LENGTHS = ("data.max_prompt_length=64", "data.max_response_length=16")


def writes(content: str | bytes | Mapping[str, Any], name: str = "a.jsonl") -> Prepare:
    """Writes one file; a mapping as JSON."""
    text = json.dumps(content) if isinstance(content, Mapping) else content
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def together(*steps: Prepare) -> Prepare:
    return lambda folder: [step(folder) for step in steps]


def files_of_commands(folder: Path) -> None:
    (folder / "reward.py").write_text("def compute_score(**kwargs): return 1.0\n")
    (folder / "a.jsonl").write_text('{"answer": "1", "response": "1"}\n{"answer": "1", "response": 1}\n')


# ---------------------------------------------------------------- options

OPTIONS = {
    "rollout.n=1000000": (
        "rollout.n must be at most 65536 (a prompt's samples are kept in memory until the last one is scored), found "
        "1000000"
    ),
    "rollout.n=four": "rollout.n must be a whole number, found 'four' (text)",
    "rollout.partial_rollout=true": (
        "rollout.partial_rollout must be a section with options, found True: rollout.partial_rollout.enable is its "
        "switch"
    ),
    "rollout.temprature=1": "unknown option rollout.temprature: did you mean rollout.temperature?",
    "algorithm.adv_estimator=gpro": (
        "algorithm.adv_estimator must be one of grpo, dr_grpo, grpo_turns, rloo, reinforce_plus_plus, gae, gdpo, none, "
        "found 'gpro'; did you mean grpo?"
    ),
    "trainer.run_dir=gs://bucket/run": "trainer.run_dir is a URL (gs://bucket/run): give one on this machine",
    "rollout.temperature=0": (
        "rollout.temperature (0) makes all samples of a prompt equal, and algorithm.adv_estimator=grpo compares them "
        "with each other: every advantage would be 0"
    ),
    "reward.kind=judge reward.judge.endpoint=http://h/v1 reward.judge.endpoint_model=m reward.judge.num_samples=2": (
        "reward.judge.num_samples (2) needs reward.judge.temperature above 0: greedy verdicts on a sample are all the "
        "same"
    ),
    "actor.ppo_max_token_len_per_gpu=100": (
        "actor.ppo_max_token_len_per_gpu (100 tokens) must hold the longest sequence: data.max_prompt_length (256) + "
        "data.max_response_length (128) = 384 tokens; actor.context_parallel_size parts it among devices"
    ),
    "trainer.num_devices=8 rollout.num_workers=3": (
        "rollout.num_workers (3) must cut trainer.num_devices (8) along the major axes of their mesh, into one of 1, "
        "2, 4, 8 workers"
    ),
}
"""Overrides, with spaces between them, and sentences without their place."""

WITHOUT_A_PLACE = (
    Refusal(
        ("train",),
        "model.path is missing: give a Hugging Face folder, a .gguf file or org/name of the Hugging Face Hub",
    ),
    Refusal(
        (
            *("simulate", "model.path=Qwen2.5-7B", "simulate.run_dir={tmp}/s", "data.task=leg_counting"),
            *("rollout.tail_batching.enable=true", "rollout.partial_rollout.enable=true"),
        ),
        "tail batching and partial rollout exclude each other: each decides what becomes of unfinished responses",
    ),
)


def of_options() -> Iterable[Refusal]:
    yield from WITHOUT_A_PLACE
    for line, sentence in OPTIONS.items():
        overrides = re.split(r" (?=[\w.]+=)", line)
        named = [each for each in overrides if each.partition("=")[0] in sentence]
        named.sort(key=lambda each: sentence.index(each.partition("=")[0]))
        yield Refusal(
            ("train", "model.path={model}", *overrides), f"{sentence} (command line: {' '.join(named or overrides)})"
        )


# ---------------------------------------------------------------- configuration files

MODEL = "model:\n  path: m\n"


def config_file(sentence: str, content: str | bytes | None, name: str = "run.yaml") -> Refusal:
    prepare = (lambda folder: os.mkfifo(folder / name)) if content is None else writes(content, name)
    return Refusal(("train", "--config", name), f"{name}{sentence}" if sentence[0] in ":," else sentence, prepare)


CONFIG_FILES = (
    config_file(
        ": is larger than the 1 MiB that a config file may have: was another file meant, such as data?", "a" * 2_000_000
    ),
    config_file(", line 6: 'n' is given twice, first in line 4", MODEL + "rollout:\n  n: 4\n  top_p: 1\n  n: 8\n"),
    config_file(
        ", line 1: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        "model: !!python/object/apply:os.system [ls]\n",
    ),
    config_file("rollout.n must be at least 1, found 0 (run.yaml, line 4)", MODEL + "rollout:\n  n: 0\n"),
    config_file(": cannot be read as a config file: it is a pipe or a socket", None),
    config_file(
        "rollout.n must be a whole number, found 1.5 (run.gin, line 2)",
        "model.path = 'm'\nrollout.n = 1.5\n",
        "run.gin",
    ),
)

# ---------------------------------------------------------------- data

LINE = json.dumps({"question": "1 + 1", "answer": "2"})
FILE = "{tmp}/a.jsonl"
EVAL = ("eval", "model.path=random:{model}", *LENGTHS)
TABLE = pyarrow.Table.from_pylist([{"question": f"{i} + {i}" * 20, "answer": str(2 * i)} for i in range(500)])


def cut_table(folder: Path) -> None:
    parquet.write_table(TABLE, folder / "a.parquet")
    cut(folder / "a.parquet", 2000)


def data(sentence: str, prepare: Prepare, *options: str, name: str = "a.jsonl") -> Refusal:
    file = f"{{tmp}}/{name}"
    said = file + sentence if sentence[0] in ":," else sentence
    return Refusal((*EVAL, f"data.val_files=[{file}]", *options), said, prepare)


DATA = (
    data(": a data file must end in .jsonl, .jsonl.gz or .parquet", writes("q,a\n", "a.csv"), name="a.csv"),
    data(": holds no rows", writes("\n \n\r\n")),
    data(
        ", line 1: longer than 64 MiB; a line must hold one problem",
        writes(gzip.compress(b" " * (65 * 2**20), 1, mtime=0), "a.jsonl.gz"),
        name="a.jsonl.gz",
    ),
    data(", line 2: not valid JSON (Expecting ',' delimiter, column 21)", writes(f"{LINE}\n{LINE[:20]}\n")),
    data(
        ": not a Parquet file, or a damaged one (Parquet magic bytes not found in footer. Either the file is corrupted "
        "or this is not a parquet file.)",
        cut_table,
        name="a.parquet",
    ),
    data(
        "no held-out prompts: all 1 are longer than data.max_prompt_length (4 tokens)",
        writes(LINE),
        "data.max_prompt_length=4",
    ),
    data(
        f"{FILE}: all 1 problems of data.val_files are in the training set as well (data.train_files): keep some rows "
        "out of it, in a file for data.val_files alone, or leave data.val_files empty",
        writes(LINE),
        f"data.train_files=[{FILE}]",
    ),
)

# ---------------------------------------------------------------- tokenizers and chat templates

TOKENS = "{tmp}/model"


def tokenizer(sentence: str, change: Prepare, *options: str, **config: Any) -> Refusal:
    prepare = together(writes(LINE), lambda folder: change(write_tiny_model(folder / "model", **config)))
    return Refusal(("eval", "model.path=random:{tmp}/model", *LENGTHS, f"data.val_files=[{FILE}]", *options), sentence,
                   prepare)  # fmt: skip


TOKENIZERS = (
    tokenizer(
        f"{TOKENS}: holds no tokenizer.json, which is the one tokenizer format that is read (tokenizer.model: load it "
        "with transformers' AutoTokenizer and save it)",
        lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"),
    ),
    tokenizer(
        f"{TOKENS}/config.json: eos_token_id ([2, 260]) must be within the vocabulary: from 0 to 259",
        lambda folder: None,
        eos_token_id=[2, 260],
    ),
    tokenizer(
        "data.max_prompt_length (64) + data.max_response_length (16) = 80 tokens, but {tmp}/model was made for at "
        "most 79 (max_position_embeddings, with rope scaling where there is any): ask for less, or give the model's "
        "config.json a rope scaling",
        lambda folder: None,
        max_position_embeddings=79,
    ),
    tokenizer(
        f"{FILE}, line 1: {TOKENS}/chat_template.jinja: the chat template fails with these messages: Range too big. "
        "The sandbox blocks ranges larger than MAX_RANGE (100000).",
        writes("{% for i in range(10 ** 9) %}{% endfor %}", "chat_template.jinja"),
    ),
)

# ---------------------------------------------------------------- models

UP, INDEX = "model.layers.1.mlp.up_proj.weight", "model.safetensors.index.json"
LAYOUT = ("explain-layout", "--model", "{tmp}/m")  # reads the config alone
EXPORT = ("export", "{tmp}/m", "{tmp}/out")  # reads the weights as well


def model(*steps: Prepare, max_file_bytes: int = 10**9) -> Prepare:
    """A tiny model with weights, to which something is done."""

    def prepare(folder: Path) -> None:
        config = ModelConfig.from_hf(CONFIG)
        target = write_tiny_model(folder / "m")
        params = decoder.init(config, jax.random.key(0))
        export_hf(params, config, target, dtype=jnp.float32, max_file_bytes=max_file_bytes)
        together(*steps)(target)

    return prepare


def in_config(sentence: str, **changes: Any) -> Refusal:
    made = writes(CONFIG | changes, "config.json")
    return Refusal(LAYOUT, f"{{tmp}}/m/config.json: {sentence}",
                   lambda folder: made(write_tiny_model(folder / "m")))  # fmt: skip


def placed(file: str) -> Prepare:
    """A model in several files, whose index has a tensor in another one."""

    def change(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        content["weight_map"][UP] = file
        (folder / INDEX).write_text(json.dumps(content))

    return model(change, max_file_bytes=20_000)


def a_run(folder: Path) -> None:
    (folder / "first" / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "config.yaml"):
        (folder / "first" / name).write_text("{}")


MODELS = (
    Refusal(
        ("generate", "--model", "https://huggingface.co/Qwen/Qwen2.5-0.5B", "hi"),
        "model.path: https://huggingface.co/Qwen/Qwen2.5-0.5B is a URL; give Qwen/Qwen2.5-0.5B for a model of the "
        "Hugging Face Hub, or its folder or .gguf file on this machine",
    ),
    Refusal(
        ("generate", "--model", "first", "hi"),
        "first: this is a run, not a model: `jaxrl export first FOLDER` writes its model",
        a_run,
    ),
    in_config("num_hidden_layers (0) must be a whole number from 1 to 10000", num_hidden_layers=0),
    Refusal(
        EXPORT,
        f"{{tmp}}/m: holds no model.safetensors and no {INDEX}; weights must be in safetensors files",
        model(lambda folder: (folder / "model.safetensors").unlink()),
    ),
    Refusal(
        EXPORT,
        "{tmp}/m/model.safetensors: tensor model.embed_tokens.weight has shape (260, 32), but the config asks for "
        "(16777216, 32)",
        model(writes(CONFIG | {"vocab_size": 2**24}, "config.json")),
    ),
    Refusal(
        EXPORT,
        "{tmp}/m/model.safetensors: truncated or not a safetensors file (header too large)",
        model(writes(b"version https://git-lfs.github.com/spec/", "model.safetensors")),
    ),
    Refusal(
        EXPORT,
        f"{{tmp}}/m/{INDEX}: weight_map places tensor {UP} in '../elsewhere'; it must name a file in this folder",
        placed("../elsewhere"),
    ),
    Refusal(
        ("explain-layout", "--model", "{tmp}/m.gguf"),
        "{tmp}/m.gguf: truncated or not a GGUF file (GGUF magic invalid)",
        writes(b"PK\3\4" + bytes(100), "m.gguf"),
    ),
)

# ---------------------------------------------------------------- run directories and checkpoints

TRAIN = (
    *("train", "model.path=random:{model}", "data.train_batch_size=2", "trainer.total_training_steps=8", *LENGTHS),
    *("data.train_files=[{tmp}/train.jsonl]", "data.shuffle=false", "trainer.compilation_cache_dir={tmp}/cache"),
    "reward={kind: custom, path: {tmp}/reward.py}",  # its workers import little
)
RUN = (*TRAIN, "trainer.run_dir={tmp}/run")
BRING_BACK = "bring back the file as it was, or move it away, and steps after the last checkpoint ask the clock again"


def started(kind: str = "train", **files: str) -> Prepare:
    """A run directory with what each start writes; a file's content by its name (`run_json`)."""

    def prepare(folder: Path) -> None:
        files_of_commands(folder)
        problems(folder)
        (folder / "run").mkdir()
        devices = {"platform": "simulated" if kind == "simulate" else "cpu", "kind": "cpu", "count": 1}
        told = {"kind": kind, "devices": devices, "starts": []}
        for name, content in ({"run_json": json.dumps(told), "_lock": ""} | files).items():
            (folder / "run" / name.replace("_", ".")).write_text(content)

    return prepare


def checkpoint(change: Prepare, *steps: int) -> Prepare:
    """A run with checkpoints, of which the last is damaged."""

    def prepare(folder: Path) -> None:
        files_of_commands(folder)
        problems(folder)
        (folder / "run").mkdir()
        saved(folder / "run" / "checkpoints", *(steps or (4,)))
        change(folder / "run" / "checkpoints" / "4")

    return prepare


def damaged(fault: str, change: Prepare, *steps: int) -> Refusal:
    place = "{tmp}/run/checkpoints holds no checkpoint that is whole"
    return Refusal(RUN, f"{place} ({fault}): bring one back from a copy", checkpoint(change, *steps))


def emptied(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def gone(step: Path) -> None:
    """A run of three steps that saved one of them, and has no checkpoint any more."""
    run = step.parents[1]
    shutil.rmtree(step.parent)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 4)))
    (run / "run.json").write_text(json.dumps({"devices": {"platform": "cpu"}, "starts": [], "checkpoint": 2}))


RUNS = (
    Refusal(
        RUN,
        "{tmp}/run holds a run of `jaxrl simulate`, and this is `jaxrl train`: choose another trainer.run_dir",
        started("simulate"),
    ),
    Refusal(RUN, "{tmp}/run/run.json: damaged: mend it, or move it away", started(run_json="[1]")),
    Refusal(
        RUN,
        "{tmp}/run/config.yaml: empty, though it held the options of a run: bring it back, or move it away",
        started(config_yaml=""),
    ),
    Refusal(
        RUN,
        f"{{tmp}}/run/journal.jsonl: damaged (not as it was written): {BRING_BACK}",
        started(config_yaml="model: {path: gone}\n", journal_jsonl="Monday\n"),
    ),
    damaged("4: host/metadata has changed since it was written", lambda step: flip(step / "host" / "metadata")),
    damaged("4: manifest.json is missing", lambda step: (step / "manifest.json").unlink()),
    damaged(
        "4: it is empty; 2: host/metadata is missing",
        lambda step: [emptied(step), (step.parent / "2" / "host" / "metadata").unlink()],
        *(2, 4),
    ),
    Refusal(
        RUN,
        "checkpoint {tmp}/run/checkpoints/4 has schema version 4; this jaxrl reads up to 3: update jaxrl",
        checkpoint(lambda step: manifest.write(step, 4, 4)),
    ),
    Refusal(
        RUN,
        "checkpoint {tmp}/run/checkpoints/4 does not fit this model and optimizer: params/a is of shape (40,) there "
        "and missing here",
        checkpoint(lambda step: None),
    ),
    Refusal(
        RUN,
        "{tmp}/run/checkpoints holds no checkpoint, though step 2 was saved: bring the folder back, choose another "
        "trainer.run_dir, or move {tmp}/run/metrics.jsonl away to start from step 1",
        checkpoint(gone),
    ),
)

# ---------------------------------------------------------------- reward files

SCORE = ("score", "reward.kind=custom", "reward.path=r.py", "--responses", "a.jsonl", "--out", "o.jsonl")


def reward(sentence: str, source: str | None, *options: str) -> Refusal:
    """Without a source the file is a named pipe."""
    file = (lambda folder: os.mkfifo(folder / "r.py")) if source is None else writes(source, "r.py")
    return Refusal((*SCORE, *options), sentence, together(files_of_commands, file))


IMPORTING = "reward.path: importing {tmp}/r.py"
REWARDS = (
    reward("reward.path must name a Python file (.py), found {tmp}/r.py", None),
    reward(
        f"{IMPORTING} failed: the scorer's process ended with exit code -11", "import ctypes; ctypes.string_at(0)\n"
    ),
    reward(
        f"{IMPORTING} did not end within reward.start_timeout_s (0.5 s)",
        "sum(iter(int, 1))\n",
        "reward.start_timeout_s=0.5",
    ),
)

CLASSES: dict[str, Iterable[Refusal]] = {
    "options": list(of_options()),
    "config files": CONFIG_FILES,
    "data": DATA,
    "tokenizers": TOKENIZERS,
    "models": MODELS,
    "runs": RUNS,
    "rewards": REWARDS,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_refused(kind: str, refused: Callable[[Iterable[Refusal]], None]):
    refused(CLASSES[kind])
