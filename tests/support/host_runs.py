"""Whole runs of a tiny model on several hosts of this machine, whose processes are watched, killed and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from runs import PATIENCE_S, WIDE, Runs, assert_same_end
from watched_run import FOLDER, KEEPS, Fault

PROGRAM = Path(__file__).with_name("watched_run.py")
SMALL = (
    *("data.max_prompt_length=20", "data.max_response_length=12", "actor.ppo_max_token_len_per_gpu=32"),
    *("rollout.block_size=32", "rollout.num_blocks=9"),
)
"""Few programs."""


RULES = {
    "plain": (),
    "tail batching and dynamic sampling": (
        "rollout.tail_batching.enable=true",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=20",
    ),
    "partial rollout": ("rollout.partial_rollout.enable=true",),
    "one step off": ("trainer.one_step_off=true", "actor.old_logprobs=rollout"),
}
TIMES = (
    "time",
    "timing_s/",
    "perf/",
    "hosts/",
    "reward/busy_s",
    "reward/seconds",
    "reward/hidden",
    "rollout/recompiles",
    "actor/rec",
    "critic/rec",
    "reward/pool_restarts",  # of whichever scorer died beside it
    "reward/retries",
)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a run: `command`, `guard`, `agent`, `process` (of the run) or `other` (what these have started)."""

    pid: int
    kind: str
    number: int  # of the host; the command has none: -1


class HostRun:
    """A command on several hosts of this machine, and all that it has started.

    Args:
      overrides: on top of `runs.config`.
      hosts: what starts the processes.
      keeps: whether all processes find their compiled programs again, and not only process 0.
      cache: where they keep them; by default in a folder that the runs of one test share.
    """

    def __init__(
        self,
        runs: Runs,
        run_dir: Path,
        *overrides: str,
        num: int = 2,
        hosts: Sequence[str] = ("hosts.launcher=local", "hosts.devices_per_host=1"),
        keeps: bool = True,
        cache: Path | None = None,
    ) -> None:
        self.run_dir, self.watched = run_dir, run_dir.with_name(f"{run_dir.name}.watched")
        self.watched.mkdir()
        self._runs, self._num, self._keeps = runs, num, keeps
        self.cache = cache or runs.folder / "programs"
        self._overrides = (*WIDE, f"hosts.num={num}", *hosts, *overrides)
        self._command: subprocess.Popen[str] | None = None
        self._outputs = 0

    # -- the command -------------------------------------------------------------------------------------------------

    def start(self, *overrides: str, faults: Sequence[Fault] = ()) -> subprocess.Popen[str]:
        """The same command again once the one before has ended."""
        assert self._command is None or self._command.poll() is not None
        (self.watched / "plan.json").write_text(json.dumps([asdict(each) for each in faults]))
        for old in (self.watched / "places").glob("*"):
            old.unlink()
        self._outputs += 1
        with self.output.open("w") as output:
            self._command = self._runs.start(
                self.run_dir,
                *self._overrides,
                *overrides,
                stdout=output,
                program=(str(PROGRAM), "train"),
                environment={
                    FOLDER: str(self.watched),
                    **({KEEPS: "1"} if self._keeps else {}),
                    "JAX_COMPILATION_CACHE_DIR": str(self.cache) if self._keeps else "",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
        return self._command

    @property
    def command(self) -> subprocess.Popen[str]:
        assert self._command is not None
        return self._command

    @property
    def output(self) -> Path:
        """What the command that was started last has printed."""
        return self.watched / f"output.{self._outputs}"

    def end(self, status: int = 0) -> str:
        """Its output, once it has ended with a status, and with nothing left of it."""
        try:
            self.command.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said()}") from None
        self.assert_nothing_left()
        assert self.command.returncode == status, self.said()
        return self.output.read_text()

    def said(self) -> str:
        """All that was printed, for a message."""
        logs = sorted(self.run_dir.glob("hosts/*.log"))
        places = {i: self.place(i) for i in range(self._num)}
        return "\n".join(
            [f"{places}", self.output.read_text(), *(f"{log}:\n{log.read_text()[-4000:]}" for log in logs)]
        )

    def finish(self, *overrides: str) -> str:
        self.start(*overrides)
        return self.end()

    def close(self) -> None:
        """Ends what is left, whatever has gone wrong."""
        if self._command is not None:
            self._command.kill()
            self._command.wait()
        for pid in self.living():
            _kill(pid)

    def __enter__(self) -> HostRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- processes ---------------------------------------------------------------------------------------------------

    def living(self) -> dict[int, str]:
        """Every process that the command or anything below it has started, by pid with its command line."""
        mark, found = f"{FOLDER}={self.watched}\0".encode(), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):  # gone, or another user's
                    if mark in (entry / "environ").read_bytes() + b"\0":
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def processes(self) -> list[Process]:
        """What lives of the run, with what each is."""
        living = self.living()
        parents = {pid: parent for pid in living if (parent := parent_of(pid)) is not None}
        numbers = {
            pid: n for pid, text in living.items() if PROGRAM.name in text and (n := _number_of(pid)) is not None
        }
        mains = {pid: n for pid, n in numbers.items() if parents.get(pid) not in numbers}
        found, kinds = [], {self.command.pid: ("command", -1)}
        for pid, number in mains.items():
            kinds[pid] = "process", number
            if (agent := parents.get(pid)) in living:
                kinds[agent] = "agent", number
                if (guard := parents.get(agent)) in living:
                    kinds[guard] = "guard", number
        for pid in living:
            found.append(Process(pid, *kinds.get(pid, ("other", -1))))
        return found

    def pid_of(self, kind: str, number: int = -1) -> int | None:
        return next((each.pid for each in self.processes() if (each.kind, each.number) == (kind, number)), None)

    def assert_nothing_left(self, patience_s: float = 15.0) -> None:
        gone_after(list(self.living()), patience_s)
        left = self.living()
        for pid in left:
            _kill(pid)
        assert not left, f"left behind: {left}"

    # -- places ------------------------------------------------------------------------------------------------------

    def where(self, process: int) -> tuple[int, str]:
        """The pid of a process and where it is; of one that was killed, where it was. 0 where none has told."""
        with suppress(OSError, ValueError):
            pid, _, place = (self.watched / "places" / str(process)).read_bytes().decode().strip("\0 ").partition(" ")
            return int(pid), place
        return 0, ""

    def place(self, process: int) -> str:
        return self.where(process)[1]

    def trace(self, process: int) -> list[list[tuple[float, str]]]:
        """Of each start of a process, when (`time.time`) it came to which place."""
        starts: dict[int, list[tuple[float, str]]] = {}
        for line in (self.watched / "traces" / str(process)).read_text().splitlines():
            at_s, pid, place = line.split(" ", 2)
            starts.setdefault(int(pid), []).append((float(at_s), place))
        return list(starts.values())

    def until(self, is_there: Callable[[], bool], patience_s: float = PATIENCE_S, look_s: float = 0.0005) -> None:
        """Waits while the command goes on."""
        deadline = time.monotonic() + patience_s
        while not is_there():
            assert self.command.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(look_s)

    def until_at(self, process: int, *words: str) -> None:
        """Until a process is at a place whose name contains one of the words."""
        self.until(lambda: any(word in self.place(process) for word in words))

    @property
    def wrong(self) -> tuple[float, str]:
        """When the first fault came (seconds of `time.time`), and what it was."""
        at_s, _, what = (self.watched / "wrong").read_text().partition(" ")
        return float(at_s), what

    @property
    def saved(self) -> int | None:
        """The step of the last checkpoint, as run.json has it."""
        with suppress(OSError, ValueError):
            return json.loads((self.run_dir / "run.json").read_text()).get("checkpoint")
        return None


def gone_after(pids: Sequence[int], patience_s: float) -> float:
    """Seconds until none of them lives (a process that nobody has waited for yet does not); at most `patience_s`."""
    began = time.monotonic()
    while any(is_living(pid) for pid in pids) and time.monotonic() - began < patience_s:
        time.sleep(0.002)
    return time.monotonic() - began


def assert_same_run(run_dir: Path, other: Path, *without: str) -> None:
    """The same checkpoint (queues included), metrics without times and those whose names begin with `without`, and
    samples."""
    with jax.enable_x64(True):
        assert_same_end(run_dir, other)
    assert lines(run_dir / "samples.jsonl") == lines(other / "samples.jsonl")
    ours, theirs = lines(run_dir / "metrics.jsonl"), lines(other / "metrics.jsonl")
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        differing = {name: (a.get(name), b.get(name)) for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
        assert not [name for name in differing if not name.startswith((*TIMES, *without))], differing


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def is_living(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def started_s(pid: int) -> float:
    """When a process began, of the clock that counts from the boot."""
    with suppress(OSError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def parent_of(pid: int) -> int | None:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _number_of(pid: int) -> int | None:
    """As `JAXRL_PROCESS_ID` of a process."""
    with suppress(OSError, KeyError):
        variables = dict(
            each.split("=", 1) for each in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in each
        )
        return int(variables["JAXRL_PROCESS_ID"])
    return None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
