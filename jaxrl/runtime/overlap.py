"""Rollout and update at the same time, each on devices of its own (`rollout.num_devices`; RollPacker §6.7).

Purpose: `Overlap` is `jaxrl.loop.Together` on a real machine. The rollout keeps the calling thread, whose host loop
feeds its devices plan by plan; the update has another, which mostly waits for its own. Neither reads what the other
writes: weights pass from the trainer to the rollout only between the two. On CPU, programs of several devices run one
after another whatever their threads (design §5), so only submeshes of one device overlap there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Overlap:
    """Implements `jaxrl.loop.Together`.

    Attributes:
      busy: whether two things are being done. A stop that is asked for then has to wait: the update cannot be taken
        back, and its step ends with both.
    """

    def __init__(self) -> None:
        self.busy = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="update")

    def __call__(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """`first` in this thread, `second` in another. What either raises is raised once both have ended: of two
        errors that of `second`, from the other."""
        self.busy = True
        try:
            other = self._threads.submit(second)
            try:
                mine = first()
            except BaseException as error:
                beside = other.exception()  # waits
                if beside is not None:
                    raise beside from error
                raise
            return mine, other.result()
        finally:
            self.busy = False

    def close(self) -> None:
        self._threads.shutdown()
