"""Problems -> prompts: the conversation that is rendered, its text, and its tokens in one flat array."""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from jaxrl.config import DataSection
from jaxrl.data.chat_template import RefusedMessages
from jaxrl.data.problems import Problem, asked_messages
from jaxrl.data.tokenizer import JOINT, Tokenizer
from jaxrl.types import Prompt

_log = logging.getLogger(__name__)

_TOGETHER = 1024  # prompts that the tokenizer's threads share


Environments = Any
"""A run's `jaxrl.mechanisms.turns.pool.EnvironmentPool`: prompts need its `schemas` and `problems`."""


class Rendered:
    """Problems with their tokenised prompts, the overlong ones dropped (`num_filtered`). `fingerprint`: a hash of what
    the model sees and of the answers that it is compared with."""

    def __init__(
        self,
        problems: Sequence[Problem],
        tokenizer: Tokenizer,
        data: DataSection,
        environments: Environments | None = None,
    ):
        self._tokenizer, self._data, self._environments = tokenizer, data, environments
        # of the prompts that are kept: their problems by ascending `index`, and the ends of each in the tokens of all
        self._problems, self._ends, self._token_ids = list[Problem](), array("q"), array("i")
        hashed = hashlib.sha256()
        for problem, ids in self._encoded(problems):
            if not ids:
                raise ValueError(f"{problem.where}: the rendered prompt has no tokens")
            if len(ids) > data.max_prompt_length:
                if not data.filter_overlong_prompts:
                    raise ValueError(
                        f"{problem.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length "
                        f"({data.max_prompt_length}), and data.filter_overlong_prompts is false"
                    )
                continue
            hashed.update(json.dumps([problem.index, problem.source, problem.answer]).encode())
            hashed.update(np.asarray(ids, np.int32).tobytes())
            self._problems.append(problem)
            self._token_ids.extend(ids)
            self._ends.append(len(self._token_ids))
        self.fingerprint = hashed.hexdigest()[:16]
        self.num_filtered = len(problems) - len(self)
        if self.num_filtered:
            limit = data.max_prompt_length
            _log.warning("dropped %d of %d prompts: over %d tokens", self.num_filtered, len(problems), limit)

    def __len__(self) -> int:
        return len(self._problems)

    def _encoded(self, problems: Sequence[Problem]) -> Iterator[tuple[Problem, list[int]]]:
        """Each problem with its prompt's ids."""
        # a chat template writes its special tokens itself; plain text gets the tokenizer's own (a BOS, say)
        special, rest = not self._data.apply_chat_template, iter(problems)
        while chunk := list(islice(rest, _TOGETHER)):
            texts = [self._text(problem) for problem in chunk]
            yield from zip(chunk, self._tokenizer.encode_batch(texts, add_special_tokens=special), strict=True)

    def _text(self, problem: Problem) -> str:
        data = self._data
        messages = asked_messages(problem.messages, data)
        if not data.apply_chat_template:
            return "\n\n".join(message["content"] for message in messages)
        variables: dict[str, Any] = dict(data.apply_chat_template_kwargs)
        if self._environments is not None and (tools := self._environments.schemas(problem.extra, problem.where)):
            variables["tools"] = list(tools)
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
        except RefusedMessages as error:
            raise ValueError(f"{problem.where}: {error}") from None
        except ValueError as error:
            if "tools" not in variables:
                raise
            raise ValueError(
                f"{error}: with environment.describe_tools=false the template is not asked for tools, and "
                "data.system_prompt says what there is and how it is called"
            ) from None

    @property
    def sources(self) -> list[str]:
        return [problem.source for problem in self._problems]

    def row_of(self, index: int) -> int:
        row = bisect_left(self._problems, index, key=lambda problem: problem.index)
        if row == len(self) or self._problems[row].index != index:
            raise ValueError(f"prompt {index}: the training data holds no such problem, or it was dropped as too long")
        return row

    def prompt(self, row: int, epoch: int) -> Prompt:
        problem, ends = self._problems[row], self._ends
        extra = problem.extra
        if self._environments is not None or self._data.messages_key:
            # an environment, and a reward over turns or of a conversation, gets the messages too
            extra = {**extra, "messages": [*map(dict, asked_messages(problem.messages, self._data))]}
        return Prompt(
            epoch=epoch,
            index=problem.index,
            token_ids=tuple(self._token_ids[ends[row - 1] if row else 0 : ends[row]]),
            text=self._text(problem).replace(JOINT, ""),
            source=problem.source,
            answer=problem.answer,
            extra=extra,
            question=problem.question,
        )
