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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from quick_xla import flags
from runs import PLAIN_REWARD, ROOT, num_steps
from runs import Runs as TinyRuns

PATIENCE_S = 200.0
pytestmark = pytest.mark.usefixtures("nothing_is_ignored")
INT, TERM = signal.SIGINT, signal.SIGTERM
WORDS = {INT: "jaxrl: interrupted\n", TERM: "jaxrl: terminated\n"}
Process = subprocess.Popen[bytes]


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Process]:
    """Python with these arguments, in a session of its own; its output goes to files, so nothing waits for a reader."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags(1),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=out, stderr=err, env=environment, cwd=folder, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(process: Process, happened: Callable[[], bool]) -> None:
    """Waits for something, or for the end of the process."""
    ends = time.monotonic() + PATIENCE_S
    while not happened() and process.poll() is None:
        assert time.monotonic() < ends
        time.sleep(0.002)


def send(process: Process, *numbers: signal.Signals) -> int:
    """Sends signals one after another; returns the exit status."""
    for i, number in enumerate(numbers):
        time.sleep(0.3 if i else 0)
        process.send_signal(number)
    return process.wait(PATIENCE_S)


def check(folder: Path, number: signal.Signals, status: int, *, saved: bool = False) -> None:
    """A run that has begun its loop may have saved; no other command may end with 0 unless it was done."""
    err = (folder / "stderr").read_text()
    if "Traceback" in err and not re.search(r"jaxrl/\S*\.py", err):
        return  # Python's own start
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    if status == 0:
        assert saved
        assert err == ""
    elif status != -number:  # the signal's default, before Python took it over
        assert (err, status) == (WORDS[number], 128 + number)
    assert [path for path in folder.rglob("*") if path.suffix in (".tmp", ".partial")] == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with the configuration of tiny runs that share jax's compile cache."""
    folder = tmp_path_factory.mktemp("runs")
    made = TinyRuns(folder, tiny_model)
    (folder / "reward.py").write_text(PLAIN_REWARD)
    made.config["data"] |= {"max_prompt_length": 64, "max_response_length": 8, "train_batch_size": 2}
    made.config["rollout"] = {"n": 2, "max_num_seqs": 4, "decode_steps": 4, "warmup": False}
    made.config["actor"] = {"ppo_max_token_len_per_gpu": 128}
    made.config["reward"]["num_workers"] = 1
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    made.config["trainer"] = {"total_training_steps": 400, "save_freq": 3, "compilation_cache_dir": cache}
    (folder / "config.yaml").write_text(yaml.safe_dump(made.config))
    return folder


def train(runs: Path, *overrides: str) -> tuple[str, ...]:
    return ("-m", "jaxrl", "train", "--config", str(runs / "config.yaml"), "trainer.run_dir=run", *overrides)


def test_while_it_starts_imports_and_loads(runs: Path):
    """`test_sixty_moments` has many more moments."""
    for number, after_s in ((INT, 0.1), (TERM, 0.2)):
        folder = runs / f"start-{after_s}"
        with started(folder, *train(runs)) as process:
            time.sleep(after_s)
            check(folder, number, send(process, number))
        assert not (folder / "run" / "config.yaml").exists()
    with started(runs / "load", *train(runs)) as process:
        until(process, (runs / "load" / "run").exists)
        check(runs / "load", INT, send(process, INT), saved=True)


def test_in_the_loop_it_saves_and_says_so(runs: Path):
    """That it goes on later is the business of `test_sixty_moments`, and of tests/faults."""
    folder = runs / "loop"
    with started(folder, *train(runs)) as process:
        until(process, lambda: num_steps(folder / "run") >= 2)
        status = send(process, TERM)
    check(folder, TERM, status, saved=True)
    assert status == 0
    said = "the run saves its state and ends; a second signal ends it at once"
    out = (folder / "stdout").read_text()
    assert f"{WORDS[TERM][7:-1]}: {said}\n" in out
    assert "stopped; run again to resume" in out
    assert (folder / "run" / "checkpoints" / str(num_steps(folder / "run")) / "manifest.json").exists()


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


def test_control_c_reaches_tune_and_its_processes(runs: Path):
    simulated, folder = runs / "simulated", runs / "tune"
    sizes = ("trainer.total_training_steps=100000", "data.max_response_length=400", "simulate.run_dir=run")
    more = ("actor.ppo_max_token_len_per_gpu=1000", "simulate.tasks.a.response.median=60")
    with started(simulated, "-m", "jaxrl", "simulate", "--config", str(runs / "config.yaml"), *sizes, *more) as process:
        until(process, lambda: num_steps(simulated / "run") > 20)
        check(simulated, TERM, send(process, TERM))
    long = ("--steps", "50000", "--seeds", "3", "--processes", "2", "--values", "1.5,2")
    with started(folder, "-m", "jaxrl", "tune", "--run", str(simulated / "run"), *long) as process:
        until(process, lambda: len(running_in(process.pid)) >= 4)  # the resource tracker is one of them
        os.killpg(process.pid, INT)
        check(folder, INT, process.wait(PATIENCE_S))
        ends = time.monotonic() + 20
        while running_in(process.pid) and time.monotonic() < ends:
            time.sleep(0.05)
        assert running_in(process.pid) == []


@pytest.mark.slow
def test_sixty_moments(runs: Path):
    """From the start of the process to the end of the report; every run that was stopped goes on."""
    folder, statuses = runs / "sweep", set[int]()
    for i in range(60):
        number, steps = (INT, TERM)[i % 2], num_steps(folder / "run") + 4
        with started(folder, *train(runs, f"trainer.total_training_steps={steps}")) as process:
            time.sleep(0.15 * i)
            status = send(process, number)
            check(folder, number, status, saved=True)
            statuses.add(status)
    assert len(statuses) >= 3
    steps = num_steps(folder / "run") + 2
    with started(folder, *train(runs, f"trainer.total_training_steps={steps}")) as process:
        assert process.wait(PATIENCE_S) == 0
    assert num_steps(folder / "run") == steps
