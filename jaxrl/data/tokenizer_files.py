"""A tokenizer's files in a Hugging Face folder: tokenizer.json, tokenizer_config.json and their kin.

Transformers accepts some of these entries in any form, or ignores unknown ones. Here an entry of another type than its
documentation says is refused with the file's name, and so is a special token that has no id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from jaxrl.config.inputs import read_object, reading
from jaxrl.data.chat_template import DEFAULT, ChatTemplate, check_template_name

DEFAULT_TEMPLATE, ADDITIONAL_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""The file of the default chat template, and the folder in which the others have files named after them."""
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as its files describe it."""

    fast: FastTokenizer  # encodes and decodes
    special_tokens: Mapping[str, str]  # the text of those in `SPECIAL` that the files name
    name: str  # the folder or file, for messages
    eos_token_ids: tuple[int, ...] = ()  # ids that end a response, beside the eos token's own
    chat_templates: Mapping[str, ChatTemplate] = field(default_factory=dict)  # by name
    config: Mapping[str, Any] = field(default_factory=dict)  # what tokenizer_config.json holds


def read_folder(folder: Path) -> TokenizerFiles:
    """The tokenizer of a Hugging Face folder. Raises ValueError that names the missing or damaged file."""
    fast = _fast(folder)
    config_file = folder / "tokenizer_config.json"
    config = _object(config_file)
    special = _special_tokens(folder, config)
    for name, token in special.items():
        if name != "unk_token" and fast.token_to_id(token) is None:  # no text becomes unk in a byte-level vocabulary
            raise ValueError(f"{folder}: {name} {token!r} is not in the vocabulary of tokenizer.json")
    listed = _templates_of_config(config.get("chat_template"), str(config_file))
    templates = _templates_of_files(folder) or listed
    eos: tuple[int, ...] = ()
    for file in (folder / "config.json", folder / "generation_config.json"):
        if (value := _object(file).get("eos_token_id")) is not None:
            eos = _token_ids(value, f"{file}: eos_token_id")
    return TokenizerFiles(fast, special, str(folder), eos, templates, config)


def _token_ids(value: Any, place: str) -> tuple[int, ...]:
    """The ids of `eos_token_id`: one, or a list. `place`: file and entry, for messages."""
    ids = tuple(value) if isinstance(value, list) else (value,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(f"{place} must be a token id, a list of them or null, found {value!r:.80}")
    return ids


def _fast(folder: Path) -> FastTokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        other = next((name for name in _OTHER_FORMATS if (folder / name).exists()), None)
        hint = "" if other is None else f" ({other}: load it with transformers' AutoTokenizer and save it)"
        raise ValueError(f"{folder}: holds no tokenizer.json, which is the one tokenizer format that is read{hint}")
    with reading(file):
        source = file.read_text(encoding="utf-8")
    try:
        fast = FastTokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: not a tokenizer of the tokenizers library ({error})") from None
    if not fast.get_vocab().keys() - {token.content for token in fast.get_added_tokens_decoder().values()}:
        raise ValueError(f"{file}: the vocabulary holds no tokens of text, so that no text has tokens")
    fast.no_padding()
    fast.no_truncation()
    return fast


def _object(file: Path) -> dict[str, Any]:
    return read_object(file) if file.exists() else {}


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    map_file = folder / "special_tokens_map.json"
    earlier = _object(map_file)
    special: dict[str, str] = {}
    for name in SPECIAL:
        file = folder / "tokenizer_config.json" if name in config else map_file
        token = config[name] if name in config else earlier.get(name)
        if token is None:
            continue
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str) or not text:
            raise ValueError(f"{file}: {name} must be text or an object with text in 'content', found {token!r:.80}")
        special[name] = text
    return special


def _templates_of_files(folder: Path) -> dict[str, ChatTemplate]:
    others = {file.stem: file for file in sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))}
    found: dict[str, ChatTemplate] = {}
    for name, file in {DEFAULT: folder / DEFAULT_TEMPLATE, **others}.items():
        if file.exists():
            with reading(file):
                found[name] = ChatTemplate(file.read_text(encoding="utf-8"), str(file))
    return found


def _templates_of_config(value: Any, file: str) -> dict[str, ChatTemplate]:
    """One template or a list of named ones; the last of a name counts, as in transformers."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: ChatTemplate(value, file)}
    if not isinstance(value, list):
        raise ValueError(f"{file}: chat_template must be text or a list of named templates, found {value!r:.80}")
    rule = f"{file}: chat_template must be text or a list of objects with text in 'name' and 'template'"
    for entry in value:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("name", "template")):
            raise ValueError(f"{rule}, found {entry!r:.80}")
        check_template_name(entry["name"], file)
    return {entry["name"]: ChatTemplate(entry["template"], file) for entry in value}
