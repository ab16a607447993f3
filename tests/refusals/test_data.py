"""Bad inputs of the class "data": data files and tasks. `test_tokenizers.py` has the rest of the class.

Each is refused before weights load, with one sentence that names the file and the line, and nothing is written.
"""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
from refusals import Refusal

Prepare = Callable[[Path], None]

GOOD = {"question": "1 + 1", "answer": "2", "m": [{"role": "user", "content": "1 + 1"}]}
LINE = json.dumps(GOOD)
LENGTHS = ("data.max_prompt_length=64", "data.max_response_length=16")
EVAL = ("eval", "model.path=random:{model}", *LENGTHS)
TASK = (*EVAL, "data.task=chain_sum", "data.val_size=4")
FILE = "{tmp}/a.jsonl"
TRAIN = ("train", *EVAL[1:], f"data.train_files=[{FILE}]", "trainer.run_dir={tmp}/run")


def writes(content: str | bytes, name: str = "a.jsonl") -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def packed(table: pyarrow.Table, change: Callable[[bytes], bytes] = bytes, **options: Any) -> Prepare:
    """A Parquet file whose bytes are changed."""

    def prepare(folder: Path) -> None:
        parquet.write_table(table, folder / "a.parquet", **options)
        (folder / "a.parquet").write_bytes(change((folder / "a.parquet").read_bytes()))

    return prepare


def files(sentence: str, prepare: Prepare, *options: str, path: str = FILE) -> Refusal:
    return Refusal((*EVAL, f"data.val_files=[{path}]", *options), sentence, prepare)


def line(second: str, said: str, *options: str) -> Refusal:
    """A bad second line."""
    return files(f"{FILE}, line 2{said}", writes(f"{LINE}\n{second}\n"), *options)


def row(said: str, *options: str, **entries: Any) -> Refusal:
    """A second row with other entries."""
    return line(json.dumps(GOOD | entries), said, *options)


def messages(said: str, value: Any) -> Refusal:
    return row(f": 'm' (data.messages_key){said}", "data.messages_key=m", m=value)


def task(sentence: str, *options: str) -> Refusal:
    return Refusal((*TASK, *options), sentence)


TABLE = pyarrow.Table.from_pylist([{"question": f"{i} + {i}" * 20, "answer": str(2 * i)} for i in range(500)])
PARQUET = "{tmp}/a.parquet"
ASK = {"role": "user", "content": "1 + 1"}
RULE = " must be a list of messages with text in 'role' and 'content', found "
HALF = "half a character (\\ud83d without its other half)"

NAMES = [
    files(f"{FILE}: no such file; data.val_files must name existing files", lambda folder: None),
    files(
        "{tmp}/*.jsonl: no such file; data.val_files must name existing files",
        writes(LINE),
        path="{tmp}/*.jsonl",
    ),
    files(
        "data.val_files is a URL (https://example.org/a.jsonl): download it and give the file (command line: "
        "data.val_files=[https://example.org/a.jsonl])",
        lambda folder: None,
        path="https://example.org/a.jsonl",
    ),
    files("data.val_files: ' ' is no file's name", lambda folder: None, path="' '"),
    files(
        "~no-such-user/a.jsonl: no such file; data.val_files must name existing files",
        lambda folder: None,
        path="~no-such-user/a.jsonl",
    ),
    files(
        f"{FILE}: no such file; data.val_files must name existing files", lambda folder: (folder / "a.jsonl").mkdir()
    ),
    files(
        "{tmp}/a.csv: a data file must end in .jsonl, .jsonl.gz or .parquet",
        writes("question,answer\n1 + 1,2\n", "a.csv"),
        path="{tmp}/a.csv",
    ),
    files(
        "no/b.jsonl: no such file; data.train_files must name existing files",
        writes(LINE),
        "data.train_files=[no/b.jsonl]",
    ),
]
CONTENTS = [
    files(f"{FILE}: holds no rows", writes("\n \n\r\n")),
    files(f"{FILE}, line 1: not UTF-8 text (byte 1)", writes(gzip.compress(LINE.encode()))),
    files(
        f"{FILE}.gz, line 1: damaged or cut off (Compressed file ended before the end-of-stream marker was reached)",
        writes(gzip.compress((LINE + "\n").encode() * 9, mtime=0)[:20], "a.jsonl.gz"),
        path=f"{FILE}.gz",
    ),
    files(
        f"{FILE}.gz, line 1: damaged or cut off (Error -3 while decompressing data: invalid block type)",
        writes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff" + b"\xff" * 40, "a.jsonl.gz"),
        path=f"{FILE}.gz",
    ),
    files(
        f"{FILE}.gz, line 1: longer than 64 MiB; a line must hold one problem",
        writes(gzip.compress(b" " * (65 * 2**20), 1, mtime=0), "a.jsonl.gz"),
        path=f"{FILE}.gz",
    ),
    files(f"{FILE}, line 2: not UTF-8 text (byte 14)", writes(f'{LINE}\n{{"question": "é"}}'.encode("latin-1"))),
    line(LINE[:20], ": not valid JSON (Expecting ',' delimiter, column 21)"),
    line("null", ": a row must be a JSON object, found NoneType"),
    line('{"question": "q", "answer": NaN}', ": NaN is no number in JSON"),
    line('{"question": "q", "answer": 1, "answer": 2}', ": key 'answer' stands twice in one object"),
    line('{"question": "\\ud83d", "answer": 1}', f": 'question' holds {HALF}"),
    line('{"a": ' + "[" * 200 + "]" * 200 + "}", ": nested more than 100 levels deep"),
    line("[" * 100_000, ": nested too deeply"),
    line('{"answer": ' + "9" * 5000 + "}", ": a whole number has 5000 digits, and at most 400 are read"),
]

PARQUETS = [
    files(
        f"{PARQUET}: not a Parquet file, or a damaged one (Parquet magic bytes not found in footer. Either the file "
        "is corrupted or this is not a parquet file.)",
        packed(TABLE, lambda data: data[:-100]),
        path=PARQUET,
    ),
    files(f"{PARQUET}: holds no rows", packed(TABLE.slice(0, 0)), path=PARQUET),
    files(
        f"{PARQUET}: not a Parquet file, or a damaged one (Corrupt snappy compressed data.)",
        packed(TABLE, lambda data: data[:400] + b"\xff" * 40 + data[440:], compression="snappy", use_dictionary=False),
        path=PARQUET,
    ),
    files(
        f"{PARQUET}: not UTF-8 text (byte 0)",
        packed(pyarrow.table({"question": pyarrow.array([b"ok", b"\xff\xfe"]).view(pyarrow.string())})),
        path=PARQUET,
    ),
    files(
        f"{PARQUET}: the column 'question' stands twice",
        packed(pyarrow.table([pyarrow.array(["q"]), pyarrow.array(["r"])], names=["question", "question"])),
        path=PARQUET,
    ),
    files(
        f"{PARQUET}, row 2: 'answer' (data.answer_key) must be text or a finite number, found nan",
        packed(pyarrow.table({"question": ["a", "b"], "answer": [1.0, float("nan")]})),
        path=PARQUET,
    ),
]

COLUMNS = [
    files(
        f"{FILE}, line 1: no column 'question' (data.prompt_key): found 'text', 'label'",
        writes('{"text": "q", "label": 1}'),
    ),
    files(
        f"{FILE}, line 1: 'm.answer' (data.answer_key) must be text or a number, found None",
        writes('{"question": "q", "m": null}'),
        "data.answer_key=m.answer",
    ),
    files(
        f"{FILE}, line 1: no column 'question' (data.prompt_key): did you mean 'Question'?", writes('{"Question": "q"}')
    ),
    line('{"question": "q"}', ": no column 'answer' (data.answer_key): found 'question'"),
    files(
        f"{FILE}, line 1: no column 'reward_model.ground_truth' (data.answer_key): found 'question', 'answer', 'm'",
        writes(LINE),
        "data.answer_key=reward_model.ground_truth",
    ),
    files(
        f"{FILE}, line 1: no column 'ground_truth' (data.answer_key): did you mean 'reward_model.ground_truth'?",
        writes(json.dumps({"question": "q", "reward_model": {"style": "rule", "ground_truth": "1"}, "truth": 1})),
        "data.answer_key=ground_truth",
    ),
    files(
        "data.prompt_key is empty: name the column of the problem's text, or give data.messages_key",
        writes(LINE),
        "data.prompt_key=",
    ),
    row(": 'question' (data.prompt_key) must hold some text, found 7", question=7),
    row(": 'question' (data.prompt_key) must hold some text, found ' \\n'", question=" \n"),
    row(
        ": 'question' (data.prompt_key) holds a conversation, found [{'role': 'user', 'content': '1 + 1'}]: give "
        "data.messages_key=question",
        question=[{"role": "user", "content": "1 + 1"}],
    ),
    row(": 'answer' (data.answer_key) must be text or a number, found ['2']", answer=["2"]),
    row(": 'answer' (data.answer_key) must be text or a number, found True", answer=True),
    row(": 'answer' (data.answer_key) must hold an answer, found '2 ####'", answer="2 ####"),
    line(
        '{"question": "q", "answer": 1e999}', ": 'answer' (data.answer_key) must be text or a finite number, found inf"
    ),
    files(
        f"{FILE}, line 1: 's' (data.source_key) must be text or a whole number, found None",
        writes(json.dumps(GOOD | {"s": None})),
        "data.source_key=s",
    ),
]

MESSAGES = [
    messages(f"{RULE}[]", []),
    messages(f"{RULE}'1 + 1'", ["1 + 1"]),
    messages(f"{RULE}{{'role': 'user', 'content': None}}", [{"role": "user", "content": None}]),
    messages(
        ": message 2 has the role 'tool', which is not supported; supported are system, user, assistant",
        [ASK, {"role": "tool", "content": "2"}, ASK],
    ),
    messages(
        ": message 2 has 'tool_calls', which is not supported",
        [ASK, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}, ASK],
    ),
    messages(": message 1 must have text in 'name', found 7", [{**ASK, "name": 7}]),
    messages(
        ": the last message must be the user's, which is to be answered, found assistant",
        [ASK, {"role": "assistant", "content": "2"}],
    ),
    messages(": the last message must hold some text, found ''", [{"role": "user", "content": ""}]),
    row(", 'm': not valid JSON (Expecting value, column 1)", "data.messages_key=m", m="user: 1 + 1"),
    row(
        ", 'm': key 'role' stands twice in one object",
        "data.messages_key=m",
        m='[{"role": "user", "role": "system", "content": "q"}]',
    ),
]

PROMPTS = [
    files(
        "data.prompt_template names the column {answer}, but only {question} is filled in: write the rest into the "
        "problem's text",
        writes(LINE),
        "data.prompt_template='{question} {answer}'",
    ),
    files(
        "no held-out prompts: all 1 are longer than data.max_prompt_length (4 tokens)",
        writes(LINE),
        "data.max_prompt_length=4",
    ),
    files(
        f"{FILE}, line 1: the prompt has 200019 tokens, more than data.max_prompt_length (64), and "
        "data.filter_overlong_prompts is false",
        writes(json.dumps({"question": "x" * 200_000, "answer": 1})),
        "data.filter_overlong_prompts=false",
    ),
    files(
        f"{FILE}: all 1 problems of data.val_files are in the training set as well (data.train_files): keep some rows "
        "out of it, in a file for data.val_files alone, or leave data.val_files empty",
        writes(LINE),
        f"data.train_files=[{FILE}]",
    ),
    Refusal(
        (*TRAIN, "data.max_prompt_length=4"),
        "no training prompts: all 1 are longer than data.max_prompt_length (4 tokens)",
        writes(LINE),
    ),
    Refusal(
        (*TRAIN, "reward.kind=code"),
        f"{FILE}, line 2: a: the reference answer asserts nothing, so that any program would pass: '42'",
        writes(json.dumps(GOOD | {"answer": "assert f(1) == 2"}) + "\n" + json.dumps(GOOD | {"answer": "42"})),
    ),
    Refusal(
        (*TRAIN, "data.train_batch_size=2", "data.source_quotas={b: 2}"),
        "data.source_quotas: the training data has no source 'b': it holds 'a'",
        writes(LINE),
    ),
]

TASKS = [
    task(
        "data.task_config: chain_sum refuses {'terms': 2} (ChainSumConfig.__init__() got an unexpected keyword "
        "argument 'terms')",
        "data.task_config={terms: 2}",
    ),
    task(
        "data.task_config: chain_sum refuses {'min_terms': 0} (min_terms must be positive)",
        "data.task_config={min_terms: 0}",
    ),
    task("data.task_config.seed must be a whole number, found 'one'", "data.task_config={seed: one}"),
    task(
        "data.task_config.size: the number of problems is data.task_size (and data.val_size)",
        "data.task_config={size: 5}",
    ),
    task("data.task: reasoning-gym has no task 'chain_sums'; did you mean chain_sum?", "data.task=chain_sums"),
]


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused([*NAMES, *CONTENTS, *PARQUETS, *COLUMNS, *MESSAGES, *PROMPTS, *TASKS])
