"""Whole runs of a tiny model, to be killed, stopped, resumed, and compared bit for bit: in processes of their own, with
programs that are compiled as users' are, or in this process, which is several times as quick."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from quick_xla import flags

from jaxrl.cli import main
from jaxrl.record.run_record import RunRecord
from jaxrl.record.state import split_arrays
from jaxrl.run.stop import Stop
from jaxrl.run.training import Training
from jaxrl.training.checkpoint import Checkpointer, _stored

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
PATIENCE_S = 300.0  # on a loaded machine; none of these waits takes a tenth of it

REWARD = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    total = sum(solution_str.encode())
    if total % 9 == 0:
        os._exit(1)  # takes its process down: the journal's business
    return total % 7 / 6
"""


def judged(model: Path) -> dict[str, Any]:
    """The section `reward` of a run whose judge is this tiny model with random weights, in float64."""
    return {
        "kind": "judge",
        "judge": {
            "model": f"random:{model}",
            "dtype": "float64",
            "prompt": "{question} {response} Score:",
            "score_pattern": "([0-9])",
            "max_score": 9,
            "max_prompt_tokens": 200,
            "max_tokens": 40,
            "temperature": 1.0,
            "max_num_seqs": 4,
            "resident_layers": 1,
            "busy_share": 1.0,
        },
    }


PLAIN_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 7 / 6
"""
STOPS = "rollout.stop=[" + ", ".join("abcdefghijklm") + "]"  # lengths that differ: one token in twenty ends a response
WIDE = ("rollout.dtype=float64", "actor.dtype=float64", "actor.param_dtype=float64")
MADE_UP_PROFILE = str(ROOT / "scripts" / "made_up_profile.py")


class Runs:
    """Starts runs that share a model, data, and a compilation cache."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        problems = [{"question": "x" * (1 + 3 * i), "answer": str(i)} for i in range(7)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
        (folder / "reward.py").write_text(REWARD)
        self.config: dict[str, Any] = {
            "model": {"path": str(model), "random_init": True},
            "data": {
                "train_files": [str(folder / "train.jsonl")],
                "max_prompt_length": 96,
                "max_response_length": 32,
                "train_batch_size": 4,  # of 7: batches cross epoch ends
            },
            "rollout": {
                "n": 4,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "decode_steps": 4,
                "num_blocks": 30,
                "warmup": False,
            },
            "actor": {"optim": {"lr": 0.01}, "ppo_max_token_len_per_gpu": 512, "ppo_mini_batch_size": 2},
            "reward": {"kind": "custom", "path": str(folder / "reward.py")},
            "trainer": {"total_training_steps": STEPS, "save_freq": 2, "compilation_cache_dir": ""},
        }

    def start(
        self,
        run_dir: Path,
        *overrides: str,
        devices: int = 1,
        stdout: Any = subprocess.PIPE,
        program: Sequence[str] = ("-m", "jaxrl", "train"),
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """`program`: what python runs in place of the command; `environment`: more variables."""
        file = self._write()
        variables = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags(devices),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        }
        return subprocess.Popen(
            [sys.executable, *program, f"--config={file}", f"trainer.run_dir={run_dir}", *overrides],
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
        )

    def finish(self, run_dir: Path, *overrides: str, devices: int = 1) -> str:
        """Runs to the end; returns what it printed."""
        with self.start(run_dir, *overrides, devices=devices) as process:
            return end(process)

    def here(self, run_dir: Path, *overrides: str, devices: int = 1, status: int = 0, stop: Stop | None = None) -> str:
        """`jaxrl train` in this process; returns what it printed. What it logs goes to pytest (`caplog`)."""
        own = (f"--config={self._write()}", f"trainer.run_dir={run_dir}", f"trainer.num_devices={devices}")
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            ended = main(["train", *own, *overrides], stop)
        assert ended == status, output.getvalue()
        return output.getvalue()

    def _write(self) -> Path:
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(self.config))
        return file


def asked() -> Stop:
    """A stop that was asked for before the first step: a run is built, begins, saves, and ends without one."""
    stop = Stop()
    stop.asked = True
    return stop


@contextmanager
def copied_after(places: Mapping[int, Path]) -> Iterator[None]:
    """Runs in this process leave what a SIGKILL behind a step would leave: the run directory, copied when the step has
    ended. A save that was begun before is complete; tests/faults/test_kills.py kills while one is under way."""
    begun: list[Training] = []
    begin, on_step = Training.begin, RunRecord.on_step

    def beginning(run: Training) -> None:
        begun[:] = [run]
        begin(run)

    def copying(record: RunRecord, step: int, *rest: Any) -> None:
        on_step(record, step, *rest)
        if step in places:
            begun[0].store.wait()
            shutil.copytree(begun[0].run_dir.path, places[step])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "begin", beginning)
        patch.setattr(RunRecord, "on_step", copying)
        yield


def end(process: subprocess.Popen[str], status: int = 0) -> str:
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, output
    return output


def num_steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    wait_until(process, lambda: num_steps(run_dir) >= count)


def wait_until(process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
    """Asks until it holds; the process must not end before."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert process.poll() is None, end(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)


def state_of(run_dir: Path) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
    """Every array of the last checkpoint by path, as numpy, and the host's values."""
    with Checkpointer(run_dir / "checkpoints") as store:
        step = store.latest_step()
        assert step is not None
        tree = _stored(run_dir / "checkpoints" / str(step) / "state")
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        state, host = store.restore(abstract, step)
    arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}
    values, named = split_arrays(host)
    return arrays | {f"host.{name}": array for name, array in named.items()}, values


def assert_same_end(run_dir: Path, other: Path, *, but: str = "") -> None:
    """The last checkpoints are the same to the bit; not what the host keeps under the name `but`."""
    (arrays, values), (expected, expected_values) = state_of(run_dir), state_of(other)
    for found in (arrays, expected):
        for name in [name for name in found if but and name.startswith(f"host.{but}.")]:
            del found[name]
    assert {**values, but: None} == {**expected_values, but: None}
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes(), f"{name} differs"
