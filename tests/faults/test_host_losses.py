"""Runs on two hosts that lose something at random moments: an actor, the controller, Ray's node.

Forty losses over six mechanisms. Each run ends, or resumes with the same command, at the bits of one that lost nothing,
says so in one sentence, and leaves no actor behind (Ray's own agents end a minute after a controller that was killed).
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from runs import PATIENCE_S, STOPS, WIDE, Runs, assert_same_end, end, kill, wait_for_steps
from talking_runs import TALK

from jaxrl.processes.process_tree import descendants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]
HOSTS = ("hosts.num=2", "hosts.devices_per_host=1", "hosts.stall_timeout_s=30")
SMALL = (
    *WIDE,
    STOPS,
    *("data.max_prompt_length=20", "data.max_response_length=12", "actor.ppo_max_token_len_per_gpu=32"),
    *("rollout.block_size=32", "rollout.num_blocks=9", "trainer.total_training_steps=8", "trainer.save_freq=1"),
)
TALKING = (
    *("environment={kind: native, path: FOLDER/talk.py, name: Talk, num_workers: 1}", "rollout.stop=[]"),
    *("reward={kind: environment, path: ''}", "data.max_response_length=40", "actor.ppo_max_token_len_per_gpu=64"),
    *("rollout.num_blocks=30",),
)
RULES = {
    "tail batching": ("rollout.tail_batching.enable=true", "algorithm.filter_groups.enable=true"),
    "partial rollout": ("rollout.partial_rollout.enable=true",),
    "one step off, adapters": ("trainer.one_step_off=true", "model.lora_rank=4"),
    "drafts": ("rollout.speculation.enable=true", "rollout.temperature=0.06"),
    "critic": ("algorithm.adv_estimator=gae", "critic.optim.lr=0.01"),
    "turns": TALKING,
}
LOSSES = {"actor killed": 2, "actor stopped": 1, "controller killed": 2, "node killed": 1}
RESTARTED = re.compile(r"(?m)^.*; starting all hosts again from (step \d+|the beginning)$")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    made = Runs(tmp_path_factory.mktemp("losses"), tiny_model)
    made.config["trainer"]["compilation_cache_dir"] = str(made.folder / "cache")
    (made.folder / "talk.py").write_text(TALK.replace("* self.scale", "* 0").replace("number % 41 == 0", "False"))
    return made


def options_of(runs: Runs, rule: str) -> list[str]:
    return [each.replace("FOLDER", str(runs.folder)) for each in (*SMALL, *RULES[rule], *HOSTS)]


def undisturbed(runs: Runs, rule: str) -> Path:
    run_dir = runs.folder / f"undisturbed {rule}"
    if not run_dir.exists():
        runs.finish(run_dir, *options_of(runs, rule))
    return run_dir


def processes_named(process: subprocess.Popen[str], name: str) -> list[int]:
    found = []
    for pid in descendants(process.pid):
        with suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return sorted(found)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("loss", "turn"), [(loss, turn) for loss, count in LOSSES.items() for turn in range(count)])
def test_a_loss_at_a_random_moment(loss: str, turn: int, rule: str, runs: Runs):
    draw, whole, options = random.Random(f"{loss} {turn} {rule}"), undisturbed(runs, rule), options_of(runs, rule)
    run_dir = runs.folder / f"{loss} {turn} {rule}"
    with runs.start(run_dir, *options) as process:
        wait_for_steps(process, run_dir, draw.randrange(1, 4))
        time.sleep(draw.uniform(0, 1))
        actors = processes_named(process, "HostActor")
        if loss == "controller killed":
            kill(process)
        elif loss == "node killed":
            os.kill(processes_named(process, "raylet/raylet")[0], signal.SIGKILL)
            process.communicate(timeout=PATIENCE_S)  # Ray ends it, or it begins again in a cluster of its own
        else:
            os.kill(draw.choice(actors), signal.SIGKILL if loss == "actor killed" else signal.SIGSTOP)
            assert len(RESTARTED.findall(end(process))) == 1
    assert_gone(actors)
    if process.returncode:
        runs.finish(run_dir, *options)
    assert_same_end(run_dir, whole)
    shutil.rmtree(run_dir)
