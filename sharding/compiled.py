"""Programs that are compiled once for each shape of their arguments, before they are needed or when they are.

Purpose: the rollout (`jaxrl.rollout.layout_programs`) and the update (`jaxrl.train.programs`) both know the shapes of
their arguments before there are any, so a thread in the background can compile while another one works. A thread that
needs a program meanwhile waits for that program only.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any


class CompiledPrograms:
    """Programs of one mesh, each compiled once. Subclasses say how (`compile`).

    Attributes:
      is_warm: all expected shapes are compiled; what is compiled later counts in `recompiles`.
    """

    def __init__(self) -> None:
        self.is_warm = False
        self.recompiles = 0
        self._compiled: dict[Any, Future[Any]] = {}
        self._lock = threading.Lock()

    def compile(self, shape: Any) -> Any:
        """The program of a shape (a name and sizes), compiled for this mesh's devices."""
        raise NotImplementedError

    def program(self, shape: Any) -> Any:
        """The compiled program of a shape; compiles it if no thread has."""
        with self._lock:
            found = self._compiled.get(shape)
            is_mine = found is None
            if found is None:
                found = self._compiled[shape] = Future()
                self.recompiles += self.is_warm
        if is_mine:
            try:
                found.set_result(self.compile(shape))
            except BaseException as error:
                with self._lock:
                    del self._compiled[shape]  # the next caller tries again
                found.set_exception(error)
        return found.result()

    @property
    def compiled_shapes(self) -> list[Any]:
        """The shapes whose programs have been compiled, or are about to be."""
        with self._lock:
            return list(self._compiled)
