"""Bad inputs of the class "data": tokenizers, chat templates, and models that these do not fit.

`test_data.py` has data files and tasks. Each is refused before weights load, with one sentence that names the file.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from refusals import Refusal
from tiny import CHAT_TEMPLATE, write_tiny_model

Change = Callable[[Path], object]

LENGTHS = ("data.max_prompt_length=64", "data.max_response_length=16")
OWN = ("eval", "model.path=random:{tmp}/model", *LENGTHS, "data.val_files=[{tmp}/a.jsonl]")
GENERATE = ("generate", "--model", "random:{tmp}/model", "--max-tokens", "4", "2 + 2")
FILE = "{tmp}/a.jsonl"
MODEL = "{tmp}/model"


def model(change: Change = lambda folder: None, **config: Any) -> Callable[[Path], None]:
    """A tiny model of the test's own, with entries of config.json, and what is done to its folder."""

    def prepare(folder: Path) -> None:
        (folder / "a.jsonl").write_text('{"question": "1 + 1", "answer": "2"}')
        change(write_tiny_model(folder / "model", **config))

    return prepare


def entry(name: str, **entries: Any) -> Change:
    """Sets entries of a JSON file of a model's folder."""

    def change(folder: Path) -> None:
        file = folder / name
        found = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(found | entries))

    return change


def text(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def added_tokens(folder: Path) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    like = found["added_tokens"][-1]
    found["added_tokens"] += [{**like, "id": 260 + i, "content": f"<extra_{i}>"} for i in range(3)]
    (folder / "tokenizer.json").write_text(json.dumps(found))


def own(sentence: str, prepare: Callable[[Path], None], *options: str) -> Refusal:
    return Refusal((*OWN, *options), sentence, prepare)


def template(source: str, said: str, where: str = "") -> Refusal:
    sentence = f"{where}{MODEL}/chat_template.jinja: the chat template {said}"
    return own(sentence, model(text("chat_template.jinja", source)))


TOKENIZERS = [
    own(
        f"{MODEL}: holds no tokenizer.json, which is the one tokenizer format that is read",
        model(lambda folder: (folder / "tokenizer.json").unlink()),
    ),
    own(
        f"{MODEL}: holds no tokenizer.json, which is the one tokenizer format that is read (tokenizer.model: load it "
        "with transformers' AutoTokenizer and save it)",
        model(lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model")),
    ),
    own(
        f"{MODEL}/tokenizer.json: not a tokenizer of the tokenizers library (EOF while parsing a string at line 1 "
        "column 23)",
        model(lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0", "mod')),
    ),
    own(f"{MODEL}/tokenizer.json: not UTF-8 text (byte 0)", model(text("tokenizer.json", b"\xff\xfe{}"))),
    own(
        f"{MODEL}/tokenizer_config.json: not valid JSON (Expecting property name enclosed in double quotes, column 2)",
        model(text("tokenizer_config.json", "{'eos_token': 1}")),
    ),
    own(
        f"{MODEL}/special_tokens_map.json: must be a file, found a pipe",
        model(lambda folder: os.mkfifo(folder / "special_tokens_map.json")),
    ),
    own(
        f"{MODEL}/special_tokens_map.json: must hold a JSON object, found int",
        model(text("special_tokens_map.json", "7")),
    ),
    own(
        f"{MODEL}/tokenizer_config.json: eos_token must be text or an object with text in 'content', found "
        f"{{'special': True}}",
        model(entry("tokenizer_config.json", eos_token={"special": True})),
    ),
    own(
        f"{MODEL}: eos_token '</s>' is not in the vocabulary of tokenizer.json",
        model(entry("tokenizer_config.json", eos_token="</s>")),
    ),
    own(
        f"{MODEL}: the tokenizer's '<extra_2>' has the id 262, but the model's vocabulary has 260 tokens (ids up to "
        "259): the tokenizer is of another model, or tokens were added to it alone",
        model(added_tokens),
    ),
    own(f"{MODEL}/config.json: eos_token_id (2.0) must be a token id or a list of token ids", model(eos_token_id=2.0)),
    own(
        f"{MODEL}/config.json: eos_token_id ([[2]]) must be a token id or a list of token ids",
        model(eos_token_id=[[2]]),
    ),
    own(
        f"{MODEL}/config.json: eos_token_id ([2, 260]) must be within the vocabulary: from 0 to 259",
        model(eos_token_id=[2, 260]),
    ),
    own(
        f"{MODEL}/generation_config.json: eos_token_id (999) must be within the vocabulary: from 0 to 259",
        model(entry("generation_config.json", eos_token_id=999)),
    ),
    own(
        f"{MODEL}/config.json: bos_token_id (True) must be a token id or a list of token ids", model(bos_token_id=True)
    ),
    own(
        "data.max_prompt_length (64) + data.max_response_length (16) = 80 tokens, but {tmp}/model was made for at "
        "most 79 (max_position_embeddings, with rope scaling where there is any): ask for less, or give the model's "
        "config.json a rope scaling",
        model(max_position_embeddings=79),
    ),
    Refusal(
        GENERATE,
        "the longest prompt (24) + --max-tokens (4) = 28 tokens, but {tmp}/model was made for at most 16 "
        "(max_position_embeddings, with rope scaling where there is any): ask for less, or give the model's "
        "config.json a rope scaling",
        model(max_position_embeddings=16),
    ),
    own("rollout.stop: a stop string must be text and not empty, found ''", model(), "rollout.stop=['']"),
    own(
        "rollout.stop: a stop string must have at most 1000 characters, found 2000",
        model(),
        f"rollout.stop=[{'x' * 2000}]",
    ),
]

TEMPLATES = [
    own(
        f"{MODEL}/tokenizer_config.json: chat_template must be text or a list of named templates, found 7",
        model(entry("tokenizer_config.json", chat_template=7)),
    ),
    own(
        f"{MODEL}/tokenizer_config.json: chat_template must be text or a list of objects with text in 'name' and "
        f"'template', found {{'name': 'default'}}",
        model(entry("tokenizer_config.json", chat_template=[{"name": "default"}])),
    ),
    own(
        f"{MODEL}: has no chat template; give prompts as text (data.apply_chat_template=false)",
        model(lambda folder: (folder / "chat_template.jinja").unlink()),
    ),
    template(
        CHAT_TEMPLATE.removesuffix("{% endif %}"),
        "is no jinja template (line 4: Unexpected end of template. Jinja was looking for the following tags: 'elif' or "
        "'else' or 'endif'. The innermost block that needs to be closed is 'if'.)",
    ),
    template("{{ messages | joined }}", "is no jinja template (line 1: No filter named 'joined'.)"),
    template("{{ raise_exception('no users') }}", "refuses these messages: no users", f"{FILE}, line 1: "),
    template(
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "fails with these messages: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).",
        f"{FILE}, line 1: ",
    ),
    Refusal(
        GENERATE,
        f"{MODEL}/chat_template.jinja: the chat template refuses these messages: no",
        model(text("chat_template.jinja", "{{ raise_exception('no') }}")),
    ),
]


def test_refused(refused: Callable[[Iterable[Refusal]], None]):
    refused([*TOKENIZERS, *TEMPLATES])
