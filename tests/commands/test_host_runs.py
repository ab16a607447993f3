"""Whole runs of a tiny model in several processes: in float64 they end as one process with as many workers, to the bit.

That one has called `jax.distributed.initialize` as well, because collectives on a CPU add up in another order without.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest
from host_runs import RULES, SMALL, HostRun, assert_same_run, lines
from runs import PATIENCE_S, WIDE, Runs, end, num_steps, state_of, wait_for_steps
from tiny import write_tiny_model
from worlds import free_port

MODELS = {
    "critic": ("algorithm.adv_estimator=gae", "critic={optim: {lr: 0.01}, ppo_epochs: 2}", "trainer.critic_warmup=1"),
    "teacher": ("algorithm.teacher={path: 'random:MODEL', dtype: float64}",),
    "experts": ("model.path=EXPERTS",),
}
EXPERTS = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 16},
    **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
ADAPTIVE = (
    "rollout.layout.planner=true",
    "rollout.n=8",
    "rollout.max_num_seqs=4",
    "rollout.num_blocks=9",  # rows are preempted, of which the planners hear
    "rollout.decode_steps=2",
    "trainer.save_freq=1",
)


def several(num: int, per_host: int) -> tuple[str, ...]:
    return ("hosts.launcher=local", f"hosts.num={num}", f"hosts.devices_per_host={per_host}")


def one(runs: Runs, name: str, num: int, per_host: int, overrides: Sequence[str]) -> Path:
    """A run of one process with as many devices and workers as the others have together."""
    run_dir = runs.folder / name
    alone = (f"hosts.coordinator=127.0.0.1:{free_port()}", f"rollout.num_workers={num}")
    with runs.start(run_dir, *WIDE, *overrides, *alone, devices=num * per_host) as process:
        end(process)
    return run_dir


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


def test_two_processes_stop_where_one_process_ends(tmp_path: Path, tiny_model: Path):
    """They start, agree, update, and stop when they are asked to. Programs are compiled quickly, and kept from one run
    of the tests to the next."""
    runs, options = Runs(tmp_path, tiny_model), (*SMALL, "trainer.compilation_cache_dir=")
    with HostRun(runs, tmp_path / "two", *options, cache=Path(os.environ["JAX_COMPILATION_CACHE_DIR"])) as run:
        run.start("trainer.total_training_steps=50")
        run.until(lambda: num_steps(run.run_dir) > 0, look_s=0.01)
        run.command.terminate()
        said = run.end()
    stopped = num_steps(run.run_dir)
    assert f"{stopped} of 50 (stopped; run again to go on)" in said
    assert json.loads((run.run_dir / "run.json").read_text())["devices"]["count"] == 2
    measured = lines(run.run_dir / "metrics.jsonl")[-1]
    assert {"hosts/gate_s", "hosts/exchange_bytes", "hosts/stream_bytes", "hosts/slowest"} <= measured.keys()
    own = {path.relative_to(run.run_dir / "hosts").as_posix() for path in (run.run_dir / "hosts").rglob("*.*")}
    assert {"1.log", "1/timeline.json", "timeline.json"} <= own
    tracks = (run.run_dir / "hosts" / "timeline.json").read_text()
    assert all(f"host {process}, start 1," in tracks for process in (0, 1))
    as_long = (*options, f"trainer.total_training_steps={stopped}")
    assert_same_run(run.run_dir, one(runs, "one", 2, 1, as_long))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "num"), [*((rule, 2) for rule in RULES | MODELS), ("partial rollout", 4)])
def test_processes_end_as_one(tmp_path: Path, tiny_model: Path, rule: str, num: int):
    experts = write_tiny_model(tmp_path / "experts", **EXPERTS)
    models = {"MODEL": str(tiny_model), "EXPERTS": str(experts)}
    own = (re.sub("MODEL|EXPERTS", lambda found: models[found[0]], option) for option in (RULES | MODELS)[rule])
    runs, options = Runs(tmp_path, tiny_model), (*SMALL, *own)
    runs.finish(tmp_path / "several", *WIDE, *several(num, 2), *options)
    assert_same_run(tmp_path / "several", one(runs, "one", num, 2, options))


def planners(run_dir: Path) -> list[list[int]]:
    """Of each worker, by its number: degree, preemptions of the last round, quiet rounds; from the last checkpoint."""
    with jax.enable_x64(True):
        arrays, values = state_of(run_dir)
    workers = values["layouts"]["workers"]
    return [arrays[f"host.layouts.workers.{worker}.planner.state"][0].tolist() for worker in workers]


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
def test_a_run_goes_on_with_the_layout_of_every_worker(tmp_path: Path, tiny_model: Path, num: int):
    """Also as one process with as many workers."""
    runs = Runs(tmp_path, tiny_model)
    adaptive = (*ADAPTIVE, f"trainer.compilation_cache_dir={tmp_path / 'cache'}")
    half, whole = (f"trainer.total_training_steps={steps}" for steps in (2, 4))
    runs.finish(tmp_path / "resumed", *WIDE, *several(num, 2), *adaptive, half)
    found = planners(tmp_path / "resumed")
    assert len(found) == num
    assert found != [found[0]] * num, "one worker's state would not do for all"
    shutil.copytree(tmp_path / "resumed", tmp_path / "resumed by one")
    said = runs.finish(tmp_path / "resumed", *WIDE, *several(num, 2), *adaptive, whole)
    assert said.count(f"resuming {tmp_path / 'resumed'} after step 2 of 4") == 1
    assert "resuming" not in (tmp_path / "resumed" / "hosts" / "1.log").read_text(), "the first one says it"
    resumed_by_one = one(runs, "resumed by one", num, 2, (*adaptive, whole))
    unbroken = one(runs, "unbroken", num, 2, (*adaptive, whole))
    assert 2 in (degree for degree, *_ in planners(unbroken)), "a planner has doubled its degree"
    assert_same_run(tmp_path / "resumed", unbroken)
    assert_same_run(resumed_by_one, unbroken)


@pytest.mark.slow
def test_a_run_goes_on_in_any_number_of_processes(tmp_path: Path, tiny_model: Path):
    """From every one of 1, 2 and 4 processes to every other, with four workers and tokens that are carried: what is in
    a checkpoint comes back to the bit, or the end would be another."""
    runs = Runs(tmp_path, tiny_model)
    options = (
        *RULES["partial rollout"],
        "rollout.num_workers=4",
        "trainer.total_training_steps=12",
        f"trainer.compilation_cache_dir={tmp_path / 'cache'}",
    )
    run_dir, legs = tmp_path / "moved", (1, 2, 4, 1, 4, 2, 1)
    for leg, num in enumerate(legs):
        placed = several(num, 4 // num) if num > 1 else (f"hosts.coordinator=127.0.0.1:{free_port()}",)
        with runs.start(run_dir, *WIDE, *options, *placed, devices=4) as process:
            if leg < len(legs) - 1:
                wait_for_steps(process, run_dir, num_steps(run_dir) + 1)
                process.send_signal(signal.SIGTERM)
            said = end(process)
        assert (f"resuming {run_dir}" in said) == (leg > 0), said
        assert (num_steps(run_dir) < 12) == (leg < len(legs) - 1), f"leg {leg}: {num_steps(run_dir)} steps"
    assert_same_run(run_dir, one(runs, "one", 4, 1, options))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_slow_hosts_change_nothing(tmp_path: Path, tiny_model: Path, rule: str):
    runs = Runs(tmp_path, tiny_model)
    with runs.start(tmp_path / "slowed", *WIDE, *several(2, 1), *RULES[rule]) as process:
        disturb(process, random.Random(rule))
        end(process)
    runs.finish(tmp_path / "undisturbed", *WIDE, *several(2, 1), *RULES[rule])
    assert_same_run(tmp_path / "slowed", tmp_path / "undisturbed")
