"""Responses that are given in a file, each with its problem's own columns: what `jaxrl score` scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxrl.config import DataSection
from jaxrl.data.files import rows
from jaxrl.data.problems import column, extra_columns, reference_answer, source_name, source_of
from jaxrl.schema.declared import shown
from jaxrl.types import Prompt, Sample, SampleKey

COLUMN = "response"
"""The column of the response."""
_WRITTEN = "finish_reason"  # rows with it were written by `jaxrl eval` or a run, and have their prompts' `source`
_ANSWER_KEY = DataSection().answer_key
_LENGTHS = ("response_length", "length")  # tokens; the second as `jaxrl eval --out` writes it


def read_responses(
    path: Path, data: DataSection, needs_answer: Callable[[str], bool], *, needs_length: bool
) -> Iterator[tuple[str, Prompt, Sample]]:
    """The place, the prompt and the sample of each row of a file. Nothing is tokenised: a prompt has no tokens, and a
    sample as many zeros as its column of lengths says. Raises ValueError with the file, the line and the rule.

    `needs_answer`: whether the scorer of a source compares with a reference answer. A `data.answer_key` that is not the
    default is always required: it was given because there is such a column."""
    for index, (where, row) in enumerate(rows(path)):
        response = column(row, COLUMN, "of the response", where)
        if not isinstance(response, str):
            raise ValueError(f"{where}: {COLUMN!r} must be text, found {shown(response)}")
        source = source_name(path)
        if not data.source_key and _WRITTEN in row and isinstance(row.get("source"), str):
            source = row["source"]
        elif data.source_key:
            source = source_of(column(row, data.source_key, "data.source_key", where), where, data)
        answer = None
        is_without = "entry" in row and row.get(data.answer_key) is None  # some tasks' problems have no reference
        is_asked_for = needs_answer(source) or data.answer_key != _ANSWER_KEY
        if data.answer_key and not is_without and (is_asked_for or data.answer_key in row):
            answer = reference_answer(column(row, data.answer_key, "data.answer_key", where), where, data)
        question = row.get(data.prompt_key, "")
        if not isinstance(question, str):
            raise ValueError(f"{where}: {data.prompt_key!r} (data.prompt_key) must be text, found {shown(question)}")
        length = next((row[name] for name in _LENGTHS if name in row), None)
        if needs_length and length is None:
            raise ValueError(f"{where}: no column 'response_length' (tokens), on which a part of the reward depends")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < 2**31):
            raise ValueError(f"{where}: the response's length must be a number of tokens, found {shown(length)}")
        extra = extra_columns(row, (COLUMN, data.prompt_key, data.answer_key, data.source_key))
        sample = Sample.empty(SampleKey(0, index, 0))
        nothing = np.broadcast_to(np.int32(0), (length or 0,))
        sample.text, sample.token_ids, sample.versions = response, nothing, nothing
        yield where, Prompt(0, index, (), question, source, answer, extra, question), sample
