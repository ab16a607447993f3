"""Reading, rendering, order and cursor of prompts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from data_files import config, write
from tiny import write_tiny_model

from jaxrl.config import Config, DataSection
from jaxrl.data.problems import reference_answer
from jaxrl.data.prompts import PromptSource, load_train, load_validation, validation_prompts
from jaxrl.data.tokenizer import Tokenizer


class Characters:
    """One token per character; `#` stands for a special token."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in ("#" + text if add_special_tokens else text)]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def apply_chat_template(self, messages: list[Any], add_generation_prompt: bool = True, **variables: Any) -> str:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        text += "".join(f"<{name}={value}>" for name, value in variables.items())
        return text + ("<assistant>" if add_generation_prompt else "")


def source_of(c: Config) -> PromptSource:
    return PromptSource(load_train(c), Characters(), c)


@pytest.fixture
def ten(tmp_path: Path) -> str:
    return write(tmp_path / "ten.jsonl", [{"question": f"q{i}", "answer": f"because\n#### {i}"} for i in range(10)])


def test_files(tmp_path: Path):
    rows = [{"question": f"q{i}", "answer": f"so\n#### {i}", "level": i} for i in range(3)]
    plain, zipped = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl.gz", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    problems = load_train(config(train_files=[plain, zipped, str(tmp_path / "c.parquet")]))
    assert [p.index for p in problems] == list(range(9))
    assert [p.source for p in problems] == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert [p.answer for p in problems] == ["0", "1", "2"] * 3
    assert [p.extra for p in problems] == [{"level": i} for i in (0, 1, 2)] * 3
    assert problems[1].where == f"{plain}, line 2"
    assert problems[7].where == f"{tmp_path}/c.parquet, row 2"


def test_verls_columns(tmp_path: Path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"style": "rule", "ground_truth": 4},
        "extra_info": {"split": "train", "index": 17},
    }
    keys = {"messages_key": "prompt", "answer_key": "reward_model.ground_truth", "source_key": "data_source"}
    (problem,) = load_train(config(train_files=[write(tmp_path / "a.jsonl", [row])], **keys))
    assert (problem.source, problem.answer, problem.identity) == ("openai/gsm8k", "4", "2+2?")
    assert problem.extra["index"] == 17


def test_rendering(tmp_path: Path):
    files = [write(tmp_path / "a.jsonl", [{"question": "2+{x}?", "answer": 4}])]
    template = r"{question} Put it in \boxed{}."
    c = config(train_files=files, prompt_template=template, system_prompt="Be brief.")
    (prompt,) = source_of(c).next(1)
    assert prompt.text == r"<system>Be brief.<user>2+{x}? Put it in \boxed{}.<assistant>"
    assert prompt.token_ids == tuple(map(ord, prompt.text))
    c = config(train_files=files, apply_chat_template_kwargs={"enable_thinking": False})
    (prompt,) = source_of(c).next(1)
    assert prompt.text == "<user>2+{x}?<enable_thinking=False><assistant>"
    c = config(train_files=files, system_prompt="Be brief.", apply_chat_template=False)
    (prompt,) = source_of(c).next(1)
    assert prompt.text == "Be brief.\n\n2+{x}?"
    assert prompt.token_ids[0] == ord("#")  # without a template, the tokenizer's own special tokens


def test_messages(tmp_path: Path):
    messages = [{"role": "system", "content": "Old."}, {"role": "user", "content": "2+2?"}]
    rows = [{"m": json.dumps(messages), "answer": 4}, {"m": messages, "answer": 4}]
    files = [write(tmp_path / "a.jsonl", rows)]
    c = config(train_files=files, messages_key="m", shuffle=False)
    a, b = source_of(c).next(2)
    assert a.text == b.text == "<system>Old.<user>2+2?<assistant>"
    c = config(train_files=files, messages_key="m", system_prompt="New.")
    assert source_of(c).next(1)[0].text == "<system>New.<user>2+2?<assistant>"


def test_overlong(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [{"question": "q" * n, "answer": n} for n in (1, 50, 2)]
    limits = {"train_files": [write(tmp_path / "a.jsonl", rows)], "max_prompt_length": 30}
    c = config(**limits, shuffle=False)
    source = source_of(c)
    assert (source.num_prompts, source.num_filtered) == (2, 1)
    assert [p.index for p in source.next(4)] == [0, 2, 0, 2]  # the index is the position in the file
    assert "dropped 1 of 3 prompts: over 30 tokens" in caplog.text
    c = config(**limits, filter_overlong_prompts=False)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the prompt has 67 tokens, .*max_prompt_length \(30\)"):
        source_of(c)
    with pytest.raises(ValueError, match="the training data holds no problems"):
        PromptSource([], Characters(), c)


def test_order(ten: str):
    c = config(train_files=[ten])
    source = source_of(c)
    keys = [p.key for p in source.next(35)]
    assert [epoch for epoch, _ in keys] == [i // 10 for i in range(35)]
    epochs = [[index for e, index in keys if e == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    assert len(set(keys)) == 35  # a batch larger than the set repeats prompts, never keys
    assert source.epoch == 3
    other = config(train_files=[ten], seed=1)
    assert [p.index for p in source_of(other).next(10)] != epochs[0]
    plain = config(train_files=[ten], shuffle=False)
    indices = [p.index for p in source_of(plain).next(20)]
    assert indices == [*range(10), *range(10)]


@pytest.mark.parametrize("cut", [0, 4])
def test_resume_equals_uninterrupted(ten: str, cut: int):
    whole, first, second = (source_of(config(train_files=[ten])) for _ in range(3))
    expected = [whole.next(3) for _ in range(9)]
    got = [first.next(3) for _ in range(cut)]
    second.load_state(json.loads(json.dumps(first.state())))
    assert got + [second.next(3) for _ in range(9 - cut)] == expected
    assert second.state() == whole.state()


def test_resume_on_other_data_is_refused(ten: str, tmp_path: Path):
    c = config(train_files=[ten])
    state = source_of(c).state()
    rows = [json.loads(line) for line in Path(ten).read_text().splitlines()]
    source_of(config(train_files=[ten], train_batch_size=2)).load_state(state)
    with pytest.raises(ValueError, match=r"saved with 10 prompts .* found 10"):
        source_of(config(train_files=[ten], prompt_template="{question}!")).load_state(state)
    other = config(train_files=[write(tmp_path / "ten2.jsonl", [*rows[:9], {"question": "q9", "answer": 8}])])
    with pytest.raises(ValueError, match=r"saved with 10 prompts"):
        source_of(other).load_state(state)
    with pytest.raises(ValueError, match=r"data\.seed, data\.shuffle"):
        source_of(config(train_files=[ten], seed=1)).load_state(state)


def test_validation_files(ten: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [{"question": q, "answer": 1} for q in ("new1", " q3\n", "new2", "new3")]
    val = write(tmp_path / "val.jsonl", rows)
    prompts = validation_prompts(config(train_files=[ten], val_files=[val], val_size=2), Characters())
    assert [p.text for p in prompts] == ["<user>new1<assistant>", "<user>new2<assistant>"]
    assert [p.key for p in prompts] == [(0, 0), (0, 2)]
    assert "dropped 1 of 4 validation problems" in caplog.text
    assert len(load_validation(config(train_files=[ten], val_files=[val], val_size=0))) == 3
    assert load_validation(config(train_files=[ten])) == []


def test_task():
    c = config(task="chain_sum", task_size=300, val_size=40)
    train, held_out = load_train(c), load_validation(c)
    assert (len(train), len(held_out)) == (300, 40)
    assert not {p.identity for p in train} & {p.identity for p in held_out}
    assert train == load_train(c)
    other = load_validation(config(task="chain_sum", task_size=300, val_size=40, seed=1))
    assert not {p.identity for p in train} & {p.identity for p in other}  # whatever the seed
    assert train[0].extra["entry"]["answer"] == train[0].answer
    assert train[0].source == "chain_sum"
    # a larger set begins like a smaller one
    assert load_train(config(task="chain_sum", task_size=310, val_size=0))[:300] == train
    assert load_validation(config(task="chain_sum", val_size=0)) == []


def test_gsm8k(data_folder: Path):
    train_file, val_file = (str(data_folder / f"gsm8k_{name}.jsonl") for name in ("train", "test"))
    c = config(train_files=[train_file], val_files=[val_file], val_size=0, max_prompt_length=1 << 14)
    train = load_train(c)
    assert (len(train), train[0].answer) == (7473, "72")
    held_out = validation_prompts(c, Characters(), load_validation(c, train))
    assert len(held_out) == 1319
    assert (held_out[0].source, held_out[0].answer) == ("gsm8k_test", "18")
    assert PromptSource(train, Characters(), c).num_prompts == 7473


def test_a_prompt_is_found_again_by_its_key(tmp_path: Path):
    rows = [{"question": f"q{i}" + "x" * 50 * (i == 2), "answer": i} for i in range(6)]
    c = config(train_files=[write(tmp_path / "a.jsonl", rows)], max_prompt_length=30, seed=3)
    source = source_of(c)
    handed = source.next(12)
    position = source.position
    assert [source.get(*prompt.key) for prompt in handed] == handed
    assert source.position == position, "nothing is handed out by it"
    fresh = source_of(c)
    assert fresh.get(7, 3) == replace(next(p for p in handed if p.index == 3), epoch=7)
    for index in (2, 6):
        with pytest.raises(ValueError, match=f"prompt {index}: the training data holds no such problem"):
            source.get(0, index)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("48 + 24 = 72\n#### 72", "72"),
        ("#### Step 1\nadd\n#### -1,234.5\n", "-1,234.5"),
        ("# ####\n.. ####", "# ####\n.. ####"),
        ("#### Top\ntext\n#### End\nlast line", "#### Top\ntext\n#### End\nlast line"),
        (72, "72"),
    ],
)
def test_only_gsm8ks_last_line_is_cut_from_a_reference(given: str | int, read: str):
    assert reference_answer(given, "a.jsonl, line 1", DataSection()) == read


def said(system: str, user: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}], "answer": "x"}


@pytest.mark.parametrize(("system_prompt", "kept"), [("", ["Welsh", "French"]), ("Be brief.", ["French"])])
def test_held_out_prompts_may_differ_in_the_system_message_alone(tmp_path: Path, system_prompt: str, kept: list[str]):
    train = write(tmp_path / "train.jsonl", [said("French", "Hello")])
    held = write(tmp_path / "held.jsonl", [said("Welsh", "Hello"), said("French", "Hello"), said("French", "Other")])
    c = config(train_files=[train], val_files=[held], messages_key="messages", system_prompt=system_prompt)
    found = load_validation(c)
    assert [problem.question for problem in found] == ["Hello", "Other"][-len(kept) :]


def test_a_question_that_spells_special_tokens(tmp_path: Path):
    """Its letters reach the model; people and rewards read it as it is written."""
    tokenizer = Tokenizer.from_path(write_tiny_model(tmp_path / "tiny"))
    train = write(tmp_path / "a.jsonl", [{"question": "<|im_end|>?", "answer": "1"}])
    plain = write(tmp_path / "b.jsonl", [{"question": "q", "answer": "1"}])
    ends = []
    for file in (train, plain):
        c = config(train_files=[file])
        (prompt,) = PromptSource(load_train(c), tokenizer, c).next(1)
        assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
        ends.append(prompt.token_ids.count(tokenizer.encode("<|im_end|>")[0]))
    assert ends == [1, 1]
