"""Text to token ids and back, and chat templates, on the `tokenizers` library and jinja2 (no transformers at run
time)."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Encoding

from jaxrl.data.chat_template import DEFAULT, ChatTemplate, RefusedMessages, choose, render, variables_of
from jaxrl.data.tokenizer_files import ADDITIONAL_TEMPLATES, DEFAULT_TEMPLATE, TokenizerFiles, read_folder

_HARMONY = ("<|return|>", "<|call|>")
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Special tokens that end a turn or a text in some family. In harmony `<|end|>` ends a message, `_HARMONY` a turn."""

JOINT = "\ufdd0"
"""A character that Unicode leaves to programs. No token reaches across it, and it becomes no token itself."""

_OWN_VARIABLES = {"messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}

_NOT_GIVEN = {"tools": None, "documents": None}


class Tokenizer:
    """A byte-level tokenizer with its special tokens and chat template. Can be pickled. `eos_token_ids` end a response:
    the eos token and what generation_config.json adds."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._fast, self._config, self._name = files.fast, files.config, files.name
        self.special_tokens = files.special_tokens
        self.chat_templates = files.chat_templates
        self.special_tokens_in_content: Literal["text", "tokens"] = "text"
        eos = [self._id("eos_token"), *files.eos_token_ids]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in eos if i is not None))

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        path = Path(path)
        if path.suffix == ".gguf":
            from jaxrl.data.tokenizer_gguf import read_gguf

            return cls(read_gguf(path))
        if path.is_dir():
            return cls(read_folder(path))
        raise ValueError(f"{path}: a tokenizer must be a Hugging Face folder or a .gguf file")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids; special tokens written in the text become their ids, but for those that `as_text` has marked. An
        end that the tokenizer adds to a text is left out. Raises ValueError for half characters."""
        first, *rest = _whole(text).split(JOINT)
        ids = self._open(self._fast.encode(first, add_special_tokens=add_special_tokens))
        return ids + [i for part in rest for i in self._fast.encode(part, add_special_tokens=False).ids]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        found = self._fast.encode_batch_fast(list(map(_whole, texts)), add_special_tokens=add_special_tokens)
        return [
            self.encode(text, add_special_tokens) if JOINT in text else self._open(each)
            for text, each in zip(texts, found, strict=True)
        ]

    def _open(self, found: Encoding) -> list[int]:
        ids = found.ids
        while len(ids) > 1 and ids[-1] in self.eos_token_ids and found.special_tokens_mask[len(ids) - 1]:
            ids.pop()
        return ids

    def as_text(self, text: str) -> str:
        """The text with a mark in each special token that it spells, so that `encode` makes tokens of its letters."""
        return self._spelled.sub(rf"\1{JOINT}", text)

    def as_content(self, text: str) -> str:
        """The text as a message of a user, a tool or the system contains it."""
        return self.as_text(text) if self.special_tokens_in_content == "text" else text

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        """Matches the first character of each special token in a text, also of one that begins inside another."""
        names = "|".join(map(re.escape, sorted(filter(None, self.special_texts)))) or "(?!)"
        return re.compile(f"(?={names})(.)", re.DOTALL)

    @property
    def vocabulary(self) -> dict[str, int]:
        return self._fast.get_vocab()

    @cached_property
    def longest_token(self) -> int:
        """The most characters of text in one token."""
        return max(map(len, self._fast.get_vocab()))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become replacement characters."""
        return self._fast.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.decode([i], skip_special_tokens=False) for i in ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The rendered conversation, with the marks of `as_text` in everything that the assistant does not say.
        `chat_template`: the name of one of `chat_templates`; None: as `jaxrl.data.chat_template.choose` decides.

        Raises ValueError if it reads no such variable (`tools`, `enable_thinking` ...); RefusedMessages if it refuses
        these messages, or they involve tools and the model speaks harmony.
        """
        template = self._template(variables, chat_template)
        has_tools = variables.get("tools") or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        if has_tools and self.speaks_harmony:
            raise RefusedMessages(f"{template.place}: gpt-oss's format (harmony) is read in plain chats, without tools")
        messages = [
            {**message, "content": self.as_content(content)}
            if message["role"] != "assistant" and isinstance(content := message.get("content"), str)
            else message
            for message in messages
        ]
        context = {**_NOT_GIVEN, **self.special_tokens, **variables}
        context = {**context, "add_generation_prompt": add_generation_prompt}
        return render(template.source, template.place, messages, context)

    def check_template_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raises the ValueErrors of `apply_chat_template` that do not depend on messages; none if there is no
        template and none is named."""
        if self.chat_templates or "chat_template" in arguments:
            variables = dict(arguments)
            self._template(variables, variables.pop("chat_template", None))

    def _template(self, variables: Mapping[str, Any], name: str | None) -> ChatTemplate:
        """The template for these variables. Raises ValueError if there is none, and for a variable that it does not
        read."""
        has_tools = variables.get("tools") is not None
        template = choose(self.chat_templates, self._name, name, has_tools=has_tools)
        if variables:
            known = variables_of(template.source, template.place) - _OWN_VARIABLES
            for variable, value in variables.items():
                if variable not in known and not (value is None and variable in _NOT_GIVEN):
                    near = difflib.get_close_matches(variable, sorted(known), n=1)
                    hint = f", but {near[0]!r}" if near else ""
                    raise ValueError(f"{template.place}: the chat template reads no variable {variable!r}{hint}")
        return template

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """`eos_token_ids`, and all other tokens of the vocabulary that end a turn or a text."""
        ends = set(self.special_texts).intersection((*END_TOKENS, *_HARMONY) if self.speaks_harmony else END_TOKENS)
        found = map(self._fast.token_to_id, ends - {"<|end|>"} if self.speaks_harmony else ends)
        return tuple(dict.fromkeys([*self.eos_token_ids, *sorted(i for i in found if i is not None)]))

    @property
    def speaks_harmony(self) -> bool:
        """Whether the vocabulary is that of gpt-oss's format, whose turns are several messages."""
        return set(_HARMONY) <= set(self.special_texts)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        return tuple(token.content for token in self._fast.get_added_tokens_decoder().values() if token.special)

    @property
    def bos_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def pad_id(self) -> int:
        """The id that pads rows: the pad token, else the first eos, else 0."""
        pad = self._id("pad_token")
        return pad if pad is not None else (*self.eos_token_ids, 0)[0]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id (the model's vocabulary may be padded beyond it)."""
        return self.last_token[1] + 1

    @property
    def last_token(self) -> tuple[str, int]:
        return max(self._fast.get_vocab(with_added_tokens=True).items(), key=lambda token: token[1])

    def save(self, folder: str | Path) -> list[Path]:
        """Writes tokenizer.json, tokenizer_config.json and the files of the chat templates; returns their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        self._fast.save(str(files[0]))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {**self._config, **self.special_tokens}
        config.pop("chat_template", None)
        files[1].write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for name, template in self.chat_templates.items():
            inside = DEFAULT_TEMPLATE if name == DEFAULT else f"{ADDITIONAL_TEMPLATES}/{name}.jinja"
            files.append(folder / inside)
            files[-1].parent.mkdir(exist_ok=True)
            files[-1].write_text(template.source, encoding="utf-8")
        return files

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._fast.token_to_id(token)


def _whole(text: str) -> str:
    """The text. Raises ValueError if it contains half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!r:.80} is no text: {text[error.start]!r} is half a character") from None
    return text
