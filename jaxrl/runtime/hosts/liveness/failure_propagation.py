"""Failure propagation: all processes of a run end with one sentence and one exit status, whichever of them failed.

The first failure that is published counts. A thread of every process waits for it. Process 0 ends last, since the store
ends with it, and jax then aborts the processes that are left.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from jaxrl.runtime.answer import answer, one_line
from jaxrl.runtime.hosts.key_value_store import Disagreement, KeyTaken, KeyValueStore, StoreFailed

T = TypeVar("T")
End = Callable[[str, int], Any]
"""Ends this process with a sentence and an exit status, whichever thread calls it, and does not return."""

_KEY, _GONE = "failed", "gone"
_LISTEN_S = 5.0  # one wait for a failure; the next one follows
_ANSWER_S = 1.0  # for one call to the store by a process that is about to end
_LINGER_S = 3.0  # of process 0, for the others to have heard
_LEAVE_S = 0.3  # and for them to leave, who have said that they heard


class FailurePropagation:
    """The end of this process, and through the store that of all.

    Args:
      lost: a sentence for the case that the store cannot be read any more, from the store's own words.
    """

    def __init__(self, store: KeyValueStore, end: End, lost: Callable[[str], str]) -> None:
        self._store, self._end, self._lost = store, end, lost
        self._taken = threading.Lock()
        self._closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="hosts failure", daemon=True)
        if store.num_processes > 1:
            self._listener.start()

    def end_all(self, sentence: str, status: int = 1, without: tuple[int, ...] = ()) -> NoReturn:
        """Ends all processes.

        Args:
          without: processes that are known to be gone or suspended, which are not waited for.
        """
        self._take()
        failure = {"sentence": one_line(sentence), "status": status, "without": list(without)}
        if self._store.num_processes > 1 and 0 not in without:  # the store goes with process 0
            failure = within(_ANSWER_S, lambda: self._publish(failure)) or failure
        self._end_as(failure)

    def end_all_for(self, error: BaseException, who: str) -> NoReturn:
        """Ends all processes with what an error says on the command line; a bug's traceback stays on this one.

        Args:
          who: failed, and where: `process 1 (host-b) failed in update`.
        """
        match error:
            case Disagreement():
                self.end_all(str(error), 2)
            case KeyboardInterrupt():
                self.end_all(f"{who}: interrupted", 130)
            case SystemExit():
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
                self.end_all(f"{who}: ended with status {status}", status)
        said = answer(error)
        if said is not None:
            self.end_all(f"{who}: {said[0]}", said[1])
        traceback.print_exception(error, file=sys.stderr)
        self.end_all(f"{who}: {type(error).__name__}: {error} (a bug; its traceback is in the output of that process)")

    def close(self) -> None:
        """Nothing can fail any more on any process: all have come here."""
        self._closed.set()
        if self._store.num_processes > 1:
            if self._store.process == 0:
                with suppress(KeyTaken):  # a failure at the last moment is what the others hear
                    self._store.put(_KEY, b"")
            self._listener.join(_LISTEN_S + _ANSWER_S)

    def _take(self) -> None:
        """Only one thread ends the process; any other one stays here."""
        if not self._taken.acquire(blocking=False):
            threading.Event().wait()

    def _publish(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Writes why all end; returns what was written first."""
        try:
            self._store.put(_KEY, json.dumps(failure).encode())
        except KeyTaken:
            first = self._store.get(_KEY, 0)
            return json.loads(first) if first else failure
        except StoreFailed:
            pass
        return failure

    def _end_as(self, failure: Mapping[str, Any]) -> NoReturn:
        store = self._store
        if store.num_processes > 1 and 0 not in failure["without"]:
            within(_ANSWER_S, lambda: store.replace(f"{_GONE}/{store.process}", b""))
            if store.process == 0:
                others = set(range(1, store.num_processes)) - set(failure["without"])
                until_s = time.monotonic() + _LINGER_S
                while time.monotonic() < until_s and not others <= self._gone():
                    time.sleep(0.02)
                time.sleep(_LEAVE_S if others else 0)
        self._end(failure["sentence"], failure["status"])
        raise AssertionError("the process goes on after its end")

    def _gone(self) -> set[int]:
        """The processes that have heard."""
        with suppress(StoreFailed):
            return {int(key.rpartition("/")[2]) for key, _ in self._store.folder(_GONE)}
        return set()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                found = self._store.get(_KEY, _LISTEN_S)
            except StoreFailed as error:
                if self._closed.is_set():
                    return
                self._take()
                self._end(one_line(self._lost(str(error))), 1)  # there is no store left to tell the others by
                return
            if found == b"":
                return
            if found is not None:
                self._take()
                self._end_as(json.loads(found))


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """What `call` returns, if it does so in time and without an error of the store's; it goes on by itself else."""
    found: list[T] = []

    def run() -> None:
        with suppress(StoreFailed):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
