"""Broadcast from process 0: it alone finds something out, and the others get what it found, or its error.

Purpose: some of a start reads much (a checkpoint compared with its checksums), and every process must come to the same
conclusion, also where a disk gives one of them another answer.
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


def local_broadcast(name: str, make: Callable[[], str]) -> str:
    """`Broadcast` in a run of one process."""
    return make()


def broadcast_from_rank0(store: KeyValueStore, beat: Callable[[], None] = lambda: None) -> Broadcast:
    """`Broadcast` over a store.

    What a user can mend (ValueError) and what ends a run (RunFailed) is raised in every process, with the same words.
    Anything else is process 0's: the others wait until they learn that it has ended. For as long as it works they wait
    as well, since its own watchdog sees whether it does; `beat` tells theirs.
    """

    def first(name: str, make: Callable[[], str]) -> str:
        key = f"first/{name}"
        if store.process == 0:
            try:
                found = make()
            except (ValueError, RunFailed) as error:
                kind = "RunFailed" if isinstance(error, RunFailed) else "ValueError"
                store.put(key, json.dumps([kind, str(error)]).encode())
                raise
            store.put(key, json.dumps(["", found]).encode())
            return found
        while (written := store.get(key, _LOOK_S)) is None:
            beat()
        kind, text = json.loads(written)
        if kind:
            raise _KINDS[kind](text)
        return text

    return first
