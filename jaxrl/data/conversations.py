"""Rows with an assistant's turns -> tokens to learn from: conversations, and pairs of which one was preferred.

A conversation is tokenised as in a rollout. The prompt comes first, with the beginning of the first turn. Then the
assistant's text, up to the token that ends its turn, alternates with the glue before the next turn
(`jaxrl.data.turns`). A template that rewrites earlier turns (Qwen3's drops their thinking) renders each turn as the
last one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from typing import Any, Literal

import numpy as np

from jaxrl.config import Config
from jaxrl.config.inputs import reading, strict_json
from jaxrl.data.chat_template import THINKING, RefusedMessages
from jaxrl.data.files import data_files, rows
from jaxrl.data.problems import asked_messages, refuse_media
from jaxrl.data.prompts import nth
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.turns import Between
from jaxrl.schema.declared import shown

_log = logging.getLogger(__name__)
_ROLES = ("system", "user", "assistant", "tool")
_CALLS = "tool_calls"
_THOUGHT = THINKING[0]
_PASSED_ON = ("name", _CALLS, "tool_call_id")
_MASKS: dict[str, bool] = dict.fromkeys(("weight", "train", "training", "trainable", "loss", "loss_mask"), True)
_MASKS |= {"mask": False, "masked": False}
"""Fields of messages by which data sets say whether a turn is learnt, and the value with which it is."""
_UNSUPPORTED = ("function_call", "tool_responses", "train_detail", "training_detail")  # lost in silence otherwise
TOOLS = "tools"
"""Column of what the assistant may call, as chat templates take it."""

_NEVER_STOPS = (
    "nothing teaches the model to stop: add one to eos_token_id in generation_config.json, or use rollout.stop"
)

Messages = tuple[Mapping[str, Any], ...]
Turns = Literal["all", "last"]


@dataclass(frozen=True, slots=True)
class Example:
    """A context and what follows it."""

    prompt: np.ndarray  # int32 [P], up to the first turn, or to the last one that is learnt
    response: np.ndarray  # int32 [T], all that follows
    is_said: np.ndarray  # bool [T], the assistant's tokens that are learnt

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class ExampleRow:
    """A row of the data. `examples`: one conversation, or of a pair the preferred one and the other."""

    where: str
    examples: tuple[Example, ...]


class ConversationTokens:
    """Conversations as tokens. `stops`: token ids that end a turn. `notes`: what a user should know of how turns were
    written, as sentences, each once."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[int], config: Config) -> None:
        self._tokenizer, self._stops, self._data = tokenizer, frozenset(stops), config.data
        self._between = lru_cache(maxsize=64)(self._made_between)
        self.notes: dict[str, None] = {}

    def example(self, context: Messages, said: Messages, tools: Any, train_on: Turns = "all") -> Example:
        """The conversation as a context and what follows it. With `train_on` `last` all turns but the last are part of
        the prompt. Raises RefusedMessages if the chat template refuses these messages."""
        spans = list(self._spans(context, said, tools))
        if not any(is_said for _, is_said in spans):
            raise RefusedMessages("the data masks every turn of the assistant, so there is nothing to learn")
        first = max(i for i, (_, is_said) in enumerate(spans) if is_said) if train_on == "last" else 1
        before, after = spans[:first], spans[first:]
        return _example([i for ids, _ in before for i in ids], after)

    def plain(self, prompt: str, completion: str) -> Example:
        """Two texts without a template; the end of the text is learnt as well."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=True)
        said = [*self._tokenizer.encode(completion), *self._tokenizer.eos_token_ids[:1]]
        if not self._tokenizer.eos_token_ids:
            self.notes[f"the tokenizer names no eos_token: {_NEVER_STOPS}"] = None
        return _example(ids, [(said, True)])

    def _spans(self, context: Messages, said: Messages, tools: Any) -> Iterator[tuple[list[int], bool]]:
        """Consecutive tokens, and whether they are learnt, a turn's together with its end."""
        messages, asked = (*context, *said), len(context)
        between = self._between(json.dumps(tools) if tools else "")
        whole = self._tokenizer.encode(self._rendered(context, tools, begins=True))
        yield [*whole], False
        while asked < len(messages):
            is_learnt = messages[asked].get("weight") != 0
            turn, answer = self._turn(messages[: asked + 1], tools, between.end), list[int]()
            answers = tuple(takewhile(lambda message: message["role"] != "assistant", messages[asked + 1 :]))
            asked += 1 + len(answers)
            if asked < len(messages):
                answer = [*between.answer(answers)]
                if answer and {turn[-1], answer[0]} <= self._stops:  # the last turn of all ends otherwise (OLMo 3)
                    turn[-1] = answer.pop(0)
                else:
                    answer = [*between.answer(answers, turn)]
            yield turn, is_learnt
            if answer:
                yield answer, False
            whole += [*turn, *answer]
        at_once = self._tokenizer.encode(self._rendered(messages, tools, begins=False)) if len(said) > 1 else whole
        if not self._text(at_once).startswith(self._text(whole)):
            rewritten = between.rewritten() or "the chat template writes earlier turns otherwise than the last one"
            self.notes[f"{rewritten}: each turn is learnt behind those before it as they were said"] = None

    def _turn(self, messages: Messages, tools: Any, end: str) -> list[int]:
        """The tokens of the last message, up to the one that ends it, or up to the white space that `end` closes
        with."""
        before, after = self._around(messages, tools)
        if not after.startswith(before):  # a system message may have moved to another question (Mistral's of 2024)
            messages = tuple(message for message in messages if message["role"] != "system")
            before, after = self._around(messages, tools)
        if not after.startswith(before):
            raise RefusedMessages(
                f"the chat template writes message {len(messages)} otherwise than it begins a turn, so no turn could "
                "become it"
            )
        ids = self._tokenizer.encode(after[len(before) :])
        ends = [place for place, i in enumerate(ids) if i in self._stops]
        while len(ends) > 1 and not self._text(ids[ends[-2] + 1 : ends[-1]]).strip():
            ends.pop()  # behind a turn's end comes the text's (Phi)
        if not ids:
            raise RefusedMessages(f"the chat template leaves out message {len(messages)}")
        for field in (_CALLS, _THOUGHT):
            without = {name: value for name, value in messages[-1].items() if name != field}
            if field in messages[-1] and after == self._rendered((*messages[:-1], without), tools, begins=False):
                raise RefusedMessages(f"the chat template leaves out the {field} of message {len(messages)}")
        if ends:
            return ids[: ends[-1] + 1]
        self.notes[f"the chat template ends a turn ({end!r}) with no token that stops a response: {_NEVER_STOPS}"] = (
            None
        )
        return self._tokenizer.encode(after[len(before) :].removesuffix(end[len(end.rstrip()) :]))

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _around(self, messages: Messages, tools: Any) -> tuple[str, str]:
        """The conversation up to where the last message begins, and the whole conversation."""
        return self._rendered(messages[:-1], tools, begins=True), self._rendered(messages, tools, begins=False)

    def _rendered(self, messages: Messages, tools: Any, *, begins: bool) -> str:
        variables = {**self._data.apply_chat_template_kwargs, **({TOOLS: tools} if tools else {})}
        return self._tokenizer.apply_chat_template(messages, begins, **variables)

    def _made_between(self, tools: str) -> Between:
        variables = dict(self._data.apply_chat_template_kwargs)
        return Between(self._tokenizer, variables | ({TOOLS: json.loads(tools)} if tools else {}))


def _example(prompt: Sequence[int], spans: Sequence[tuple[list[int], bool]]) -> Example:
    response = np.concatenate([np.asarray(ids, np.int32) for ids, _ in spans])
    is_said = np.concatenate([np.full(len(ids), is_said) for ids, is_said in spans])
    return Example(np.asarray(prompt, np.int32), response, is_said)


# ---------------------------------------------------------------- rows of files


class ExampleRows:
    """The rows of files, tokenised. Rows that are too long are dropped and counted (`num_filtered`), or refused."""

    def __init__(self, found: Iterator[ExampleRow], option: str, config: Config) -> None:
        limit, data = config.max_model_length, config.data
        self._rows: list[ExampleRow] = []
        self.num_filtered = 0
        for row in found:
            longest = max(map(len, row.examples))
            if longest <= limit:
                self._rows.append(row)
                continue
            if not data.filter_overlong_prompts:
                raise ValueError(
                    f"{row.where}: {longest} tokens are more than data.max_prompt_length ({data.max_prompt_length}) + "
                    f"data.max_response_length ({data.max_response_length}) = {limit}, and "
                    "data.filter_overlong_prompts is false"
                )
            self.num_filtered += 1
        if self.num_filtered:
            _log.warning(
                "dropped %d of %d rows: over %d tokens", self.num_filtered, self.num_filtered + len(self), limit
            )
        if not self._rows:
            raise ValueError(
                f"{option}: no rows to learn from: all {self.num_filtered} are longer than data.max_prompt_length "
                f"({data.max_prompt_length}) + data.max_response_length ({data.max_response_length}) tokens"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> ExampleRow:
        return self._rows[row]

    def batches(self, count: int, size: int) -> Iterator[list[tuple[int, ExampleRow]]]:
        """The first `count` rows (0: all), each with its number, `size` at a time."""
        numbered = list(enumerate(self._rows[: count or len(self)]))
        return (numbered[first : first + size] for first in range(0, len(numbered), size))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens and their masks."""
        digest = hashlib.sha256()
        for row in self._rows:
            for example in row.examples:
                digest.update(np.array([len(example.prompt), len(example.response)], np.int64).tobytes())
                for array in (example.prompt, example.response, example.is_said):
                    digest.update(array.tobytes())
        return digest.hexdigest()[:16]


class RowSource:
    """Training rows without end, in a new deterministic order in each epoch; batches cross epoch ends."""

    def __init__(self, rows: ExampleRows, config: Config) -> None:
        self.rows, self._seed = rows, config.data.seed if config.data.shuffle else None
        self.position = 0  # rows returned so far, over all epochs

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """The epoch of the last row that was returned, from 0."""
        return max(self.position - 1, 0) // len(self)

    def next(self, count: int) -> list[tuple[int, ExampleRow]]:
        positions = range(self.position, self.position + count)
        self.position = positions.stop
        numbers = (nth(len(self), self._seed, place) for place in positions)
        return [(number, self.rows[number]) for number in numbers]

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "rows": self.rows.fingerprint, "order": self._seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a saved cursor. Raises ValueError if it belongs to other rows, or to another order."""
        now = self.state()
        for name, options in (
            ("rows", "the files, the tokenizer, the chat template or the lengths"),
            ("order", "data.seed or data.shuffle"),
        ):
            if state[name] != now[name]:
                raise ValueError(f"{options} have changed since the checkpoint ({state[name]} then, {now[name]} now)")
        self.position = int(state["position"])


def read_demonstrations(names: Sequence[str], option: str, config: Config, tokens: ConversationTokens) -> ExampleRows:
    found = (_demonstration(where, row, config, tokens) for where, row in _rows_of(names, option))
    return ExampleRows(found, option, config)


def read_pairs(names: Sequence[str], option: str, config: Config, tokens: ConversationTokens) -> ExampleRows:
    found = (_pair(where, row, config, tokens) for where, row in _rows_of(names, option))
    return ExampleRows(found, option, config)


def _rows_of(names: Sequence[str], option: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in data_files(names, option):
        for where, row in rows(path):
            refuse_media(row, where)
            yield where, _without_nulls(row) if path.suffix == ".parquet" else row


def _without_nulls(value: Any) -> Any:
    """A value without the nulls that Parquet adds, where each object has the fields of all others."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _demonstration(where: str, row: Mapping[str, Any], config: Config, tokens: ConversationTokens) -> ExampleRow:
    sft = config.sft
    if row.get(sft.messages_key) is not None:
        named = f"{where}: {sft.messages_key!r} (sft.messages_key)"
        if not config.data.apply_chat_template:
            raise ValueError(f"{named} holds a conversation, and data.apply_chat_template is off")
        messages = _messages(row[sft.messages_key], named)
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        context, said = asked_messages(messages[:first], config.data), messages[first:]
        _check_said(said, named)
    else:
        for key, option in ((sft.prompt_key, "sft.prompt_key"), (sft.completion_key, "sft.completion_key")):
            if row.get(key) is None:
                raise ValueError(
                    f"{where}: a row must have {sft.messages_key!r} (sft.messages_key), or {sft.prompt_key!r} "
                    f"(sft.prompt_key) and {sft.completion_key!r} (sft.completion_key); {key!r} ({option}) is missing, "
                    f"found {_columns(row)}"
                )
        prompt, completion = row[sft.prompt_key], row[sft.completion_key]
        if not config.data.apply_chat_template:
            text = _plain(prompt, f"{where}: {sft.prompt_key!r} (sft.prompt_key)", config)
            return ExampleRow(where, (tokens.plain(text, _text(completion, f"{where}: {sft.completion_key!r}")),))
        context = _context(prompt, f"{where}: {sft.prompt_key!r} (sft.prompt_key)", config)
        named = f"{where}: {sft.completion_key!r} (sft.completion_key)"
        said = _said_or_all(completion, named)
        _check_said(said, named)
    return ExampleRow(where, (_tokenised(where, context, said, row, tokens, sft.train_on),))


def _pair(where: str, row: Mapping[str, Any], config: Config, tokens: ConversationTokens) -> ExampleRow:
    dpo = config.dpo
    names, keys = ("prompt_key", "chosen_key", "rejected_key"), (dpo.chosen_key, dpo.rejected_key)
    named = {getattr(dpo, name): f"{where}: {getattr(dpo, name)!r} (dpo.{name})" for name in names}
    for key in keys:
        if row.get(key) is None:
            raise ValueError(f"{named[key]} is missing, found {_columns(row)}")
    both = [row[key] for key in keys]
    prompt = row.get(dpo.prompt_key)
    if not config.data.apply_chat_template:
        text = _plain(prompt, named[dpo.prompt_key], config)
        said = zip(both, keys, strict=True)
        return ExampleRow(where, tuple(tokens.plain(text, _text(each, named[key])) for each, key in said))
    said = [_said_or_all(each, named[key]) for each, key in zip(both, keys, strict=True)]
    shared = _shared(*said)
    if shared and said[0][0]["role"] != "assistant":  # both are whole conversations, the prompt in them
        if prompt is not None:
            _check_prompt(prompt, said[0][:shared], named[dpo.prompt_key])
        context = asked_messages(said[0][:shared], config.data)
        said = [each[shared:] for each in said]
    elif prompt is None:
        raise ValueError(
            f"{named[dpo.prompt_key]} is missing, and {dpo.chosen_key!r} and {dpo.rejected_key!r} do not begin with "
            "the same messages"
        )
    else:
        context = _context(prompt, named[dpo.prompt_key], config)
    for each, key in zip(said, keys, strict=True):
        _check_said(each, named[key])
    return ExampleRow(where, tuple(_tokenised(where, context, each, row, tokens) for each in said))


def _tokenised(
    where: str,
    context: Messages,
    said: Messages,
    row: Mapping[str, Any],
    tokens: ConversationTokens,
    train_on: Turns = "all",
) -> Example:
    if not context:
        raise ValueError(f"{where}: the conversation begins with the assistant: something must be asked first")
    if context[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: the prompt ends with a message of the assistant, and another one follows: join them"
        )
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        with reading(f"{where}, {TOOLS!r}"):
            tools = strict_json(tools)
    _check_objects(tools, f"{where}: {TOOLS!r}")
    try:
        return tokens.example(context, said, tools, train_on)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _context(prompt: Any, named: str, config: Config) -> Messages:
    """The prompt's messages; a text is one message of the user."""
    if not isinstance(prompt, str):
        return asked_messages(_messages(prompt, named), config.data)
    return asked_messages(({"role": "user", "content": _text(prompt, named)},), config.data)


def _plain(prompt: Any, named: str, config: Config) -> str:
    """A prompt without a chat template, as `jaxrl train` writes it."""
    return "\n\n".join(message["content"] for message in _context(_text(prompt, named), named, config))


def _said_or_all(value: Any, named: str) -> Messages:
    return (
        ({"role": "assistant", "content": _text(value, named)},) if isinstance(value, str) else _messages(value, named)
    )


def _shared(first: Messages, second: Messages) -> int:
    """How many messages both conversations share at their beginning, their last ones left out."""
    pairs = zip(first[:-1], second[:-1], strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _check_prompt(prompt: Any, shared: Messages, named: str) -> None:
    """A prompt beside whole conversations is text that the user says there, or messages that they begin with."""
    if isinstance(prompt, str):
        fits = prompt.strip() in [message["content"].strip() for message in shared if message["role"] == "user"]
    else:
        asked, own = ([m for m in each if m["role"] != "system"] for each in (_messages(prompt, named), shared))
        fits = own[: len(asked)] == asked
    if not fits:
        raise ValueError(
            f"{named} contradicts the row's conversations, which begin with their own prompt: {shown(prompt)} is not "
            f"in {shown([dict(message) for message in shared])}; leave one of the two out"
        )


def _check_said(said: Messages, named: str) -> None:
    """The assistant speaks first and last, and never twice in a row."""
    roles = [message["role"] for message in said]
    if not said or roles[-1] != "assistant":
        raise ValueError(f"{named}: the last message must be the assistant's, found {roles[-1] if roles else 'none'}")
    if roles[0] != "assistant":
        raise ValueError(f"{named}: behind the prompt the first message must be the assistant's, found {roles[0]}")
    if any(one == other == "assistant" for one, other in pairwise(roles)):
        raise ValueError(f"{named}: two messages of the assistant follow each other: join them, or answer the first")


def _columns(row: Mapping[str, Any]) -> str:
    """The columns that have a value: in Parquet all rows have all columns."""
    return ", ".join(repr(name) for name, value in row.items() if value is not None) or "nothing"


def _text(value: Any, named: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{named} must hold some text, found {shown(value)}")
    return value


def _check_objects(value: Any, named: str) -> None:
    """Accepts None or a list of JSON objects: a template that loops over anything else writes nonsense."""
    if value is not None and not (isinstance(value, list) and all(isinstance(each, Mapping) for each in value)):
        raise ValueError(f"{named} must be a list of JSON objects, found {shown(value)}")


def _messages(value: Any, named: str) -> Messages:
    if isinstance(value, str):
        with reading(named):
            value = strict_json(value)
    rule = f"{named} must be a list of messages with 'role' and 'content'"
    if not isinstance(value, list) or not value:
        raise ValueError(f"{rule}, found {shown(value)}")
    found: list[Mapping[str, Any]] = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise ValueError(f"{rule}, of a role among {', '.join(_ROLES)}: message {number} is {shown(message)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get(_CALLS)):
            raise ValueError(f"{named}: message {number} must have text in 'content', found {shown(content)}")
        _check_objects(message.get(_CALLS) or None, f"{named}: {_CALLS!r} of message {number}")
        for name in _UNSUPPORTED:
            if message.get(name):
                raise ValueError(f"{named}: message {number} has {name!r}, which is not supported")
        thoughts = {name: message[name] for name in THINKING if message.get(name)}
        one = next(iter(thoughts.values()), "")
        if not isinstance(one, str) or any(each != one for each in thoughts.values()):
            raise ValueError(f"{named}: message {number} must have one text in {', '.join(thoughts)}")
        more = {name: message[name] for name in _PASSED_ON if message.get(name)} | ({_THOUGHT: one} if one else {})
        weight = {} if _is_learnt(message, f"{named}: message {number}") else {"weight": 0}
        found.append({"role": message["role"], "content": content or "", **more, **weight})
    return tuple(found)


def _is_learnt(message: Mapping[str, Any], named: str) -> bool:
    """Whether no field of a message masks it. Raises ValueError for a value that is neither yes nor no."""
    given = {name: message[name] for name in _MASKS if message.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(f"{named}: {name!r} must be 0 or 1, true or false, found {shown(value)}")
    return all(bool(value) is _MASKS[name] for name, value in given.items())
