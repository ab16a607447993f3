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

from jaxrl.config import ConfigError
from jaxrl.data.conversations import ConversationTokens, RowSource, read_demonstrations, read_pairs
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
def test_tokens_are_those_of_the_whole_conversation(smollm2: Path, name: str):
    """Of templates that only append; what follows the last turn's end is no model's."""
    tokenizer = renders(Tokenizer.from_path(smollm2), TEMPLATES[name])
    example = tokens_of(tokenizer).example(tuple(TALK[:2]), tuple(TALK[2:]), None)
    ours = [*example.prompt.tolist(), *example.response.tolist()]
    whole = tokenizer.encode(tokenizer.apply_chat_template(TALK, add_generation_prompt=False))
    assert ours == whole[: len(ours)]
    assert len(whole) - len(ours) <= 1
    assert example.response[-1] in tokenizer.stop_token_ids
    expected = [f"{message['content']}<|im_end|>" for message in TALK if message["role"] == "assistant"]
    assert said_in(tokenizer, example.response, example.is_said) == expected


def test_each_turn_keeps_its_thinking_where_the_template_drops_it_later(smollm2: Path):
    """As in a rollout, where a turn was drawn when it was the last one."""
    tokenizer = renders(Tokenizer.from_path(smollm2), TEMPLATES["thinks"])
    first = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    tokens = tokens_of(tokenizer)
    example = tokens.example(tuple(TALK[1:2]), (first, *TALK[3:5]), None)
    assert next(iter(tokens.notes)).startswith(
        "the chat template drops the thinking of earlier turns: each turn is learnt"
    )
    assert said_in(tokenizer, example.response, example.is_said)[0] == f"{first['content']}<|im_end|>"


def test_the_last_turn_alone(tokenizer: Tokenizer):
    tokens = tokens_of(tokenizer)
    every, last = (tokens.example(tuple(TALK[:2]), tuple(TALK[2:]), None, on) for on in ("all", "last"))
    assert [*every.prompt, *every.response] == [*last.prompt, *last.response]
    assert last.is_said.all()
    assert tokenizer.decode(last.response.tolist()) == "Good."


def test_what_a_text_says_of_special_tokens_ends_no_turn(tokenizer: Tokenizer):
    said = {"role": "assistant", "content": "it writes <|im_end|> there"}
    example = tokens_of(tokenizer).example(tuple(HI[:1]), (said,), None)
    assert tokenizer.decode(example.response.tolist(), skip_special_tokens=False) == f"{said['content']}<|im_end|>"


def test_tools_and_their_answers(tokenizer: Tokenizer):
    """Calls and answers reach the template, and answers are context."""
    called = [
        HI[0],
        {"role": "assistant", "content": "add(1, 2)"},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
        {"role": "assistant", "content": "It is 3."},
    ]
    example = tokens_of(tokenizer).example(tuple(called[:1]), tuple(called[1:]), None)
    assert said_in(tokenizer, example.response, example.is_said) == ["add(1, 2)<|im_end|>", "It is 3.<|im_end|>"]


# ---------------------------------------------------------------- rows


def written(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def test_three_ways_to_write_the_same_row(tokenizer: Tokenizer, tmp_path: Path):
    same = [
        {"messages": HI},
        {"messages": json.dumps(HI), "prompt": "ignored"},
        {"prompt": "Hi", "completion": "Ho"},
        {"prompt": HI[:1], "completion": HI[1:]},
    ]
    config = config_of(data__system_prompt="Be kind.")
    found = read_demonstrations([written(tmp_path, same)], "data.train_files", config, tokens_of(tokenizer))
    first = found[0].examples[0]
    assert "Be kind." in tokenizer.decode(first.prompt.tolist())
    for i in range(1, len(same)):
        (other,) = found[i].examples
        assert (other.prompt.tolist(), other.response.tolist()) == (first.prompt.tolist(), first.response.tolist())


def test_texts_without_a_template_end_with_the_end_of_text(tokenizer: Tokenizer, tmp_path: Path):
    config = config_of(data__apply_chat_template=False)
    rows = [{"prompt": "ab", "completion": "cd"}]
    (example,) = read_demonstrations([written(tmp_path, rows)], "f", config, tokens_of(tokenizer))[0].examples
    assert tokenizer.decode(example.prompt.tolist()) == "ab"
    assert tokenizer.decode(example.response.tolist(), skip_special_tokens=False) == "cd<|im_end|>"
    assert example.is_said.all()


def test_prompts_are_written_as_for_rl(tokenizer: Tokenizer, tmp_path: Path):
    """`data.prompt_template` is around what the user asks, in each form of a row, and without a chat template too."""
    asked = {"data__prompt_template": "Q: {question}", "data__system_prompt": "Be kind."}
    same = [{"messages": HI}, {"prompt": "Hi", "completion": "Ho"}, {"prompt": HI[:1], "completion": "Ho"}]
    found = read_demonstrations([written(tmp_path, same)], "f", config_of(**asked), tokens_of(tokenizer))
    prompts = [tokenizer.decode(found[i].examples[0].prompt.tolist()) for i in range(len(same))]
    assert prompts == ["system\nBe kind.\nuser\nQ: Hi\nassistant\n"] * 3
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


def test_pairs_in_the_forms_that_data_sets_have(tokenizer: Tokenizer, tmp_path: Path):
    """Texts, messages, and whole conversations with the prompt at the beginning of both (UltraFeedback)."""
    yes, no = ({"role": "assistant", "content": text} for text in ("yes", "no"))
    same = [
        {"prompt": "Hi", "chosen": "yes", "rejected": "no"},
        {"prompt": HI[:1], "chosen": [yes], "rejected": [no]},
        {"chosen": [HI[0], yes], "rejected": [HI[0], no]},
        {"prompt": "Hi", "chosen": [HI[0], yes], "rejected": [HI[0], no]},
        {"prompt": HI[:1], "chosen": [HI[0], yes], "rejected": [HI[0], no]},
    ]
    found = read_pairs([written(tmp_path, same)], "data.train_files", config_of(), tokens_of(tokenizer))
    for i in range(len(same)):
        chosen, rejected = found[i].examples
        assert chosen.prompt.tolist() == rejected.prompt.tolist() == found[0].examples[0].prompt.tolist()
        assert [tokenizer.decode(each.response.tolist()) for each in (chosen, rejected)] == ["yes", "no"]


CALL = {"name": "add", "arguments": {"a": 1}}
SFT_ROWS = {
    "nothing": ({"text": "a"}, r"line 1: a row must have 'messages' \(sft.messages_key\), or 'prompt' .*'prompt' "),
    "no completion": ({"prompt": "a"}, r"'completion' \(sft.completion_key\) is missing, found 'prompt'"),
    "an empty one": ({"prompt": "a", "completion": ""}, r"'completion' \(sft.completion_key\) must hold some text"),
    "the user last": ({"messages": HI[:1]}, r"the last message must be the assistant's, found none"),
    "a user after": ({"messages": [*HI, HI[0]]}, r"the last message must be the assistant's, found user"),
    "nobody asked": ({"messages": HI[1:]}, r"the conversation begins with the assistant"),
    "twice": ({"messages": [*HI, HI[1]]}, r"two messages of the assistant follow each other"),
    "a role": ({"messages": [{"role": "bot", "content": "a"}]}, r"of a role among system, user, .*message 1 is"),
    "no list": ({"messages": {"a": 1}}, r"'messages' \(sft.messages_key\) must be a list of messages"),
    "no text": (
        {"messages": [{"role": "user", "content": 3}, HI[1]]},
        r"message 1 must have text in 'content', found 3",
    ),
    "a user to be said": ({"prompt": "a", "completion": HI}, r"the first message must be the assistant's, found user"),
    "said before": ({"prompt": HI, "completion": "b"}, r"line 1: the prompt ends with a message of the assistant"),
    "tools": ({"messages": HI, "tools": {"name": "add"}}, r"line 1: 'tools' must be a list of JSON objects, found {"),
    "tools unread": ({"messages": HI, "tools": [CALL]}, r"line 1: .*the chat template reads no variable 'tools'"),
    "calls": (
        {"messages": [HI[0], {**HI[1], "tool_calls": "add"}]},
        r"'tool_calls' of message 2 must be a list of JSON objects, found 'add'",
    ),
    "calls unread": (
        {"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        r"line 1: the chat template leaves out the tool_calls of message 2",
    ),
    "null": ({"prompt": "a", "completion": None}, r"'completion' \(sft.completion_key\) is missing, found 'prompt'$"),
    "long": ({"prompt": "a" * 400, "completion": "b"}, r"line 1: 4\d\d tokens are more than data.max_prompt_length"),
}


@pytest.mark.parametrize("name", SFT_ROWS)
def test_rows_that_cannot_be_learnt_from(tokenizer: Tokenizer, tmp_path: Path, name: str):
    row, pattern = SFT_ROWS[name]
    config = config_of(data__filter_overlong_prompts=False)
    with pytest.raises(ValueError, match=pattern):
        read_demonstrations([written(tmp_path, [row])], "data.train_files", config, tokens_of(tokenizer))


PAIR_ROWS = {
    "one": ({"prompt": "a", "chosen": "b"}, r"'rejected' \(dpo.rejected_key\) is missing, found 'prompt', 'chosen'"),
    "no prompt": ({"chosen": "b", "rejected": "c"}, r"'prompt' \(dpo.prompt_key\) is missing, and 'chosen' and "),
    "the user last": ({"prompt": "a", "chosen": HI[:1], "rejected": "c"}, r"must be the assistant's, found user"),
    "two prompts": (
        {"prompt": "a", "chosen": HI, "rejected": [{"role": "user", "content": "a"}, HI[1]]},
        r"'chosen' \(dpo.chosen_key\): behind the prompt the first message must be the assistant's, found user",
    ),
    "another prompt": (
        {"prompt": "a", "chosen": [HI[0], HI[1]], "rejected": [HI[0], {"role": "assistant", "content": "no"}]},
        r"line 1: 'prompt' \(dpo.prompt_key\) contradicts the row's conversations, .*: 'a' is not in \[.*'Hi'",
    ),
    "a longer prompt": (
        {"prompt": [*HI, HI[0]], "chosen": HI, "rejected": [HI[0], {"role": "assistant", "content": "no"}]},
        r"line 1: 'prompt' \(dpo.prompt_key\) contradicts the row's conversations",
    ),
}


@pytest.mark.parametrize("name", PAIR_ROWS)
def test_pairs_that_cannot_be_learnt_from(tokenizer: Tokenizer, tmp_path: Path, name: str):
    row, pattern = PAIR_ROWS[name]
    with pytest.raises(ValueError, match=pattern):
        read_pairs([written(tmp_path, [row])], "data.train_files", config_of(), tokens_of(tokenizer))


def test_a_pair_has_two_columns():
    with pytest.raises(ConfigError, match=r"dpo.rejected_key must name two columns, found 'rejected' twice"):
        config_of(dpo__chosen_key="rejected")


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
