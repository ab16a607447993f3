"""Problems -> prompts: the conversation that is rendered, its text, and its tokens in one flat array."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from jaxrl.config import DataSection
from jaxrl.data.chat_template import RefusedMessages
from jaxrl.data.problems import Problem, asked_messages
from jaxrl.data.store import ProblemStore, digest, kept, mapped
from jaxrl.data.tokenizer import JOINT, Tokenizer
from jaxrl.types import Prompt

_log = logging.getLogger(__name__)

_LONG_TOKEN = 256  # characters: longer than the tokens of any text are on average
_TOGETHER = 1024  # prompts that the tokenizer's threads share
_OPTIONS = (
    *("system_prompt", "prompt_template", "apply_chat_template", "apply_chat_template_kwargs"),
    *("special_tokens_in_content", "max_prompt_length", "filter_overlong_prompts"),
)
"""Options of `data` by which problems become prompts."""


class Environments(Protocol):
    """The methods of a run's environments that prompts need (`jaxrl.mechanisms.turns.pool.EnvironmentPool`)."""

    def schemas(self, row: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
        """What the model may call in a row, as chat templates take it."""
        ...

    def problems(self, first: int, last: int, seed: int) -> Iterable[tuple[Mapping[str, Any], Sequence[Any]]]:
        """Rows that the environment generates, by number, each with its messages."""
        ...


class Rendered:
    """Problems with their tokenised prompts, the overlong ones dropped.

    Attributes:
      num_filtered: problems that are dropped.
      fingerprint: a hash of what the model sees and of the answers that it is compared with.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tokenizer: Tokenizer,
        data: DataSection,
        environments: Environments | None = None,
    ):
        self._problems, self._tokenizer, self._data, self._environments = problems, tokenizer, data, environments
        # of the prompts that are kept: places among the problems and their `index`, both ascending; the ends of each in
        # the tokens of all
        self._places, self._indices, self._ends, self.fingerprint, self._token_ids = self._tokenised()
        self.num_filtered = len(problems) - len(self)
        if self.num_filtered:
            limit = data.max_prompt_length
            _log.warning("dropped %d of %d prompts: over %d tokens", self.num_filtered, len(problems), limit)

    def __len__(self) -> int:
        return len(self._places)

    def _tokenised(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, str, np.ndarray]:
        """The tokens of a store are kept in its folder, unless an environment changes them."""
        if isinstance(self._problems, ProblemStore) and self._environments is None:
            options = {name: getattr(self._data, name) for name in _OPTIONS}
            today = _today() if self._tokenizer.reads_the_date else ""
            key = digest(self._tokenizer.fingerprint, options, today)
            try:
                folder = kept(self._problems.folder / f"tokens-{key}", self._write)
                file = folder / "tokens"
                tokens = np.memmap(file, np.int32, "r") if file.stat().st_size else np.zeros(0, np.int32)
                places, indices, ends = (mapped(folder, name) for name in ("places", "indices", "ends"))
                return places, indices, ends, (folder / "fingerprint").read_text(encoding="utf-8"), tokens
            except OSError as error:
                _log.warning("data.cache_dir: %s; prompts are tokenised anew at every start", error)
        out = io.BytesIO()
        return *self._encode_all(out), np.frombuffer(out.getbuffer(), np.int32)

    def _write(self, folder: Path) -> None:
        with (folder / "tokens").open("wb") as file:
            *arrays, fingerprint = self._encode_all(file)
        for name, values in zip(("places", "indices", "ends"), arrays, strict=True):
            np.save(folder / f"{name}.npy", values)
        (folder / "fingerprint").write_text(fingerprint, encoding="utf-8")

    def _encode_all(self, out: BinaryIO) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        """Writes the tokens of all prompts that are kept; returns their places, indices, ends, and the fingerprint."""
        data, hashed = self._data, hashlib.sha256()
        places, indices, lengths = array("q"), array("q"), array("q")
        for place, (problem, ids, count) in enumerate(self._encoded()):
            if not ids:
                raise ValueError(f"{problem.where}: the rendered prompt has no tokens")
            if len(ids) > data.max_prompt_length:
                if not data.filter_overlong_prompts:
                    raise ValueError(
                        f"{problem.where}: the prompt has {count} tokens, more than data.max_prompt_length "
                        f"({data.max_prompt_length}), and data.filter_overlong_prompts is false"
                    )
                continue
            own = np.asarray(ids, np.int32).tobytes()
            out.write(own)
            hashed.update(json.dumps([problem.index, problem.source, problem.answer]).encode())
            hashed.update(own)
            places.append(place)
            indices.append(problem.index)
            lengths.append(len(ids))
        ends = np.cumsum(np.asarray(lengths), dtype=np.int64)
        return np.asarray(places), np.asarray(indices), ends, hashed.hexdigest()[:16]

    def _encoded(self) -> Iterator[tuple[Problem, list[int], str]]:
        """Each problem with its prompt's ids and their number. Of a text much longer than the limit only the
        beginning is tokenised."""
        data = self._data
        # a chat template writes its special tokens itself; plain text gets the tokenizer's own (a BOS, say)
        special, most = not data.apply_chat_template, (data.max_prompt_length + 1) * _LONG_TOKEN
        rest = iter(self._problems)
        while chunk := list(islice(rest, _TOGETHER)):
            texts = [self._text(problem) for problem in chunk]
            heads = self._tokenizer.encode_batch([text[:most] for text in texts], add_special_tokens=special)
            for problem, text, ids in zip(chunk, texts, heads, strict=True):
                if len(text) <= most:
                    yield problem, ids, str(len(ids))
                elif len(ids) > data.max_prompt_length + _LONG_TOKEN:  # well beyond what the cut can have changed
                    yield problem, ids, f"more than {len(ids)}"
                else:
                    ids = self._tokenizer.encode(text, add_special_tokens=special)
                    yield problem, ids, str(len(ids))

    def _text(self, problem: Problem) -> str:
        data = self._data
        messages = asked_messages(problem.messages, data)
        if not data.apply_chat_template:
            return "\n\n".join(message["content"] for message in messages)
        variables = dict(data.apply_chat_template_kwargs)
        if self._environments is not None and (tools := self._environments.schemas(problem.extra, problem.where)):
            variables["tools"] = list(tools)
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
        except RefusedMessages as error:
            raise ValueError(f"{problem.where}: {error}") from None

    def sources(self, of_problems: Sequence[str]) -> list[str]:
        """The source of each row."""
        return [of_problems[int(place)] for place in self._places]

    def row_of(self, index: int) -> int:
        row = int(np.searchsorted(self._indices, index))
        if row == len(self) or self._indices[row] != index:
            raise ValueError(f"prompt {index}: the training data holds no such problem, or it was dropped as too long")
        return row

    def prompt(self, row: int, epoch: int) -> Prompt:
        problem, ends = self._problems[int(self._places[row])], self._ends
        extra = problem.extra
        if self._environments is not None:  # an environment, and a reward over turns, gets the conversation too
            extra = {**extra, "messages": [*map(dict, asked_messages(problem.messages, self._data))]}
        return Prompt(
            epoch=epoch,
            index=problem.index,
            token_ids=tuple(self._token_ids[ends[row - 1] if row else 0 : ends[row]].tolist()),
            text=self._text(problem).replace(JOINT, ""),
            source=problem.source,
            answer=problem.answer,
            extra=extra,
            question=problem.question,
        )


def _today() -> str:
    return str(date.today())
