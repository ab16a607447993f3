"""Rollout and update at the same time, each on devices of its own (`rollout.num_devices`; RollPacker §6.7).

Purpose: `ConcurrentPhases` is `jaxrl.mechanisms.one_step_off.session.Concurrently` on a real machine. The rollout stays
in the calling thread, where the host loop feeds its devices plan by plan; the update has a second thread, which mostly
waits for its own devices. Neither reads what the other writes: weights pass from the trainer to the rollout only
between the two, or, where workers may begin with the next round, when the update has ended (`has_ended`). On CPU,
programs over several devices run one after another in any case, so only submeshes of one device overlap there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")


class ConcurrentPhases:
    """Implements `jaxrl.mechanisms.one_step_off.session.Concurrently`.

    Attributes:
      busy: whether two things are running. A stop that is asked for meanwhile has to wait: the update cannot be undone,
        and its step ends only when both have ended.
    """

    def __init__(self) -> None:
        self.busy = False
        self._other: Future[Any] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="update")

    @property
    def has_ended(self) -> bool:
        """Whether the second of two things has ended well; the first asks."""
        return self._other is not None and self._other.done() and self._other.exception() is None

    def __call__(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """Runs `first` in this thread and `second` in another. An exception of either is raised once both have ended;
        if both fail, that of `second`, from that of `first`."""
        self.busy = True
        try:
            other = self._other = self._threads.submit(second)
            try:
                mine = first()
            except BaseException as error:
                beside = other.exception()  # waits
                if beside is not None:
                    raise beside from error
                raise
            return mine, other.result()
        finally:
            self.busy, self._other = False, None

    def close(self) -> None:
        self._threads.shutdown()
