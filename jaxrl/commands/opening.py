"""How a run that trains begins, up to the first import of jax: its processes, its folder, its watchdog.

Purpose: what `jaxrl train`, `jaxrl sft` and `jaxrl dpo` have in common before they read their data. The order of a
start stands in docs/architecture.md, "Starting a run".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl.config import Config, ConfigError
from jaxrl.record.integrity import refuse_damaged
from jaxrl.record.progress import StartupProgress
from jaxrl.record.run_dir import FollowerRunDir, RunDir
from jaxrl.record.run_record import RunOutcome
from jaxrl.record.sinks import sink_package
from jaxrl.record.watchdog import Watchdog
from jaxrl.runtime.cache_folder import with_cache_folder
from jaxrl.runtime.hosts.environment import COORDINATOR
from jaxrl.runtime.stop import Stop, end
from jaxrl.train.steps import find_step, steps_of

if TYPE_CHECKING:
    from jaxrl.runtime.cluster import Cluster
    from jaxrl.runtime.hosts.world import World


@dataclass(frozen=True, slots=True)
class Opened:
    """A run whose folder is open, and of which nothing is read yet.

    Attributes:
      earlier: the configuration of the start before; None: there was none.
      say: shows a line; of several processes, the first one's.
      began_s: of `time.monotonic`.
      world: of several processes; None: this one is alone.
      cluster: the hosts of which this is the controller; None: this one has the devices.
      stages: what is said of the start while it goes on.
      stack: closed at the end of the run.
    """

    config: Config
    run_dir: RunDir | FollowerRunDir
    earlier: Config | None
    stop: Stop
    watchdog: Watchdog
    say: Callable[[str], None]
    began_s: float
    world: World | None
    cluster: Cluster | None
    stages: StartupProgress
    stack: ExitStack


def launched(
    config: Config,
    arguments: Sequence[str],
    stop: Stop | None,
    *,
    writes: bool = True,
    check: Callable[[Config], object] = lambda config: None,
) -> int:
    """Runs a command on several hosts, each process of which does what this one would do without a launcher.

    Args:
      arguments: `train`, or another command that takes a configuration, and all that it was given.
      writes: whether it writes to the run directory.
      check: refuses what can be refused once, and not on every host.

    Returns:
      The exit status.
    """
    from jaxrl.runtime.hosts.launch import launch

    if writes:
        _refuse_no_folder(config)
        check(config)
    return launch(config, arguments, stop or Stop(), writes=writes)


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
      say: shows a line; of several processes, the first one says what there is to say.
      stop: the signals of the program; without one they are the caller's.
      progress: shows a line of what takes long before the first step; called from another thread.

    Raises:
      ValueError: for what a user can mend.
    """
    stop = stop or Stop()
    if config.hosts.launcher == "ray":
        return _control(kind, config, go, say, stop, progress)
    if config.hosts.num == 1 and not (config.hosts.coordinator or os.environ.get(COORDINATOR)):
        return _open(kind, config, go, say, stop, None, progress)
    from jaxrl.runtime.hosts.world import open_world  # loads jax

    with open_world(config.hosts, stop) as world:
        return _open(kind, config, go, say, stop, world, progress)


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

    left, saved = config.hosts.max_restarts, -1
    _refuse_no_folder(config)
    while True:
        progress(f"starting {config.hosts.num} hosts ...")
        try:
            with open_cluster(config.hosts) as cluster:
                return _open(kind, config, go, say, stop, None, progress, cluster)
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
    world: World | None,
    progress: Callable[[str], None],
    cluster: Cluster | None = None,
) -> RunOutcome:
    """`world`: of several processes, of which process 0 writes the run's files; None: this one is alone."""
    began_s = time.monotonic()
    _refuse_no_folder(config)
    with ExitStack() as stack:
        folder, process = config.trainer.run_dir, 0 if world is None else world.process
        opened = FollowerRunDir(folder, process, kind=kind) if process else RunDir(folder, kind=kind)
        run_dir = stack.enter_context(closing(opened))
        stages = stack.enter_context(closing(StartupProgress(progress if run_dir.leads else _silent)))
        watchdog = _watchdog(config, world, stages)
        stack.enter_context(closing(watchdog))
        run_dir.refuse_other_kind()
        earlier = run_dir.earlier
        refuse_damaged(run_dir)
        if config.trainer.init_from:
            find_step(config.trainer.init_from, option="trainer.init_from")
        for name in config.trainer.logger:
            sink_package(name)
        config = with_cache_folder(config)
        told = say if run_dir.leads else _silent
        return go(Opened(config, run_dir, earlier, stop, watchdog, told, began_s, world, cluster, stages, stack))


def _refuse_no_folder(config: Config) -> None:
    if not config.trainer.run_dir:
        raise ConfigError("trainer.run_dir is missing: give the folder that the run writes to and resumes from")


def _watchdog(config: Config, world: World | None, stages: StartupProgress) -> Watchdog:
    """The run's watchdog. Of several processes it ends all, and what it hears of progress counts for them too."""
    timeout_s = config.trainer.hang_timeout_s
    if world is None or world.num_processes == 1:
        return Watchdog(timeout_s, partial(end, status=1), lambda doing: stages.begin(doing) if doing else None)
    barrier = world.barrier

    def heard(doing: str) -> None:
        if doing:
            barrier.at(doing)
            stages.begin(doing)
        else:
            barrier.beat()

    return Watchdog(timeout_s, barrier.fail, heard, lambda: barrier.waits)


def _silent(line: str) -> None:
    """Another process says it."""
