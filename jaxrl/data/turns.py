"""The tokens between two turns of a model: new messages, in the form of the model's own chat template.

A conversation is appended to, and never rendered again. The model's tokens stay as they were sampled; behind them come
the tokens that the template writes after an assistant's message: its end, the new messages, and the beginning of the
next turn. The template renders these alone, beside two short messages, so its time does not grow with the turns.

Some templates rewrite earlier turns: Qwen3's drops the thinking of all turns but the last. A model that is trained on
its own samples then reads its own thinking, which `rewritten` says in a sentence for the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.data.chat_template import THINKING, RefusedMessages
from jaxrl.data.tokenizer import Tokenizer

Message = Mapping[str, Any]
_ASKED, _SAID, _AGAIN = "asked0by0a0user", "said0by0the0model", "said0again0by0it"  # words that no template has
_THOUGHT, _RULES = "thought0by0it", "ruled0by0us"


class Between:
    """The tokens between turns. `arguments`: `data.apply_chat_template_kwargs`, and `tools`. Raises ValueError if there
    is no template, or it writes nothing of what an assistant has said."""

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        after = self._after([_user(_AGAIN)])
        if after is None:
            raise ValueError(
                "the chat template leaves out what an assistant has said: with it there can be no second turn"
            )
        self.end = self._render([_user(_ASKED), _said(_SAID)], begins=False).rpartition(_SAID)[2]
        self._ends_message = (
            tokenizer.encode("<|end|>") if tokenizer.speaks_harmony else []
        )  # which a turn's end replaces
        last, stops = tokenizer.encode(self.end), tokenizer.stop_token_ids
        last = last[: next((place for place, i in enumerate(last, 1) if i in stops), 0)]
        earlier = tokenizer.encode(after)[: len(last)]
        self._ends_otherwise = earlier != last and not set(earlier).intersection(stops)
        self._closes = self.end.rstrip() if after.startswith(self.end.rstrip()) else ""

    def answer(self, messages: Sequence[Message], drawn: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens that follow a turn, up to where the model's next turn begins. `messages`: at least one, of
        users or tools. If `drawn`, the model's turn, ends as the template ends a turn, the end is not written twice.
        Raises RefusedMessages if the template refuses these messages."""
        after = self._after(messages)
        if after is None:
            raise RefusedMessages("the chat template leaves out what an assistant has said before these messages")
        tail = drawn[max(len(drawn) - len(self._closes.encode()), 0) :]  # a token has at least one byte
        if self._closes and self._tokenizer.decode(tail, skip_special_tokens=False).endswith(self._closes):
            return tuple(self._tokenizer.encode(after.removeprefix(self._closes)))
        ids = self._tokenizer.encode(after)
        return tuple(ids[1:] if drawn and ids[:1] in ([drawn[-1]], self._ends_message) else ids)

    def rewritten(self) -> str:
        """A sentence on how the template changes earlier turns; empty: it only appends."""
        turns = [_user(_ASKED), _said(_SAID), _user(_ASKED * 2)]  # some templates tell messages apart by their text
        for before in ([], [{"role": "system", "content": _RULES}]):
            try:
                first = self._render([*before, *turns])
                second = self._render([*before, *turns, _said(_AGAIN), _user(_ASKED * 3)])
            except RefusedMessages:  # no system message, say
                continue
            if not second.startswith(first + _AGAIN):
                return "the chat template writes earlier turns otherwise than the last one"
        thinking = [_said(f"<think>\n{_THOUGHT}\n</think>\n\n{_SAID}"), _said(_SAID) | {THINKING[0]: _THOUGHT}]
        if _THOUGHT not in self._render([_user(_ASKED), thinking[1]], begins=False):
            thinking.pop()
        if any(_THOUGHT not in self._render([_user(_ASKED), turn, _user(_ASKED)]) for turn in thinking):
            return "the chat template drops the thinking of earlier turns"
        return "the chat template ends the last turn otherwise than earlier ones" if self._ends_otherwise else ""

    def _after(self, messages: Sequence[Message]) -> str | None:
        before, said, after = self._render([_user(_ASKED), _said(_SAID), *messages]).rpartition(_SAID)
        return after if said and before else None

    def _render(self, messages: Sequence[Message], *, begins: bool = True) -> str:
        return self._tokenizer.apply_chat_template(messages, begins, **self._arguments)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
