"""A run of any kind of training: its folder, its hosts, its checkpoints, its record, and how it ends.

docs/architecture.md, "Starting a run", has the order of a start: what can be refused at once is refused first, jax is
loaded after that, and nothing is written before all is known to fit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.config import Config, ConfigError
from jaxrl.config.inputs import read_json
from jaxrl.mechanisms import page_parts
from jaxrl.record.files import reason, refuse_folder, way_on
from jaxrl.record.journal import FILE_NAME as JOURNAL
from jaxrl.record.journal import read_journal
from jaxrl.record.progress import StartupProgress
from jaxrl.record.run_dir import RunDir, recorded_start
from jaxrl.record.run_record import RunOutcome, RunRecord
from jaxrl.record.watchdog import Watchdog
from jaxrl.run.stop import Stop, end
from jaxrl.training.steps import HOST, find_step, steps_of
from jaxrl.types import HostLost, RunFailed

if TYPE_CHECKING:
    from jaxrl.data.prompts import PromptSource
    from jaxrl.data.tokenizer import Tokenizer
    from jaxrl.models.config import ModelConfig
    from jaxrl.run.cluster import Cluster, RemoteHost
    from jaxrl.run.host import Host

_log = logging.getLogger(__name__)
Hosts = Callable[[Callable[[str], None]], AbstractContextManager["Cluster"]]
"""Starts the hosts of a run, and reports progress to the watchdog."""


class Training:
    """A run from its folder to its summary; closed with `stack`. Its methods are called in the order in which they
    stand.

    Attributes:
      earlier: the configuration of the start before, if there was one. changes: the differences to it.
      said: notes that are shown once nothing is refused any more.
      host: has the devices. devices: what is known of them. tokenizer, model: of `model.path`.
      step: that the run has reached. resuming: whether a checkpoint has it. init_from: the one it begins with.
    """

    tokenizer: Tokenizer
    model: ModelConfig
    total_steps: int
    record: RunRecord

    def __init__(
        self,
        kind: str,
        config: Config,
        say: Callable[[str], None],
        stop: Stop,
        progress: Callable[[str], None],
        stack: ExitStack,
        hosts: Hosts | None,
    ) -> None:
        self.config, self.say, self.stop, self.stack, self._hosts = config, say, stop, stack, hosts
        self._began_s = time.monotonic()
        self.run_dir = stack.enter_context(closing(RunDir(config.trainer.run_dir, kind=kind)))
        self._stages = stack.enter_context(closing(StartupProgress(progress)))
        timeout_s, ended = config.trainer.hang_timeout_s, partial(end, status=1)
        watchdog = Watchdog(timeout_s, ended, lambda doing: self._stages.begin(doing) if doing else None)
        self.watchdog = stack.enter_context(closing(watchdog))
        self.beat = watchdog.beat
        self.run_dir.refuse_other_kind()
        self.earlier = self.run_dir.earlier
        self.changes: list[str] = []
        self.reward_file = ""  # the checksum of `reward.path`
        read_journal(self.run_dir.file(JOURNAL))  # refused if damaged, before anything that takes long
        if config.trainer.init_from:
            find_step(config.trainer.init_from, option="trainer.init_from")
        if sinks := [name for name in config.trainer.logger if name != "console"]:
            from jaxrl.record.sinks import sink_package

            for name in sinks:
                sink_package(name)
        self.config = with_cache_folder(config)

    def open_devices(self) -> None:
        """Loads jax, which takes a second, and finds the devices, here or on the hosts of a cluster."""
        from jaxrl.run.host import Host, NoGroup

        self.host: Host | RemoteHost
        if self._hosts is None:
            self.host = Host(NoGroup(), self.beat)
        else:
            from jaxrl.run.cluster import RemoteHost

            self.host = RemoteHost(self.stack.enter_context(self._hosts(self.beat)))
        self.devices = self.host.open(self.config, self.run_dir.kind, self.earlier)
        self.config = self.devices.config
        self.said: list[str] = [*self.devices.notes]

    def find_checkpoints(self, *, needs_ref: bool, needs_critic: bool) -> None:
        """Finds the checkpoint that the run resumes or begins from. That reads all of it, which may take minutes: after
        everything that a look at the options could refuse. `needs_ref`: the weights that the run began with are its
        reference."""
        from jaxrl.training.checkpoint import holds_critic

        config = self.config
        self.beat("comparing the checkpoint with its checksums")
        self.store = self.host.open_store(self.run_dir.file("checkpoints"), self._committed)
        chosen = self.store.chosen
        missing = self.run_dir.missing_checkpoint(None if chosen is None else max([chosen.step, *chosen.faults]))
        self.said += [*filter(None, [missing]), *(() if chosen is None else chosen.notes())]
        latest = self.store.latest_step()
        self.step, self.resuming = latest or 0, latest is not None
        self.watchdog.saved_step = latest
        self.said += filter(None, [self.run_dir.missing_journal()])
        saved = self.run_dir.file(f"checkpoints/{self.step}") if self.resuming else None
        self.init_from = None
        # a run that resumes has its weights; only the reference is always that of the beginning, or the base
        if self.model.lora is not None and self.resuming:
            self.init_from = saved
        elif config.trainer.init_from and (needs_ref or not self.resuming):
            self.init_from, notes = self.host.whole_step(config.trainer.init_from)
            self.said += notes
        self._began_with = self._beginning(needs_ref)
        for place in dict.fromkeys((self.init_from, saved)):
            if place is not None:
                self.host.refuse_other_model(place)
        if saved is not None and holds_critic(saved) != needs_critic:
            found, needed = ("no", "needs one") if needs_critic else ("a", "has none")
            raise ConfigError(
                f"checkpoint {saved} holds {found} critic, and "
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} {needed}: resume with the run's estimator, "
                "or begin a run from its parameters (trainer.init_from)"
            )

    def _beginning(self, needs_ref: bool) -> str:
        """The weights that the run began with, as options. No checkpoint of it has them: each start reads them again
        for the reference of a KL loss or of pairs, and for the base of adapters. Raises ConfigError where they would
        be others now."""
        config, has_base = self.config, self.model.lora is not None
        if self.init_from is not None and not has_base:
            now = f"trainer.init_from={self.init_from.resolve()}"
        else:
            path = Path(config.model.path).expanduser()
            now = f"model.path={path.resolve() if path.exists() else config.model.path}"
            now += f" (model.random_init, trainer.seed={config.trainer.seed})" if config.model.random_init else ""
        recorded = (recorded_start(self.run_dir.path) or {}).get("began_with") if self.resuming else None
        if recorded not in (None, now) and (needs_ref or has_base) and self.step < self.total_steps:
            what = "the base of its adapters" if has_base else "its reference"
            raise ConfigError(
                f"{self.run_dir.path} holds a run that began with {recorded}, which is {what}, and now that would be "
                f"{now}: leave it as it was, or choose another trainer.run_dir"
            )
        return recorded or now

    @property
    def is_complete(self) -> bool:
        """Whether the run has had all of its steps: no weights need to be loaded."""
        return self.resuming and self.step >= self.total_steps

    def restored(self) -> dict[str, Any] | None:
        """Restores the models; returns the controller's part of the checkpoint. None where the run does not resume."""
        if not self.resuming:
            return None
        self.beat("restoring the checkpoint")
        return self.host.restore(self.step)

    def refuse_other_data(self, prompts: PromptSource) -> None:
        """Raises ConfigError where the run was saved with other prompts, or the same in another order: before its
        checkpoint is compared with its checksums, which takes minutes for a large one, and which tells of a file that
        cannot be read here."""
        checkpoints = self.run_dir.file("checkpoints")
        try:
            saved = read_json(checkpoints / f"{steps_of(checkpoints)[-1]}/{HOST}/metadata")["values"]["data"]
        except (OSError, ValueError, LookupError, TypeError):
            return
        try:
            prompts.load_state(saved)
            prompts.position = 0  # until the checkpoint is restored
        except ValueError as error:
            raise self.other_data(error) from None

    def other_data(self, error: ValueError) -> ConfigError:
        """The refusal of a run that was saved with other data."""
        path = self.run_dir.path
        changed = [line for line in self.changes if line.startswith(("data.", "model.path:"))]
        return ConfigError(
            f"{path} holds a run with other data ({'; '.join(changed) or 'the files have changed'}): {error}; choose "
            f"another trainer.run_dir, with trainer.init_from={path} to begin from its parameters"
        )

    def begin(self) -> None:
        """The first writes: nothing about the start is refused any more."""
        found, record = self.devices, self.record
        described = {"platform": found.backend, "kind": found.kind, "count": found.count}
        self.beat("opening what trainer.logger names")
        record.metrics.open_sinks()  # the last that can fail; a signal does not wait for the network
        before = recorded_start(self.run_dir.path) or {}
        if self.resuming and (old := before.get("devices", described)) != described:
            devices = f"{old['count']} × {old['kind']} -> {found.count} × {found.kind}"
            self.changes = [*self.changes, f"devices: {devices}"]
        if self.resuming and before.get("reward_file", self.reward_file) != self.reward_file:
            self.changes = [*self.changes, f"reward.path: the text of {self.config.reward.path or 'the reward'}"]
        with self.stop.held():
            newest = self.step if self.resuming else None
            more = {"began_with": self._began_with, "reward_file": self.reward_file}
            self.run_dir.record_start(self.config, described, self.step, checkpoint=newest, **more)
            self.store.tidy()
            record.begin()
            self.host.use_compilation_cache()
        if self.resuming:
            self.said += self.run_dir.resuming(self.changes, self.step, self.total_steps)
        for line in self.said:
            self.say(line)
        self._stages.close()

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        self.host.save(step, state)

    def _committed(self, step: int) -> None:
        """A checkpoint is complete; in the thread that wrote it."""
        self.run_dir.record_checkpoint(step)
        self.watchdog.saved_step = step

    def go(self, train: Callable[[ExitStack], Mapping[str, str]]) -> RunOutcome:
        """Opens the record, trains, and writes the summary; a complete run gets only its page anew. Raises RunFailed
        where the system refused a file or memory, with how to continue.

        `train` trains up to `total_steps`, or until a stop is requested, and sets `step`. It calls `begin` once nothing
        can refuse the start any more, and returns lines for the summary. What it enters is closed.
        """
        with self._failures():
            return self._already_complete() if self.is_complete else self._train(train)

    def _already_complete(self) -> RunOutcome:
        option = "trainer.total_training_steps" if self.config.trainer.total_training_steps else "trainer.total_epochs"
        with closing(self.store):
            self._stages.close()
            report = _write_page(self.run_dir.path)
            of = f"already at step {self.step} of {self.total_steps}"
            unused = f"; what has changed since has no effect: {'; '.join(self.changes)}" if self.changes else ""
            for line in (*self.said, f"{self.run_dir.path}: {of}: raise {option} to continue{unused}"):
                self.say(line)
        return RunOutcome(self.step, True, {"run": str(self.run_dir.path), "steps": of, "report": str(report)})

    def _train(self, train: Callable[[ExitStack], Mapping[str, str]]) -> RunOutcome:
        with ExitStack() as stack:  # however the run ends, everything opened is closed, the last opened first
            stack.enter_context(closing(self.store))
            options: Any = {"total_steps": self.total_steps, "watchdog": self.watchdog}
            resume_step = self.step if self.resuming else -1
            opened = RunRecord(self.config, self.run_dir, resume_step, pieces_of=self.tokenizer.pieces, **options)
            self.record = stack.enter_context(opened)
            lines = train(stack)
            self.beat("waiting for the last checkpoint")
            self.store.wait()
            self.beat("closing the run's files")
        from jaxrl.record.batches import summary_of

        self.beat("writing the report")
        report = _write_page(self.run_dir.path)
        finished = self.step >= self.total_steps
        summary = {
            "run": str(self.run_dir.path),
            "steps": f"{self.step} of {self.total_steps}" + ("" if finished else " (stopped; run again to resume)"),
            **summary_of(self.run_dir.path),
            **lines,
            "time": f"{time.monotonic() - self._began_s:.0f} s",
            "report": str(report),
        }
        self.record.view.final_table(summary)
        return RunOutcome(self.step, finished, summary)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        from jax.errors import JaxRuntimeError

        try:
            yield
        except RunFailed:
            with suppress(OSError, ValueError):  # the cause is more than that its page cannot be written
                _write_page(self.run_dir.path)
            raise
        except OSError as error:
            place = error.filename or self.run_dir.path
            raise RunFailed(f"{place}: {reason(error)}; {self.store.last_good()}: {way_on(error)}") from error
        except JaxRuntimeError as error:
            said = str(error).partition("\n")[0]
            if not said.startswith("RESOURCE_EXHAUSTED"):
                raise
            raise RunFailed(
                f"the memory of the device is full ({self.devices.kind}; {said}); {self.store.last_good()}: "
                "lower rollout.memory_fraction or actor.ppo_max_token_len_per_gpu, or set actor.remat=full, and run "
                "again"
            ) from error


def with_cache_folder(config: Config) -> Config:
    """The configuration, without a compilation cache where its default folder cannot be written; that is warned of.
    Raises ValueError where another folder was given, and cannot be written."""
    folder = config.trainer.compilation_cache_dir
    try:
        if folder:
            refuse_folder(folder, "trainer.compilation_cache_dir")
    except ValueError as error:
        if folder != Config().trainer.compilation_cache_dir:
            raise
        _log.warning("%s: programs are compiled anew at every start; name a folder to keep them", error)
        return config.replace(trainer=config.trainer.replace(compilation_cache_dir=""))
    return config


def refuse_run_dir(config: Config) -> None:
    """Raises ValueError if a run has no folder that it can write."""
    if not config.trainer.run_dir:
        raise ConfigError("trainer.run_dir is missing: give the folder that the run writes to and resumes from")
    refuse_folder(config.trainer.run_dir, "trainer.run_dir")


def run_training(
    kind: str,
    config: Config,
    start: Callable[[Training], RunOutcome],
    say: Callable[[str], None] = print,
    stop: Stop | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> RunOutcome:
    """Runs (or resumes) the training that `config` describes; raises ValueError for what a user can mend. With several
    hosts all of them are started again from the newest checkpoint where one is lost. `start`: puts the run together,
    and has it `go`; `progress`: shows what takes long before the first step, from another thread."""
    refuse_run_dir(config)
    stop, hosts = stop or Stop(), None if config.hosts.num == 1 else _hosts_of(config)
    left, saved = config.hosts.max_restarts, -1
    while True:
        try:
            with ExitStack() as stack:
                return start(Training(kind, config, say, stop, progress, stack, hosts))
        except HostLost as error:
            now = max(steps_of(Path(config.trainer.run_dir).expanduser() / "checkpoints"), default=-1)
            left, saved = (config.hosts.max_restarts if now > saved else left) - 1, now
            if left < 0:
                raise
            say(f"{error}; starting all hosts again from {f'step {now}' if now >= 0 else 'the beginning'}")


def _hosts_of(config: Config) -> Hosts:
    bundle = None

    @contextmanager
    def hosts(beat: Callable[[str], None]) -> Iterator[Cluster]:
        from jaxrl.run.cluster import open_cluster

        nonlocal bundle
        beat(f"starting {config.hosts.num} hosts")
        with open_cluster(config.hosts, beat, bundle) as cluster:
            bundle = cluster.bundle
            yield cluster

    return hosts


def _write_page(folder: Path) -> Path:
    from jaxrl.report.page import write_report

    return write_report(folder, parts=page_parts())
