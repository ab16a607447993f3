"""Cases of a benchmark that do next to nothing. The processes of `bench.worker` import this alone, and not jax."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

Ask = Callable[[dict[str, Any]], dict[str, Any] | None]


def echo(spec: str, ask: Ask) -> None:
    """A case that answers with what it was sent."""
    values: dict[str, Any] = {"spec": spec, "pid": os.getpid()}
    while (request := ask(values)) is not None:
        if request.get("fail"):
            raise OSError("broken in the worker")
        if request.get("die"):
            os._exit(3)
        values = {"seconds": 0.0, "got": request.get("x")}


def refuse(spec: str, ask: Ask) -> None:
    raise ValueError(f"--what ({spec}) must be otherwise")
