"""A run of parts that a test makes, on a machine without devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.config import Config, from_mapping
from jaxrl.run.run import Run
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.types import Sample


class Machine:
    """Implements `jaxrl.run.mesh_machine.MeshMachine` for mechanisms that compute on no devices. It builds nothing."""

    mesh = None
    platform = "cpu"
    degrees: Sequence[int] = (1,)

    def predictor(self) -> None:
        return None

    def concurrently(self) -> Any:
        raise NotImplementedError

    gradient_streams = index_builder = concurrently

    def release_workers(self, workers: Sequence[int]) -> None: ...

    def wait_quiet(self) -> None: ...

    def on_wait_quiet(self, wait: Callable[[], None]) -> None: ...

    def add_programs(self, programs: Sequence[Any], *, of_update: bool) -> None: ...

    def on_close(self, close: Callable[[], None]) -> None: ...


def made_run(
    workers: Engine | LocalWorkers | None,
    executors: Any,
    scoring: Any,
    *,
    config: Config | None = None,
    text_of: Callable[[Sample], str] = lambda sample: f"{len(sample)} tokens",
    weights: Callable[[], Any] = lambda: None,
    mechanisms: Sequence[Mechanism] = (),
    **more: Any,
) -> Run:
    """A run of these parts; `more`: others of `Run`, by their names."""
    several: Any = LocalWorkers([workers]) if isinstance(workers, Engine) else workers
    machine: Any = Machine()
    return Run(
        config=from_mapping({"model": {"path": "m"}}) if config is None else config,
        workers=several,
        executors=executors,
        machine=machine,
        weights=weights,
        scoring=scoring,
        text_of=text_of,
        mechanisms=tuple(mechanisms),
        **more,
    )


def text_by(tokenizer: Any) -> Callable[[Sample], str]:
    return lambda sample: tokenizer.decode(sample.token_ids.tolist())
