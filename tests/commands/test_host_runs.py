"""Whole runs of a tiny model in several processes: in float64 they end as one process with as many workers, to the bit.

That one has called `jax.distributed.initialize` as well, because collectives on a CPU add up in another order without.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest
from runs import PATIENCE_S, Runs, assert_same_end, end

WIDE = ("rollout.dtype=float64", "actor.dtype=float64", "actor.param_dtype=float64")
RULES = {
    "plain": (),
    "tail batching and dynamic sampling": (
        "rollout.tail_batching.enable=true",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=20",
    ),
    "partial rollout": ("rollout.partial_rollout.enable=true",),
    "one step off": ("trainer.one_step_off=true", "actor.old_logprobs=rollout"),
    "critic": ("algorithm.adv_estimator=gae", "critic={optim: {lr: 0.01}, ppo_epochs: 2}", "trainer.critic_warmup=1"),
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
)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def several(num: int, per_host: int) -> tuple[str, ...]:
    return ("hosts.launcher=local", f"hosts.num={num}", f"hosts.devices_per_host={per_host}")


def one(runs: Runs, name: str, num: int, per_host: int, overrides: Sequence[str]) -> Path:
    """A run of one process with as many devices and workers as the others have together."""
    run_dir = runs.folder / name
    alone = (f"hosts.coordinator=127.0.0.1:{free_port()}", f"rollout.num_workers={num}")
    runs.finish(run_dir, *WIDE, *overrides, *alone, devices=num * per_host)
    return run_dir


def assert_same_run(run_dir: Path, other: Path) -> None:
    """The same checkpoint (queues included), metrics without times, and samples."""
    with jax.enable_x64(True):
        assert_same_end(run_dir, other)
    assert lines(run_dir / "samples.jsonl") == lines(other / "samples.jsonl")
    ours, theirs = lines(run_dir / "metrics.jsonl"), lines(other / "metrics.jsonl")
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        differing = {name: (a.get(name), b.get(name)) for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
        assert not [name for name in differing if not name.startswith(TIMES)], differing


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """Processes that this one has started, and theirs."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(folder.name))
    found, left = [], [process.pid]
    while left:
        left += (own := parents.get(left.pop(), []))
        found += own
    return found


def disturb(process: subprocess.Popen[str], draw: random.Random) -> None:
    """Stops some of the processes for a moment, again and again, until all have ended."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(draw.uniform(0.05, 0.3))
        own = children_of(process)
        if not own:
            continue
        chosen = draw.choice(own)
        for number, seconds in ((signal.SIGSTOP, draw.uniform(0.05, 0.5)), (signal.SIGCONT, 0.0)):
            try:
                os.kill(chosen, number)
            except ProcessLookupError:
                break
            time.sleep(seconds)


def test_two_processes_end_as_one(tmp_path: Path, tiny_model: Path):
    runs = Runs(tmp_path, tiny_model)
    short = ("trainer.total_training_steps=3",)
    runs.finish(tmp_path / "two", *WIDE, *several(2, 1), *short)
    assert_same_run(tmp_path / "two", one(runs, "one", 2, 1, short))
    measured = lines(tmp_path / "two" / "metrics.jsonl")[-1]
    assert {"hosts/gate_s", "hosts/exchange_bytes", "hosts/stream_bytes", "hosts/slowest"} <= measured.keys()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num", [2, 4])
def test_processes_end_as_one(tmp_path: Path, tiny_model: Path, rule: str, num: int):
    runs = Runs(tmp_path, tiny_model)
    runs.finish(tmp_path / "several", *WIDE, *several(num, 2), *RULES[rule])
    assert_same_run(tmp_path / "several", one(runs, "one", num, 2, RULES[rule]))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_slow_hosts_change_nothing(tmp_path: Path, tiny_model: Path, rule: str):
    runs = Runs(tmp_path, tiny_model)
    with runs.start(tmp_path / "slowed", *WIDE, *several(2, 1), *RULES[rule]) as process:
        disturb(process, random.Random(rule))
        end(process)
    runs.finish(tmp_path / "undisturbed", *WIDE, *several(2, 1), *RULES[rule])
    assert_same_run(tmp_path / "slowed", tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_stop_is_a_stop_of_all_and_goes_on(tmp_path: Path, tiny_model: Path):
    runs = Runs(tmp_path, tiny_model)
    with runs.start(tmp_path / "stopped", *WIDE, *several(2, 1)) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "stopped" / "metrics.jsonl").exists():
            assert process.poll() is None, end(process)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        end(process)
    assert len(lines(tmp_path / "stopped" / "metrics.jsonl")) < 6
    runs.finish(tmp_path / "stopped", *WIDE, *several(2, 1))
    runs.finish(tmp_path / "whole", *WIDE, *several(2, 1))
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
