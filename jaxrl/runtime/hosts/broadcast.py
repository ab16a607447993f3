"""What one process finds out comes to all: what process 0 alone looks for, or what any of them has found.

Purpose: some of a start reads much (a checkpoint compared with its checksums, of which each process has a share), and
every process must come to the same conclusion, also where a disk gives one of them another answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from jaxrl.runtime.hosts.key_value_store import KeyValueStore
from jaxrl.types import RunFailed

Broadcast = Callable[[str, Callable[[], str]], str]
"""(name, make): what `make` returns in process 0, in every process. Each name once."""

_LOOK_S = 1.0
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "RunFailed": RunFailed}


def broadcast_from_rank0(store: KeyValueStore, beat: Callable[[], None] = lambda: None) -> Broadcast:
    """`Broadcast` over a store.

    What a user can mend (ValueError) and what ends a run (RunFailed) is raised in every process, with the same words.
    Anything else is process 0's: the others wait until they learn that it has ended. For as long as it works they wait
    as well, since its own watchdog sees whether it does; `beat` tells theirs.
    """

    def first(name: str, make: Callable[[], str]) -> str:
        key = f"first/{name}"
        if store.process == 0:
            store.put(key, _tried(make))
        return _answer(store, key, beat)

    return first


def broadcast_from_any(store: KeyValueStore, beat: Callable[[], None] = lambda: None) -> Broadcast:
    """All processes make a text; each gets that of the first whose text is not empty, or whose error is one of those of
    `broadcast_from_rank0`; empty where all are. The rest is as there."""
    first = broadcast_from_rank0(store, beat)

    def any_of(name: str, make: Callable[[], str]) -> str:
        if store.process != 0:
            store.put(f"any/{name}/{store.process}", _tried(make))
            return first(name, make)
        others = range(1, store.num_processes)
        answers = (_answer(store, f"any/{name}/{other}", beat) for other in others)
        return first(name, lambda: make() or next(filter(None, answers), ""))

    return any_of


def _tried(make: Callable[[], str]) -> bytes:
    """What `make` returns or raises, for `_answer`."""
    try:
        kind, text = "", make()
    except (ValueError, RunFailed) as error:
        kind, text = "RunFailed" if isinstance(error, RunFailed) else "ValueError", str(error)
    return json.dumps([kind, text]).encode()


def _answer(store: KeyValueStore, key: str, beat: Callable[[], None]) -> str:
    while (written := store.get(key, _LOOK_S)) is None:
        beat()
    kind, text = json.loads(written)
    if kind:
        raise _KINDS[kind](text)
    return text
