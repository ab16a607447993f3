"""Programs that are compiled once for each shape of their arguments, ahead of time or on demand.

Programs are compiled side by side in the background; a thread that needs a program waits for that program only.
Compiling releases the interpreter, tracing does not: a program of 28 layers is traced in about a second and takes XLA
ten for a GPU, so one thread per core shares the work well.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

_CARRIED = ("enable_x64", "default_matmul_precision")
"""Settings of jax that decide what a program is, and that `with` changes for one thread only."""
_MOST_THREADS = 8  # each holds a program's intermediate forms, of large models gigabytes


def products_of(dtype: Any, platform: str) -> AbstractContextManager[Any]:
    """A context for tracing in which products of float32 arrays have float32 precision, not TF32's (GPUs) or
    bfloat16's (TPUs)."""
    if platform == "cpu" or jnp.dtype(dtype).itemsize < 4:
        return nullcontext()
    return jax.default_matmul_precision("highest")


Meet = Callable[[str], None]
"""Returns once all processes are about to run the program of a name for the first time."""


def alone(name: str) -> None:
    """`Meet` for a run of one process."""


class CompiledPrograms:
    """Programs of one mesh, each compiled once. Subclasses say which shapes there are, and how one is lowered.

    Attributes:
      meet: on a mesh over several processes, where they meet after all have compiled a program.
      is_warm: all expected shapes are compiled; later compilations count in `recompiles`.
    """

    def __init__(self) -> None:
        self.is_warm = False
        self.recompiles = 0
        self.meet: Meet = alone
        self._met: set[Any] = set()
        self._compiled: dict[Any, Future[Any]] = {}
        self._lock = threading.Lock()

    def shapes(self) -> Sequence[Any]:
        """Every shape that can be needed, in the order of first use."""
        raise NotImplementedError

    def lower(self, *shape: Any, **named: Any) -> Any:
        """Traces the program of a shape for this mesh's devices."""
        raise NotImplementedError

    def compiler_options(self, kind: str) -> dict[str, Any]:
        del kind
        return {}

    def compile(self, shape: Any) -> Any:
        return self.lower(*shape).compile(compiler_options=self.compiler_options(shape[0]))

    def program(self, shape: Any) -> Any:
        """The compiled program of a shape (a name and sizes); compiles it if no thread has."""
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

    def to_run(self, shape: Any) -> Any:
        """`program`, for the thread that runs it next. Before the first time, all processes meet.

        A program's first collective connects its devices, and gives up after 30 s (gloo): a process that finds it in
        its cache would wait longer for one that compiles.
        """
        found = self.program(shape)
        if shape not in self._met:
            self._met.add(shape)
            self.meet(" ".join(map(str, shape)))
        return found

    def complete(self, on_program: Callable[[], None] = lambda: None) -> None:
        """Compiles every shape that no other thread has begun, and waits for the others. Calls `on_program` after
        each."""
        for shape in self.shapes():
            self.program(shape)
            on_program()
        self.is_warm = True


class CompileAhead:
    """Compiles programs in background threads, all shapes of one set before the next; `close` drops what has not
    begun."""

    def __init__(self, every: Sequence[CompiledPrograms], num_threads: int | None = None) -> None:
        carry = _settings_of_this_thread()
        left = {id(programs): len(programs.shapes()) for programs in every}
        lock = threading.Lock()

        def compile_one(programs: CompiledPrograms, shape: Any) -> None:
            with carry():
                programs.program(shape)
            with lock:
                left[id(programs)] -= 1
                programs.is_warm |= not left[id(programs)]

        self._began_s, self._num_threads = time.monotonic(), num_threads or compile_threads()
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="compile-ahead")
        self._jobs = [
            (shape, self._pool.submit(compile_one, programs, shape))
            for programs in every
            for shape in programs.shapes()
        ]

    def wait(self, progress: Callable[[str], None] = lambda state: None) -> int:
        """Waits for all; returns the number of programs. `progress`: called with `state` when it changes."""
        progress(self.state())
        for job in as_completed([job for _, job in self._jobs]):
            job.result()
            progress(self.state())
        return len(self._jobs)

    def state(self) -> str:
        """What is compiled now, how many are ready, and about how long the rest will take; empty once all are."""
        left = [shape for shape, job in self._jobs if not job.done()]
        if not left:
            return ""
        names = [" ".join([kind, *("×".join(map(str, sizes)),) * any(sizes)]) for kind, *sizes in left]
        done, now = len(self._jobs) - len(left), ", ".join(names[: self._num_threads])
        left_s = (time.monotonic() - self._began_s) * len(left) / done if done else 0
        return f"{done} of {len(self._jobs)} programs ready{f', about {left_s:.0f} s left' if done else ''}: {now}"

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def compile_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_THREADS)


def _settings_of_this_thread() -> Callable[[], Any]:
    """A context that gives another thread the settings that the caller has now."""
    values = {name: getattr(jax.config, f"jax_{name}") for name in _CARRIED}

    @contextmanager
    def carried() -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in values.items():
                stack.enter_context(getattr(jax, name)(value))
            yield

    return carried
