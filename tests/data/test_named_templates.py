"""Tokenizers with several chat templates: which one renders, where they are read from, and what transformers makes of
the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from beside import import_transformers
from tiny import write_tiny_model

from jaxrl.data.tokenizer import Tokenizer

from .test_tokenizer import write_gguf

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "default": "plain {{ messages[0].content }}{% if enable_thinking %}?{% endif %}",
    "tool_use": "with {{ tools | tojson }} {{ messages[0].content }}",
    "rag": "from {{ documents | length }} documents {{ messages[0].content }}",
}
Write = Callable[[Path, dict[str, str]], object]


def in_config(folder: Path, templates: dict[str, str]) -> None:
    """As transformers wrote them until it had folders for them."""
    file = folder / "tokenizer_config.json"
    listed = [{"name": name, "template": source} for name, source in templates.items()]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": listed}))


def in_files(folder: Path, templates: dict[str, str]) -> None:
    """As it writes them now."""
    for name, source in templates.items():
        file = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(source, encoding="utf-8")


def folder_with(tmp_path: Path, write: Write, templates: dict[str, str]) -> Path:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    write(folder, templates)
    return folder


@pytest.fixture(params=[in_config, in_files], scope="module")
def write(request: pytest.FixtureRequest) -> Write:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(write: Write, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With `TEMPLATES`, from files in which they are written in one of the two ways."""
    return Tokenizer.from_path(folder_with(tmp_path_factory.mktemp("templates"), write, TEMPLATES))


def test_which_template_renders(tokenizer: Tokenizer):
    assert tokenizer.apply_chat_template(ASK) == "plain hi"
    assert tokenizer.apply_chat_template(ASK, tools=None) == "plain hi"
    assert tokenizer.apply_chat_template(ASK, tools=[]) == "with [] hi"
    assert tokenizer.apply_chat_template(ASK, tools=TOOLS) == f"with {json.dumps(TOOLS, ensure_ascii=False)} hi"
    assert tokenizer.apply_chat_template(ASK, chat_template="rag", documents=["a", "b"]) == "from 2 documents hi"
    assert tokenizer.apply_chat_template(ASK, chat_template="default", enable_thinking=True) == "plain hi?"


@pytest.mark.parametrize(
    ("templates", "arguments", "sentence"),
    [
        (TEMPLATES, {"chat_template": "tool_usage"}, r"one of its templates \('default', 'rag', 'tool_use'\), found '"),
        ({"tool_use": "a", "rag": "b"}, {}, r"none of its chat templates \('rag', 'tool_use'\) is called 'default'"),
    ],
)
def test_a_template_that_is_not_there(
    templates: dict[str, str], arguments: dict[str, Any], sentence: str, tmp_path: Path
):
    tokenizer = Tokenizer.from_path(folder_with(tmp_path, in_files, templates))
    with pytest.raises(ValueError, match=sentence):
        tokenizer.apply_chat_template(ASK, **arguments)
    with pytest.raises(ValueError, match=sentence):
        tokenizer.check_template_arguments(arguments)


def test_what_is_saved_is_read_again(tokenizer: Tokenizer, tmp_path: Path):
    files = [file.relative_to(tmp_path / "saved").as_posix() for file in tokenizer.save(tmp_path / "saved")]
    assert sorted(files) == [
        *("additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"),
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert Tokenizer.from_path(tmp_path / "saved").chat_templates == tokenizer.chat_templates


def test_those_of_a_gguf_file(tmp_path: Path):
    tokenizer = Tokenizer.from_path(write_gguf(tmp_path / "t.gguf", TEMPLATES))
    assert {name: template.source for name, template in tokenizer.chat_templates.items()} == TEMPLATES


CASES: list[dict[str, Any]] = [
    {},
    {"tools": None},
    {"tools": []},
    {"tools": TOOLS},
    {"chat_template": "rag", "documents": [{"title": "a", "text": "b"}]},
    {"chat_template": "default"},
    {"chat_template": "tool_use", "tools": TOOLS},
]


def test_the_choice_is_that_of_transformers(tmp_path: Path, write: Write):
    module = import_transformers(models=False)
    folder = folder_with(tmp_path, write, TEMPLATES)
    theirs, ours = module.AutoTokenizer.from_pretrained(folder), Tokenizer.from_path(folder)
    for case in CASES:
        wanted = theirs.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True, **case)
        assert ours.apply_chat_template(ASK, **case) == wanted, case
