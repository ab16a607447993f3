"""Rows of data that are no problem, no demonstration or no pair: a row for each rule, with what its error names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from data_files import config, write
from pyarrow import parquet
from tiny import write_tiny_model

from jaxrl.config import Config, ConfigError, from_mapping
from jaxrl.data.conversations import ConversationTokens, read_demonstrations, read_pairs
from jaxrl.data.problems import Problem, read_problems
from jaxrl.data.prompts import load_train, refuse_sources
from jaxrl.data.responses import read_responses
from jaxrl.data.tokenizer import Tokenizer

OK: dict[str, Any] = {"question": "1 + 1", "answer": "2"}
ASKED, ANSWERED = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}

PROBLEMS: list[tuple[dict[str, Any], Any, str]] = [
    ({}, {**OK, "images": ["a.png"]}, "'images' holds ['a.png'], and models are given text alone"),
    ({}, {**OK, "question": [ASKED]},
     "holds a conversation, found [{'content': 'Hi', 'role': 'user'}]: give data.mess"),
    ({}, {**OK, "question": " "}, "line 1: 'question' (data.prompt_key) must hold some text, found ' '"),
    ({}, {"problem": "1", "answer": 2}, "no column 'question' (data.prompt_key): found 'problem', 'answer'"),
    ({}, {"questions": "1", "answer": 2}, "no column 'question' (data.prompt_key): did you mean 'questions'?"),
    ({}, {"a": {"question": "1"}, "answer": 2}, "no column 'question' (data.prompt_key): did you mean 'a.question'?"),
    ({}, {**OK, "answer": True}, "'answer' (data.answer_key) must be text or a number, found True"),
    ({}, {**OK, "answer": ""}, "'answer' (data.answer_key) must hold an answer, found ''"),
    ({}, [OK], "line 1: a row must be a JSON object, found list"),
    ({"prompt_template": "{question} {answer}"}, OK, "data.prompt_template names the column {answer}, but only"),
    ({"source_key": "s"}, {**OK, "s": None}, "'s' (data.source_key) must be text or a whole number, found None"),
    ({"reference_time_key": "t"}, {**OK, "t": -1}, "(data.reference_time_key) must be a number of seconds, 0 or more"),
    ({"messages_key": "m"}, {"m": [], "answer": 1}, "must be a list of messages with text in 'role' and 'content'"),
    ({"messages_key": "m"}, {"m": ["Hi"], "answer": 1}, "with text in 'role' and 'content', found 'Hi'"),
    ({"messages_key": "m"}, {"m": [{"role": "user"}], "answer": 1}, "and 'content', found {'role': 'user'}"),
    ({"messages_key": "m"}, {"m": "[{", "answer": 1}, "line 1, 'm': not valid JSON"),
    ({"messages_key": "m"}, {"m": [{**ASKED, "tool_calls": [1]}], "answer": 1}, "message 1 has 'tool_calls', which is"),
    ({"messages_key": "m"}, {"m": [{**ASKED, "name": 3}], "answer": 1}, "message 1 must have text in 'name', found 3"),
    ({"messages_key": "m"}, {"m": [{**ASKED, "role": "tool"}], "answer": 1}, "message 1 has the role 'tool', which is"),
    ({"messages_key": "m"}, {"m": [ASKED, ANSWERED], "answer": 1},
     "must be the user's, which is to be answered, found"),
    ({"messages_key": "m"}, {"m": [{**ASKED, "content": ""}], "answer": 1},
     "last message must hold some text, found ''"),
]  # fmt: skip


def problems(folder: Path, row: Any, **options: Any) -> list[Problem]:
    return list(read_problems([write(folder / "a.jsonl", [row])], "data.train_files", config(**options).data))


@pytest.mark.parametrize(("options", "row", "rule"), PROBLEMS)
def test_a_row_that_is_no_problem(options: dict[str, Any], row: Any, rule: str, tmp_path: Path):
    with pytest.raises(ValueError, match=re.escape(rule)):
        problems(tmp_path, row, **options)


def test_columns_of_a_problem(tmp_path: Path):
    """A struct may be null, verl's `extra_info` is a struct or anything else, and an empty time is none."""
    options = {"source_key": "from.file", "answer_key": "", "reference_time_key": "t"}
    found = problems(tmp_path, {**OK, "from": {"file": 7}, "t": 2, "extra_info": "x"}, **options)
    assert (found[0].source, found[0].answer) == ("7", None)
    assert (found[0].extra["t"], found[0].extra["extra_info"]) == (2.0, "x")
    assert problems(tmp_path, {**OK, "from": {"file": "f"}, "t": ""}, **options)[0].extra["t"] is None
    with pytest.raises(ValueError, match="must be text or a whole number, found None"):
        problems(tmp_path, {**OK, "from": None, "t": ""}, **options)


TALKS: list[tuple[str, dict[str, Any], Any, str]] = [
    ("sft", {}, {"prompt": "a"}, "'completion' (sft.completion_key) is missing, found 'prompt'"),
    ("sft", {}, {"messages": []}, "must be a list of messages with 'role' and 'content', found []"),
    ("sft", {}, {"messages": [ASKED]}, "the last message must be the assistant's, found none"),
    ("sft", {}, {"messages": [ANSWERED]}, "begins with the assistant: something must be asked first"),
    ("sft", {}, {"messages": [ASKED, ANSWERED, ANSWERED]}, "two messages of the assistant follow each other"),
    ("sft", {}, {"messages": [ASKED, {"role": "model"}]}, "among system, user, assistant, tool: message 2 is"),
    ("sft", {}, {"messages": [ASKED, {"role": "assistant"}]}, "message 2 must have text in 'content', found None"),
    ("sft", {}, {"messages": [ASKED, {**ANSWERED, "weight": 2}]}, "message 2: 'weight' must be 0 or 1, true or false"),
    ("sft", {}, {"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "masks every turn of the assistant"),
    ("sft", {}, {"messages": [ASKED, {**ANSWERED, "function_call": {"a": 1}}]}, "message 2 has 'function_call'"),
    ("sft", {}, {"messages": [ASKED, ANSWERED], "tools": [1]}, "'tools' must be a list of JSON objects, found [1]"),
    ("sft", {}, {"prompt": [ASKED, ANSWERED], "completion": "b"}, "another one follows: join them"),
    ("sft", {}, {"prompt": "a", "completion": ""}, "(sft.completion_key) must hold some text, found ''"),
    ("sft", {"apply_chat_template": False}, {"messages": [ASKED]}, "holds a conversation, and data.apply_chat_templ"),
    ("sft", {"filter_overlong_prompts": False}, {"prompt": "a", "completion": "b" * 500},
     "tokens are more than data.max_prompt_length (200) + data.max_response_length (128) = 328, and"),
    ("sft", {}, {"prompt": "a", "completion": "b" * 500}, "no rows to learn from: all 1 are longer than"),
    ("dpo", {}, {"prompt": "a", "chosen": "b"}, "'rejected' (dpo.rejected_key) is missing, found 'prompt', 'chosen'"),
    ("dpo", {}, {"chosen": "a", "rejected": "b"}, "'prompt' (dpo.prompt_key) is missing, and 'chosen' and 'rejected'"),
    ("dpo", {}, {"prompt": "Ha", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, {**ANSWERED, "content": "No"}]},
     "contradicts the row's conversations, which begin with their own prompt: 'Ha' is not in"),
    ("dpo", {}, {"prompt": [ANSWERED], "chosen": [ASKED, ANSWERED], "rejected": [ASKED, {**ANSWERED, "content": "No"}]},
     "contradicts the row's conversations"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def read(kind: str, folder: Path, row: Any, tokenizer: Tokenizer, **options: Any) -> Any:
    c = config(max_prompt_length=200, **options)
    reads = {"sft": read_demonstrations, "dpo": read_pairs}[kind]
    tokens = ConversationTokens(tokenizer, tokenizer.stop_token_ids, c)
    return reads([write(folder / "a.jsonl", [row])], "data.train_files", c, tokens)


@pytest.mark.parametrize(("kind", "options", "row", "rule"), TALKS)
def test_a_row_that_is_nothing_to_learn_from(
    kind: str, options: dict[str, Any], row: Any, rule: str, tokenizer: Tokenizer, tmp_path: Path
):
    with pytest.raises(ValueError, match=re.escape(rule)):
        read(kind, tmp_path, row, tokenizer, **options)


def test_a_pair_without_a_chat_template(tokenizer: Tokenizer, tmp_path: Path):
    row = {"prompt": "Hi", "chosen": " Ho", "rejected": " No"}
    chosen, rejected = read("dpo", tmp_path, row, tokenizer, apply_chat_template=False)[0].examples
    assert tokenizer.decode(chosen.prompt.tolist()) == tokenizer.decode(rejected.prompt.tolist()) == "Hi"
    assert [tokenizer.decode(each.response[:-1].tolist()) for each in (chosen, rejected)] == [" Ho", " No"]
    assert chosen.response[-1] in tokenizer.stop_token_ids


RESPONSES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"response": 1}, "'response' must be text, found 1"),
    ({}, {"response": "a", "answer": "1", "question": 3}, "'question' (data.prompt_key) must be text, found 3"),
    ({}, {"response": "a", "answer": "1"}, "no column 'response_length' (tokens), on which a part of the reward depen"),
    ({}, {"response": "a", "answer": "1", "length": -1}, "length must be a number of tokens, found -1"),
    ({"source_key": "s"}, {"response": "a", "s": 1.5},
     "'s' (data.source_key) must be text or a whole number, found 1."),
]  # fmt: skip


@pytest.mark.parametrize(("options", "row", "rule"), RESPONSES)
def test_a_row_that_is_no_response(options: dict[str, Any], row: dict[str, Any], rule: str, tmp_path: Path):
    path = Path(write(tmp_path / "a.jsonl", [row]))
    with pytest.raises(ValueError, match=re.escape(rule)):
        list(read_responses(path, config(**options).data, lambda source: True, needs_length=True))


def with_task(name: str, **options: Any) -> Config:
    return from_mapping({"model": {"path": "x"}, "data": {"task": name, "task_config": options, "task_size": 3}})


TASKS = [
    (with_task("chain_sums"), "data.task: reasoning-gym has no task 'chain_sums'; did you mean chain_sum?"),
    (with_task("chain_sum", size=3), "data.task_config.size: the number of problems is data.task_size"),
    (with_task("chain_sum", seed="a"), "data.task_config.seed must be a whole number, found 'a'"),
    (with_task("chain_sum", min_terms=-1), "data.task_config: chain_sum refuses {'min_terms': -1} ("),
    (config(), "data.train_files is missing: give files, or name a reasoning-gym task in data.task"),
    (config(train_files=[" "]), "data.train_files: ' ' is no file's name"),
    (config(train_files=["a.txt"]), "a.txt: no such file; data.train_files must name existing files"),
]


@pytest.mark.parametrize(("given", "rule"), TASKS, ids=[rule[:40] for _, rule in TASKS])
def test_where_problems_cannot_come_from(given: Config, rule: str):
    with pytest.raises(ConfigError if given.data.task else ValueError, match=re.escape(rule)):
        load_train(given)


SOURCES = [
    ({"data.source_quotas": {"a": 8}},
     "data.source_quotas: the training data holds 1 prompts of 'b', which has no quota"),
    ({"data.source_quotas": {"a": 4, "c": 4}}, "data.source_quotas: the training data has no source 'c': it holds"),
    ({"reward.domains": {"aa": {"kind": "math"}}}, "reward.domains.aa: no prompt has the source 'aa': did you mean a?"),
    ({"reward.domains": {"zz": {"kind": "math"}}}, "no prompt has the source 'zz': the data's sources are a, b"),
    ({"reward.domains": {"a": {"kind": "math"}}, "data.answer_key": ""}, "is empty: the source 'b' has no domain"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "rule"), SOURCES, ids=[rule[:40] for _, rule in SOURCES])
def test_sources_that_the_data_has_not(options: dict[str, Any], rule: str, tmp_path: Path):
    files = [write(tmp_path / "a.jsonl", [{**OK, "source": "a"}, {**OK, "source": "b"}])]
    sections: dict[str, Any] = {"model": {"path": "x"}, "data": {"train_files": files, "source_key": "source"}}
    sections |= {"reward": {}, "actor": {"ppo_max_token_len_per_gpu": 1 << 20}}
    sections["data"]["train_batch_size"] = 8
    for name, value in options.items():
        section, option = name.split(".")
        sections[section][option] = value
    c = from_mapping(sections)
    with pytest.raises(ValueError, match=re.escape(rule)):
        refuse_sources(c, load_train(c))


def test_a_parquet_file_with_a_column_twice(tmp_path: Path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["question", "question"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: the column 'question' occurs twice"):
        list(read_problems([str(tmp_path / "a.parquet")], "data.train_files", config().data))


TOKENIZERS = [
    ("tokenizer_config.json", {"eos_token": "<end>"}, "eos_token '<end>' is not in the vocabulary of tokenizer.json"),
    ("tokenizer_config.json", {"eos_token": 3}, "tokenizer_config.json: eos_token must be text or an object with text"),
    ("tokenizer_config.json", {"chat_template": 3}, "chat_template must be text or a list of named templates, found 3"),
    ("tokenizer_config.json", {"chat_template": [3]}, "a list of objects with text in 'name' and 'template', found 3"),
    ("tokenizer_config.json", {"chat_template": [{"name": "a/b", "template": ""}]},
     "a chat template's name must be made of letters, digits, _, - and ., found 'a/b'"),
    ("config.json", {"eos_token_id": [True]}, "config.json: eos_token_id must be a token id, a list of them or null"),
    ("tokenizer.json", {"model": {"type": "Words"}}, "tokenizer.json: not a tokenizer of the tokenizers library ("),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "rule"), TOKENIZERS)
def test_a_folder_that_holds_no_tokenizer(name: str, change: dict[str, Any], rule: str, tmp_path: Path):
    file = write_tiny_model(tmp_path) / name
    (tmp_path / "chat_template.jinja").unlink()
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(rule)):
        Tokenizer.from_path(tmp_path)
