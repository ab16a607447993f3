"""Answers to clients: OpenAI's objects, complete and in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tool_calls import ToolCall, calls_in, may_begin
from jaxrl.serving.bodies import ChatBody, CompletionBody
from jaxrl.serving.driver import Piece
from jaxrl.serving.generation import HALF, Choice, Generation
from jaxrl.serving.objects import tool_calls

DONE = "data: [DONE]\n\n"


def event(body: Any) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def new_id() -> str:
    return secrets.token_hex(12)


def _head(prefix: str, kind: str, answer_id: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{answer_id}", "object": kind, "created": int(time.time()), "model": model}


class Completion:
    """An answer of `/v1/completions`. `whole` is all of it; `opening`, `chunk` and `last` are the objects of a stream:
    before the first token, for the tokens and the text that a choice gained, and with the number of tokens."""

    def __init__(self, body: CompletionBody, generation: Generation, tokenizer: Tokenizer, model: str) -> None:
        self._body, self._generation = body, generation
        self._token_texts = TokenTexts(tokenizer, bool(body.return_tokens_as_token_ids))
        self._head = _head("cmpl", "text_completion", new_id(), model)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice, choice.text.text, 0, 0) for choice in self._generation.choices]
        return self._head | {"choices": choices, "usage": usage(self._generation)}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunk(self, choice: Choice, text: str, piece: Piece) -> dict[str, Any]:
        start, offset = len(choice.token_ids) - len(piece.token_ids), len(choice.text.text) - len(text)
        return self._head | {"choices": [self._choice(choice, text, start, offset)]}

    def last(self) -> dict[str, Any]:
        return self._head | {"choices": [], "usage": usage(self._generation)}

    def _choice(self, choice: Choice, text: str, start: int, offset: int) -> dict[str, Any]:
        """A choice with the tokens from `start` on, whose text begins `offset` characters after the choice's."""
        found: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None}
        if self._body.logprobs is not None:
            found["logprobs"] = completion_logprobs(self._token_texts, choice, start, offset)
        found["finish_reason"] = choice.finish_reason
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids[start:]
            if not start:
                found["prompt_token_ids"] = list(choice.prompt_ids)
        return found


class Chat:
    """An answer of `/v1/chat/completions`, with the methods of `Completion`. `names`: functions that may be called."""

    def __init__(
        self,
        body: ChatBody,
        generation: Generation,
        tokenizer: Tokenizer,
        model: str,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self._body, self._generation, self._names = body, generation, names
        self._token_texts = TokenTexts(tokenizer, bool(body.return_tokens_as_token_ids))
        self._id = new_id()
        self._head = _head("chatcmpl", "chat.completion", self._id, model)
        self._chunk = self._head | {"object": "chat.completion.chunk"}
        self._given = dict.fromkeys((choice.index for choice in generation.choices), 0)  # characters of earlier chunks

    def whole(self) -> dict[str, Any]:
        choices = list(map(self._message, self._generation.choices))
        return self._head | self._prompt() | {"choices": choices, "usage": usage(self._generation)}

    def opening(self) -> Iterator[dict[str, Any]]:
        prompt = self._prompt()
        for choice in self._generation.choices:
            part = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
            yield self._chunk | prompt | {"choices": [part | {"logprobs": None, "finish_reason": None}]}
            prompt = {}

    def chunk(self, choice: Choice, text: str, piece: Piece) -> dict[str, Any]:
        whole, calls = self._read(choice)
        delta: dict[str, Any] = {}
        if len(whole) > (given := self._given[choice.index]):
            delta["content"], self._given[choice.index] = whole[given:], len(whole)
        if calls:
            listed = tool_calls(calls, self._id, choice.index)
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(listed)]
        start = len(choice.token_ids) - len(piece.token_ids)
        return self._chunk | {"choices": [{"index": choice.index, "delta": delta} | self._rest(choice, calls, start)]}

    def last(self) -> dict[str, Any]:
        return self._chunk | {"choices": [], "usage": usage(self._generation)}

    def _message(self, choice: Choice) -> dict[str, Any]:
        text, calls = self._read(choice)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = tool_calls(calls, self._id, choice.index)
        return {"index": choice.index, "message": message} | self._rest(choice, calls, 0)

    def _read(self, choice: Choice) -> tuple[str, list[ToolCall]]:
        """The text and the calls; of a response that grows, the text that can be no call's beginning."""
        text = choice.text.text
        if not self._names:
            return text, []
        return calls_in(text, self._names) if choice.finish_reason else (text[: may_begin(text)], [])

    def _rest(self, choice: Choice, calls: list[ToolCall], start: int) -> dict[str, Any]:
        called = calls and choice.finish_reason == "stop"
        found: dict[str, Any] = {"finish_reason": "tool_calls" if called else choice.finish_reason}
        found["logprobs"] = chat_logprobs(self._token_texts, choice, start) if self._body.logprobs else None
        return found | {"token_ids": choice.token_ids[start:]} if self._body.return_token_ids else found

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._generation.choices[0].prompt_ids)} if self._body.return_token_ids else {}


Answer = Completion | Chat


def generated(generation: Generation, texts: TokenTexts, request_id: str | None) -> dict[str, Any]:
    choices = [
        {
            "index": choice.index,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "logprobs": chat_logprobs(texts, choice, 0),
        }
        for choice in generation.choices
    ]
    return {"request_id": request_id or new_id(), "choices": choices}


def usage(generation: Generation) -> dict[str, int]:
    """Tokens of the prompts, each once, and of the responses."""
    given, drawn = generation.num_prompt_tokens, sum(len(choice.token_ids) for choice in generation.choices)
    return {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}


class TokenTexts:
    """How tokens are named in log-probabilities: as text, or by their ids ("token_id:N")."""

    def __init__(self, tokenizer: Tokenizer, by_id: bool = False) -> None:
        self._tokenizer, self._by_id = tokenizer, by_id
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        if self._by_id:
            return f"token_id:{token_id}"
        if token_id not in self._known:
            self._known[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._known[token_id]

    def bytes_of(self, token_id: int) -> list[int] | None:
        """None where it is no text by itself, as of half a character."""
        text = self(token_id)
        return None if self._by_id or HALF in text else list(text.encode())


def completion_logprobs(texts: TokenTexts, choice: Choice, start: int, offset: int) -> dict[str, Any]:
    tokens = list(map(texts, choice.token_ids[start:]))
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    drawn = list(zip(choice.token_ids[start:], choice.logprobs[start:], strict=True))
    top = choice.top[start:] or [[] for _ in drawn]
    return {
        "tokens": tokens,
        "token_logprobs": choice.logprobs[start:],
        # the one that was drawn is among them, as OpenAI has it
        "top_logprobs": [_by_text(texts, [*place, pair]) for place, pair in zip(top, drawn, strict=True)],
        "text_offset": offsets[:-1],
    }


def _by_text(texts: TokenTexts, place: list[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by text; of tokens with equal texts, such as halves of characters, the first."""
    found: dict[str, float] = {}
    for token_id, logprob in place:
        found.setdefault(texts(token_id), logprob)
    return found


def chat_logprobs(texts: TokenTexts, choice: Choice, start: int) -> dict[str, Any]:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts(token_id), "logprob": logprob, "bytes": texts.bytes_of(token_id)}

    pairs = zip(choice.token_ids[start:], choice.logprobs[start:], strict=True)
    content = [named(*pair) | {"top_logprobs": []} for pair in pairs]
    for each, top in zip(content, choice.top[start:], strict=False):
        each["top_logprobs"] = [named(*pair) for pair in top]
    return {"content": content, "refusal": None}
