"""Where a response stops: token ids that end it, and stop strings in its text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jaxrl.data.tokenizer import Tokenizer

MAX_STOP_CHARACTERS = 1000
"""The longest stop string: it is looked for in every response, each time that tokens come."""


def check_stop_strings(stops: Iterable[Any], option: str) -> None:
    """Raises ValueError for a stop string that every text contains, or that none can."""
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"{option}: a stop string must be text and not empty, found {stop!r:.80}")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"{option}: a stop string must have at most {MAX_STOP_CHARACTERS} characters, found {len(stop)}"
            )


def stop_ids(tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """The token ids that end a response: the tokenizer's and the model's."""
    return tuple(sorted({*tokenizer.stop_token_ids, *eos_token_ids}))


def stop_string_check(tokenizer: Tokenizer) -> Callable[[Any, Any], int | None]:
    """The engine's `stop_check`: for a request (`jaxrl.scheduling.tokens.plan.Request`) and its response's tokens, how
    many of them to keep once their text holds a stop string."""

    def check(request: Any, token_ids: Any) -> int | None:
        ids = list(token_ids)

        def holds(count: int) -> bool:
            text = tokenizer.decode(ids[:count])
            return any(stop in text for stop in request.params.stop_strings)

        if not holds(len(ids)):
            return None
        # the first prefix that holds one: text only grows with tokens
        return 1 + bisect_left(range(1, len(ids)), True, key=holds)

    return check
