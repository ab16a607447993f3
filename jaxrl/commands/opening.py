"""How a run that trains begins, up to the first import of jax: its processes, its folder, its watchdog.

Purpose: what `jaxrl train`, `jaxrl sft` and `jaxrl dpo` have in common before they read their data. The order of a
start stands in docs/architecture.md, "Starting a run".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl.config import Config, ConfigError
from jaxrl.record.journal import FILE_NAME as JOURNAL
from jaxrl.record.journal import read_journal
from jaxrl.record.progress import StartupProgress
from jaxrl.record.run_dir import RunDir
from jaxrl.record.run_record import RunOutcome
from jaxrl.record.sinks import sink_package
from jaxrl.record.watchdog import Watchdog
from jaxrl.runtime.cache_folder import with_cache_folder
from jaxrl.runtime.stop import Stop, end
from jaxrl.train.steps import find_step, steps_of

if TYPE_CHECKING:
    from jaxrl.runtime.cluster import Cluster

Hosts = Callable[[Callable[[str], None]], AbstractContextManager["Cluster"]]
"""Starts the hosts of a run, and tells the watchdog of progress."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A run whose folder is open, and of which nothing is read yet.

    Attributes:
      earlier: the configuration of the start before; None: there was none.
      say: shows a line.
      began_s: of `time.monotonic`.
      hosts: starts the hosts of which this is the controller; None: this one has the devices.
      stages: what is said of the start while it goes on.
      stack: closed at the end of the run.
    """

    config: Config
    run_dir: RunDir
    earlier: Config | None
    stop: Stop
    watchdog: Watchdog
    say: Callable[[str], None]
    began_s: float
    hosts: Hosts | None
    stages: StartupProgress
    stack: ExitStack


def open_run(
    kind: str,
    config: Config,
    go: Callable[[Opened], RunOutcome],
    say: Callable[[str], None] = print,
    stop: Stop | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> RunOutcome:
    """Opens the run that `config` describes, has `go` run it, and closes it however that ends.

    Args:
      kind: the command that trains.
      say: shows a line.
      stop: the signals of the program; without one they are the caller's.
      progress: shows a line of what takes long before the first step; called from another thread.

    Raises:
      ValueError: for what a user can mend.
    """
    stop = stop or Stop()
    _refuse_no_folder(config)
    run = _open if config.hosts.num == 1 else _control
    return run(kind, config, go, say, stop, progress)


def _control(
    kind: str,
    config: Config,
    go: Callable[[Opened], RunOutcome],
    say: Callable[[str], None],
    stop: Stop,
    progress: Callable[[str], None],
) -> RunOutcome:
    """The run of hosts elsewhere, started again from the newest checkpoint where one is lost."""
    from jaxrl.runtime.cluster import HostLost, open_cluster  # loads jax

    left, saved, bundle = config.hosts.max_restarts, -1, None

    @contextmanager
    def hosts(beat: Callable[[str], None]) -> Iterator[Cluster]:
        nonlocal bundle
        beat(f"starting {config.hosts.num} hosts")
        with open_cluster(config.hosts, beat, bundle) as cluster:
            bundle = cluster.bundle
            yield cluster

    while True:
        try:
            return _open(kind, config, go, say, stop, progress, hosts)
        except HostLost as error:
            now = max(steps_of(Path(config.trainer.run_dir).expanduser() / "checkpoints"), default=-1)
            left, saved = (config.hosts.max_restarts if now > saved else left) - 1, now
            if left < 0:
                raise
            say(f"{error}; starting all hosts again from {f'step {now}' if now >= 0 else 'the beginning'}")


def _open(
    kind: str,
    config: Config,
    go: Callable[[Opened], RunOutcome],
    say: Callable[[str], None],
    stop: Stop,
    progress: Callable[[str], None],
    hosts: Hosts | None = None,
) -> RunOutcome:
    began_s = time.monotonic()
    with ExitStack() as stack:
        run_dir = stack.enter_context(closing(RunDir(config.trainer.run_dir, kind=kind)))
        stages = stack.enter_context(closing(StartupProgress(progress)))
        timeout_s, ended = config.trainer.hang_timeout_s, partial(end, status=1)
        watchdog = Watchdog(timeout_s, ended, lambda doing: stages.begin(doing) if doing else None)
        stack.enter_context(closing(watchdog))
        run_dir.refuse_other_kind()
        earlier = run_dir.earlier
        read_journal(run_dir.file(JOURNAL))  # refused if damaged, before anything that takes long
        if config.trainer.init_from:
            find_step(config.trainer.init_from, option="trainer.init_from")
        for name in config.trainer.logger:
            sink_package(name)
        config = with_cache_folder(config)
        return go(Opened(config, run_dir, earlier, stop, watchdog, say, began_s, hosts, stages, stack))


def _refuse_no_folder(config: Config) -> None:
    if not config.trainer.run_dir:
        raise ConfigError("trainer.run_dir is missing: give the folder that the run writes to and resumes from")
