"""SIGINT and SIGTERM at any moment: one sentence or none, status 130 or 143 (0 where it was saved), no traceback.

A signal while Python itself starts, before the first line of ours, is Python's: it may end the process with a traceback
of Python's own modules, or by the signal's default.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from quick_xla import flags
from runs import PLAIN_REWARD, ROOT
from runs import Runs as TinyRuns

PATIENCE_S = 200.0
pytestmark = pytest.mark.usefixtures("nothing_is_ignored")
INT, TERM = signal.SIGINT, signal.SIGTERM
WORDS = {INT: "jaxrl: interrupted\n", TERM: "jaxrl: terminated\n"}


class Command:
    """A command in a process of its own; its output goes to files, so that nothing waits for a reader."""

    def __init__(self, folder: Path, *arguments: str, python: Sequence[str] = ("-m", "jaxrl")) -> None:
        self._files = [folder / "stdout", folder / "stderr"]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags(1),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(ROOT),
        }
        with open(self._files[0], "wb") as out, open(self._files[1], "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *python, *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    def until(self, happened: Callable[[], bool]) -> None:
        """Waits for something, or for the end of the process."""
        ends = time.monotonic() + PATIENCE_S
        while not happened() and self.process.poll() is None:
            assert time.monotonic() < ends, self.err
            time.sleep(0.002)

    def send(self, *numbers: signal.Signals, between_s: float = 0.3) -> int:
        """Sends signals; returns the exit status."""
        for i, number in enumerate(numbers):
            time.sleep(between_s if i else 0)
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


class Runs:
    """Tiny runs that share a model, data, and jax's compile cache."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        made = TinyRuns(folder, model)
        (folder / "reward.py").write_text(PLAIN_REWARD)
        made.config["data"] |= {"max_prompt_length": 64, "max_response_length": 8, "train_batch_size": 2}
        made.config["rollout"] = {"n": 2, "max_num_seqs": 4, "decode_steps": 4, "warmup": False}
        made.config["actor"] = {"ppo_max_token_len_per_gpu": 128}
        made.config["reward"]["num_workers"] = 1
        cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
        made.config["trainer"] = {"total_training_steps": 400, "save_freq": 3, "compilation_cache_dir": cache}
        (folder / "config.yaml").write_text(yaml.safe_dump(made.config))

    def start(self, name: str, *overrides: str, command: str = "train") -> Command:
        key = "trainer" if command == "train" else "simulate"
        file = self.folder / "config.yaml"
        return Command(self.place(name), command, "--config", str(file), f"{key}.run_dir=run", *overrides)

    def place(self, name: str) -> Path:
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name

    def lines(self, name: str) -> int:
        file = self.folder / name / "run" / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tiny_model)


def left_behind(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.suffix in (".tmp", ".partial")]


def check(command: Command, number: signal.Signals, status: int, *, saved: bool = False) -> None:
    """A run that has begun its loop may have saved; no other command may end with 0 unless it was done."""
    err = command.err
    if "Traceback" in err and not re.search(r"jaxrl/\S*\.py", err):
        return  # Python's own start
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    if status == 0:
        assert saved
        assert err == ""
    elif status != -number:  # the signal's default, before Python took it over
        assert (err, status) == (WORDS[number], 128 + number)
    assert left_behind(command._files[0].parent) == []


def test_while_it_starts_imports_loads_and_compiles(runs: Runs):
    """`test_sixty_moments` has many more moments."""
    for number, after_s in ((INT, 0.1), (TERM, 0.2)):
        name = f"start-{after_s}"
        with runs.start(name) as command:
            time.sleep(after_s)
            check(command, number, command.send(number))
        assert not (runs.folder / name / "run" / "config.yaml").exists()
    with runs.start("load") as command:
        command.until(lambda: (runs.folder / "load" / "run").exists())
        check(command, INT, command.send(INT), saved=True)


def test_in_the_loop_it_saves_and_says_so(runs: Runs):
    """That it goes on later is the business of `test_sixty_moments`, and of tests/faults."""
    with runs.start("loop") as command:
        command.until(lambda: runs.lines("loop") >= 2)
        assert command.send(TERM) == 0
        assert command.err == ""
        said = "the run saves its state and ends; a second signal ends it at once"
        assert f"{WORDS[TERM][7:-1]}: {said}\n" in command.out
        assert "stopped; run again to go on" in command.out
    assert (runs.folder / "loop" / "run" / "checkpoints" / str(runs.lines("loop")) / "manifest.json").exists()
    assert left_behind(runs.folder / "loop") == []


STUCK = """
import hashlib, sys, time
from jaxrl.runtime.stop import Stop
stop = Stop()
stop.watch()
if "loop" in sys.argv:
    stop.save_first(lambda text: print(text, flush=True))
def stuck():
    print("stuck", flush=True)
    {hang}
stuck()
"""
NATIVE = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # releases the lock, and no signal interrupts it
SWALLOWS = """
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass"""


STUCKS = ((SWALLOWS, (TERM,)), (NATIVE, (TERM, INT)))


@pytest.mark.parametrize(("hang", "numbers"), STUCKS)
def test_whatever_the_main_thread_does(hang: str, numbers: Sequence[signal.Signals], tmp_path: Path):
    in_loop = ["loop"] if len(numbers) == 2 else []
    with Command(tmp_path, *in_loop, python=("-c", STUCK.format(hang=hang))) as command:
        command.until(lambda: "stuck" in command.out)
        began = time.monotonic()
        status = command.send(*numbers)
        assert time.monotonic() - began < 10
        assert (command.err, status) == (WORDS[numbers[-1]], 128 + numbers[-1])
        assert ("a second signal ends it at once" in command.out) == (len(numbers) == 2)


def running_in(session: int) -> list[int]:
    """Processes of a session that are not dead."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def test_control_c_reaches_tune_and_its_processes(runs: Runs):
    lengths = ("data.max_response_length=400", "actor.ppo_max_token_len_per_gpu=1000")
    tasks = "simulate.tasks.a.response.median=60"
    with runs.start("simulated", "trainer.total_training_steps=100000", *lengths, tasks, command="simulate") as command:
        command.until(lambda: runs.lines("simulated") > 20)
        check(command, TERM, command.send(TERM))
    run = runs.folder / "simulated" / "run"
    long = ("--steps", "50000", "--seeds", "3", "--processes", "2", "--values", "1.5,2")
    with Command(runs.place("tune"), "tune", "--run", str(run), *long) as command:
        command.until(lambda: len(running_in(command.process.pid)) >= 4)  # the resource tracker is one of them
        os.killpg(command.process.pid, INT)
        check(command, INT, command.process.wait(PATIENCE_S))
        ends = time.monotonic() + 20
        while running_in(command.process.pid) and time.monotonic() < ends:
            time.sleep(0.05)
        assert running_in(command.process.pid) == []


@pytest.mark.slow
def test_sixty_moments(runs: Runs):
    """From the start of the process to the end of the report; every run that was stopped goes on."""
    ends: dict[int, int] = {}
    for i in range(60):
        number = (INT, TERM)[i % 2]
        with runs.start("sweep", f"trainer.total_training_steps={runs.lines('sweep') + 4}") as command:
            time.sleep(0.15 * i)
            status = command.send(number)
            check(command, number, status, saved=True)
            ends[status] = ends.get(status, 0) + 1
    print("statuses:", ends)
    assert len(ends) >= 3
    steps = runs.lines("sweep") + 2
    with runs.start("sweep", f"trainer.total_training_steps={steps}") as command:
        assert command.process.wait(PATIENCE_S) == 0, command.err
    assert runs.lines("sweep") == steps
