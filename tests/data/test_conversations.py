"""Conversations as tokens: those of the whole rendered at once, with what the assistant said told apart; bad rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from keyword_options import with_options
from pyarrow import parquet
from tiny import write_tiny_model
from turn_templates import TEMPLATES, renders

from jaxrl.data.conversations import ConversationTokens, RowSource, read_demonstrations
from jaxrl.data.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And that, twice? {'a': 1}"},
    {"role": "assistant", "content": "8\n\nnaïve 漢字"},
    {"role": "user", "content": "Fine."},
    {"role": "assistant", "content": "Good."},
]


def config_of(**options: Any) -> Any:
    return with_options({"model": {"path": "unused"}, "data": {"max_prompt_length": 200}}, options)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def tokens_of(tokenizer: Tokenizer, **options: Any) -> ConversationTokens:
    return ConversationTokens(tokenizer, tokenizer.stop_token_ids, config_of(**options))


def said_in(tokenizer: Tokenizer, ids: np.ndarray, is_said: np.ndarray) -> list[str]:
    """The texts that are learnt from, one for each span of them."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_said.astype(int), [0]])))
    spans = edges.reshape(-1, 2)
    return [tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=False) for start, stop in spans]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "thinks"])
def test_tokens_are_those_of_the_whole_conversation(smol: Tokenizer, name: str):
    """Of templates that only append; what follows the last turn's end is no model's."""
    tokenizer = renders(smol, TEMPLATES[name])
    example = tokens_of(tokenizer).example(tuple(TALK[:2]), tuple(TALK[2:]), None)
    ours = [*example.prompt.tolist(), *example.response.tolist()]
    whole = tokenizer.encode(tokenizer.apply_chat_template(TALK, add_generation_prompt=False))
    assert ours == whole[: len(ours)]
    assert len(whole) - len(ours) <= 1
    assert example.response[-1] in tokenizer.stop_token_ids
    expected = [f"{message['content']}<|im_end|>" for message in TALK if message["role"] == "assistant"]
    assert said_in(tokenizer, example.response, example.is_said) == expected


def written(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def test_prompts_are_written_as_for_rl(tokenizer: Tokenizer, tmp_path: Path):
    """`data.prompt_template` is around what the user asks, in each form of a row, and without a chat template too."""
    asked = {"data__prompt_template": "Q: {question}", "data__system_prompt": "Be kind."}
    same = [{"messages": HI}, {"prompt": "Hi", "completion": "Ho"}, {"prompt": HI[:1], "completion": HI[1:]}]
    same += [{"messages": json.dumps(HI), "prompt": "ignored"}]
    found = read_demonstrations([written(tmp_path, same)], "f", config_of(**asked), tokens_of(tokenizer))
    examples = [found[i].examples[0] for i in range(len(same))]
    prompts = [tokenizer.decode(each.prompt.tolist()) for each in examples]
    assert prompts == ["system\nBe kind.\nuser\nQ: Hi\nassistant\n"] * 4
    assert {tokenizer.decode(each.response.tolist()) for each in examples} == {"Ho"}
    plain = config_of(**asked, data__apply_chat_template=False)
    (example,) = read_demonstrations([written(tmp_path, same[1:2])], "f", plain, tokens_of(tokenizer))[0].examples
    assert tokenizer.decode(example.prompt.tolist()) == "Be kind.\n\nQ: Hi"


def test_fields_of_other_rows_do_not_come_into_a_call(tokenizer: Tokenizer, tmp_path: Path):
    """Parquet has one type for all rows: where one was written without a field, it has null there."""
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    )
    calls = [{"arguments": {"a": 1}}, {"arguments": {"b": None, "c": [{"d": "e"}, {"f": 2}]}}]
    talks = [[HI[0], {"role": "assistant", "content": None, "tool_calls": [call]}] for call in calls]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": talk} for talk in talks]), tmp_path / "rows.parquet")
    tokens = tokens_of(renders(tokenizer, template))
    found = read_demonstrations([str(tmp_path / "rows.parquet")], "f", config_of(), tokens)
    said = [json.loads(tokenizer.decode(found[i].examples[0].response.tolist())) for i in range(2)]
    assert said == [calls[:1], [{"arguments": {"c": [{"d": "e"}, {"f": 2}]}}]]


def test_long_rows_are_left_out_and_counted(tokenizer: Tokenizer, tmp_path: Path):
    rows = [{"prompt": "a", "completion": "b" * size} for size in (1, 400, 2)]
    found = read_demonstrations([written(tmp_path, rows)], "data.train_files", config_of(), tokens_of(tokenizer))
    assert (len(found), found.num_filtered) == (2, 1)
    with pytest.raises(ValueError, match=r"data.train_files: no rows to learn from: all 1 are longer"):
        read_demonstrations([written(tmp_path, rows[1:2])], "data.train_files", config_of(), tokens_of(tokenizer))


def test_the_order_of_rows_goes_on_where_it_was(tokenizer: Tokenizer, tmp_path: Path):
    rows = [{"prompt": "a", "completion": "b" * (1 + i)} for i in range(7)]

    def source(**options: Any) -> RowSource:
        config = config_of(**options)
        return RowSource(read_demonstrations([written(tmp_path, rows)], "f", config, tokens_of(tokenizer)), config)

    whole, first = source(), source()
    lengths = [len(row.examples[0]) for _, row in whole.next(21)]
    assert [sorted(lengths[i : i + 7]) for i in (0, 7, 14)] == [sorted(lengths[:7])] * 3
    assert lengths[:7] != lengths[7:14], "another order in each epoch"
    again = [len(row.examples[0]) for _, row in first.next(5)]
    second = source()
    second.load_state(first.state())
    assert again + [len(row.examples[0]) for _, row in second.next(16)] == lengths
    assert (second.epoch, second.position) == (2, 21)
    with pytest.raises(ValueError, match=re.escape("data.seed or data.shuffle have changed")):
        source(data__seed=3).load_state(first.state())
    assert [len(row.examples[0]) for _, row in source(data__shuffle=False).next(7)] == sorted(lengths[:7])
