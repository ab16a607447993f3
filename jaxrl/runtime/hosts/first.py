"""What process 0 alone finds out, and all know: the others are told on the board, or of what is wrong.

Purpose: some of a start reads much (a checkpoint compared with its checksums), and every process must come to the same
conclusion, also where a disk gives one of them another answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from jaxrl.types import RunFailed

First = Callable[[str, Callable[[], str]], str]
"""(name, make): what `make` returns in process 0, in every process. Each name once."""

_LOOK_S = 1.0
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "RunFailed": RunFailed}


class Posts(Protocol):
    """The part of `jaxrl.runtime.hosts.board.Board` that this needs."""

    @property
    def process(self) -> int: ...

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes | None: ...


def alone(name: str, make: Callable[[], str]) -> str:
    """`First` in a run of one process."""
    return make()


def first_of(board: Posts, beat: Callable[[], None] = lambda: None) -> First:
    """`First` over a board.

    What a user can mend (ValueError) and what ends a run (RunFailed) is raised in every process, with the same words.
    Anything else is process 0's: the others wait until they hear that it has ended. For as long as it works they wait
    as well, since its own watchdog sees whether it does; `beat` tells theirs.
    """

    def first(name: str, make: Callable[[], str]) -> str:
        key = f"first/{name}"
        if board.process == 0:
            try:
                found = make()
            except (ValueError, RunFailed) as error:
                kind = "RunFailed" if isinstance(error, RunFailed) else "ValueError"
                board.put(key, json.dumps([kind, str(error)]).encode())
                raise
            board.put(key, json.dumps(["", found]).encode())
            return found
        while (told := board.get(key, _LOOK_S)) is None:
            beat()
        kind, text = json.loads(told)
        if kind:
            raise _KINDS[kind](text)
        return text

    return first
