"""From the rows of data files to problems: the columns and their allowed values.

Columns are named by `data.*_key`; a dotted name reaches into nested columns (`reward_model.ground_truth`, as verl's
Parquet files have it). What a prompt cannot carry (calls of tools, other roles, parts of content that are not text) is
refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from jaxrl.config import ConfigError, DataSection
from jaxrl.config.inputs import one_line, reading, strict_json
from jaxrl.data.chat_template import THINKING
from jaxrl.data.files import data_files, data_set_name, rows
from jaxrl.schema.declared import shown

ROLES = ("system", "user", "assistant")
"""The possible authors of a message."""

_PASSED_ON = ("name", *THINKING)
"""Text of a message beside its role and content that goes to the chat template, which may show it."""

_FINAL = re.compile(r"(?:[^#]*\s)?####(?:\s+(.*\w.*))?")  # GSM8K's last line; one of a grid has more # or no word

# fields of messages that chat templates render; a message in which one of them holds something is refused
_UNSUPPORTED = ("tool_calls", "tool_call_id", "tool_responses", "function_call")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem from the file or the task, before templates."""

    index: int  # in the data set
    where: str  # file and line (or row), or task and number
    messages: tuple[Mapping[str, str], ...]  # the conversation so far; a plain question is one user message
    answer: str | None  # None where `data.answer_key` is empty
    source: str  # the data set's or task's name
    extra: Mapping[str, Any] = field(default_factory=dict)  # all other columns; of a task: "entry"

    @property
    def question(self) -> str:
        """The user's last message, which the response answers."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")

    @property
    def identity(self) -> str:
        """The text of the messages, white space normalised: equal for equal problems."""
        return " ".join(" ".join(m["content"] for m in self.messages).split())


def read_problems(names: Sequence[str], option: str, data: DataSection) -> Iterator[Problem]:
    """The problems of the files that `option` names, in their order, one after another. Raises ValueError with file,
    line and rule."""
    if not (data.messages_key or data.prompt_key):
        raise ConfigError("data.prompt_key is empty: name the column of the problem's text, or give data.messages_key")
    if option == "data.val_files":
        data = data.replace(reference_time_key="")  # evaluations take no anchors
    count = 0
    for given in names:
        on_hub = data_set_name(given)
        for path in data_files([given], option):
            name = source_name(path) if on_hub is None else on_hub.repository
            for number, (where, row) in enumerate(rows(path)):
                if not number:
                    _check_template(data.prompt_template, row)
                yield _problem(count, where, row, name, data)
                count += 1


def source_name(path: Path) -> str:
    """The source of problems that name none: the file's name."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")


def refuse_media(row: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a row with images, videos or sounds, which models here cannot see."""
    for name in ("images", "image", "videos", "audios"):
        if row.get(name):
            raise ValueError(
                f"{where}: column {name!r} holds {shown(row[name])}, and models are given text alone: leave the row "
                "out, or the column where the text does without it"
            )


def asked_messages(messages: Sequence[Mapping[str, Any]], data: DataSection) -> tuple[Mapping[str, Any], ...]:
    """A prompt's messages with `data.prompt_template` around the user's last one, and with `data.system_prompt` in
    place of what the system says."""
    found = list(messages)
    last = max((i for i, message in enumerate(found) if message["role"] == "user"), default=None)
    if last is not None:
        # not str.format: templates are full of braces (\boxed{})
        content = data.prompt_template.replace("{question}", found[last]["content"])
        found[last] = {**found[last], "content": content}
    if data.system_prompt:
        others = [message for message in found if message["role"] != "system"]
        found = [{"role": "system", "content": data.system_prompt}, *others]
    return tuple(found)


def _problem(index: int, where: str, row: Mapping[str, Any], file: str, data: DataSection) -> Problem:
    refuse_media(row, where)
    used = [data.messages_key or data.prompt_key, data.answer_key, data.source_key, data.reference_time_key]
    if data.messages_key:
        messages = _messages(column(row, data.messages_key, "data.messages_key", where), data.messages_key, where)
        if data.system_prompt:  # which replaces the row's own
            messages = tuple(message for message in messages if message["role"] != "system")
    else:
        question = column(row, data.prompt_key, "data.prompt_key", where)
        if isinstance(question, list) and question and all(isinstance(each, Mapping) for each in question):
            raise ValueError(
                f"{where}: {data.prompt_key!r} (data.prompt_key) holds a conversation, found {shown(question)}: give "
                f"data.messages_key={data.prompt_key}"
            )
        if not isinstance(question, str) or not question.strip():
            raise ValueError(
                f"{where}: {data.prompt_key!r} (data.prompt_key) must hold some text, found {shown(question)}"
            )
        messages = ({"role": "user", "content": question},)
    answer = None
    if data.answer_key:
        answer = reference_answer(column(row, data.answer_key, "data.answer_key", where), where, data)
    source = source_of(column(row, data.source_key, "data.source_key", where), where, data) if data.source_key else file
    extra = extra_columns(row, used)
    if data.reference_time_key:
        extra[data.reference_time_key] = _reference_time_s(row, data.reference_time_key, where)
    return Problem(index, where, messages, answer, source, extra)


def extra_columns(row: Mapping[str, Any], used: Sequence[str]) -> dict[str, Any]:
    """The columns of a row that nothing else uses, for the reward."""
    extra = {key: value for key, value in row.items() if key not in used}
    nested = extra.pop("extra_info", None)  # verl's column of that name: its fields are what a reward function expects
    if isinstance(nested, Mapping):
        extra |= nested
    elif nested is not None:
        extra["extra_info"] = nested
    return extra


def _check_template(template: str, row: Mapping[str, Any]) -> None:
    """Refuses a template with a column's name in braces: only {question} is filled in, and other braces stay
    (`\\boxed{}`)."""
    for name in re.findall(r"(?<![\w\\{])\{(\w+)\}(?!\})", template):
        if name != "question" and name in row:
            raise ConfigError(
                f"data.prompt_template names the column {{{name}}}, but only {{question}} is filled in: write the rest "
                "into the problem's text"
            )


def column(row: Mapping[str, Any], key: str, option: str, where: str) -> Any:
    """The column that `option` names `key`. Raises ValueError with the row's place if there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if value is None:
            return None  # a struct that is null in this row
        if not isinstance(value, Mapping) or part not in value:
            # `solution` is near `question` by difflib's own limit of 0.6
            near = [*_nested(row, key), *difflib.get_close_matches(key, list(row), n=1, cutoff=0.75)]
            names = one_line(", ".join(map(repr, row))) or "none"
            raise ValueError(
                f"{where}: no column {key!r} ({option}): {f'did you mean {near[0]!r}?' if near else f'found {names}'}"
            )
        value = value[part]
    return value


def _nested(row: Mapping[str, Any], name: str, above: str = "") -> Iterator[str]:
    """The dotted names of nested columns whose last name is `name`."""
    for key, value in row.items():
        if above and key == name:
            yield above + key
        if isinstance(value, Mapping):
            yield from _nested(value, name, f"{above}{key}.")


def _messages(value: Any, key: str, where: str) -> tuple[Mapping[str, str], ...]:
    if isinstance(value, str):
        with reading(f"{where}, {key!r}"):
            value = strict_json(value)
    return checked_messages(value, f"{where}: {key!r} (data.messages_key)")


def checked_messages(value: Any, named: str) -> tuple[Mapping[str, str], ...]:
    """A conversation that can be answered. Raises ValueError for anything else, which `named` describes."""
    rule = f"{named} must be a list of messages with text in 'role' and 'content'"
    if not isinstance(value, list) or not value:
        raise ValueError(f"{rule}, found {shown(value)}")
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            raise ValueError(f"{rule}, found {shown(message)}")
        for name in _UNSUPPORTED:
            if message.get(name):
                raise ValueError(f"{named}: message {number} has {name!r}, which is not supported")
        if not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{rule}, found {shown(message)}")
        for name in _PASSED_ON:
            if not isinstance(message.get(name) or "", str):
                raise ValueError(f"{named}: message {number} must have text in {name!r}, found {shown(message[name])}")
        if message["role"] not in ROLES:
            raise ValueError(
                f"{named}: message {number} has the role {shown(message['role'])}, which is not supported; "
                f"supported are {', '.join(ROLES)}"
            )
    last = value[-1]
    if last["role"] != "user":
        raise ValueError(f"{named}: the last message must be the user's, which is to be answered, found {last['role']}")
    if not last["content"].strip():
        raise ValueError(f"{named}: the last message must hold some text, found {shown(last['content'])}")
    return tuple(
        {"role": message["role"], "content": message["content"]}
        | {name: message[name] for name in _PASSED_ON if message.get(name)}
        for message in value
    )


def reference_answer(value: Any, where: str, data: DataSection) -> str:
    """The text of a reference answer; of GSM8K's the part behind the `####` of its last line."""
    named = f"{where}: {data.answer_key!r} (data.answer_key)"
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"{named} must be text or a number, found {shown(value)}")
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise ValueError(f"{named} must be text or a finite number, found {value}")
    answer = str(value).strip()
    last = answer.rpartition("\n")[2]
    final = _FINAL.fullmatch(last)
    is_json = answer[:1] in ("[", "{") and answer[-1:] in ("]", "}")
    if final and (final[1] or last == answer) and not is_json:
        answer = final[1] or ""
    if not answer:
        raise ValueError(f"{named} must hold an answer, found {shown(value)}")
    return answer


def _reference_time_s(row: Mapping[str, Any], key: str, where: str) -> float | None:
    """Seconds that a correct program takes; None for an empty value."""
    value = column(row, key, "data.reference_time_key", where)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(
            f"{where}: {key!r} (data.reference_time_key) must be a number of seconds, 0 or more, found {shown(value)}"
        )
    return float(value)


def source_of(value: Any, where: str, data: DataSection) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(
            f"{where}: {data.source_key!r} (data.source_key) must be text or a whole number, found {shown(value)}"
        )
    return str(value)
