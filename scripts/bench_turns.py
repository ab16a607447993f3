#!/usr/bin/env python3
"""What slow tools cost a round, with each rule, real and simulated: seconds of rollout per trained sample.

    python scripts/bench_turns.py [--steps 8] [--median-s 0.2] [--p99-s 20] [--json]

A tiny random model plays episodes of several turns, each of which a tool answers after lognormal seconds (it sleeps),
--max-s at the most.
Rounds of the rules run one after another, in a run each:

- barrier: no turn is answered before all that are under way have ended, and all tools have: what a batch of turns at a
  time costs. The baseline.
- plain: each turn is answered when its tool has, and goes on beside the others.
- tail batching, partial rollout: with their default factors.

`simulated` is what `jaxrl simulate` says of the same rule, with turns and tools as the plain run recorded them. `idle`
is the share of the rollout in which the devices had nothing to do but to wait for tools. The first step compiles and
is left out; the last ones empty what is carried, so that whatever is left behind is paid for.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any
from unittest import mock

from bench import records
from bench.frame import Benchmark, Record, Session
from bench.measure import say

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from jaxrl.commands.simulate import simulate
from jaxrl.commands.train import train
from jaxrl.config import from_mapping
from jaxrl.mechanisms.turns.pool import EnvironmentPool
from jaxrl.mechanisms.turns.rule import Observed
from jaxrl.types import SampleKey

_SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
GAME = """
import hashlib, math, time
from statistics import NormalDist
from jaxrl.environments.env import StepResult

class Slow:
    def __init__(self, index, epoch, median_s, sigma, max_s):
        self.index, self.epoch, self.said = index, epoch, []
        self.median_s, self.sigma, self.max_s = median_s, sigma, max_s

    def step(self, action):
        self.said.append(action.text)
        word = hashlib.sha256(repr((self.index, self.epoch, self.said)).encode()).digest()
        u, v = (int.from_bytes(word[i : i + 6], "big") / 2**48 for i in (0, 6))
        drawn_s = self.median_s * math.exp(self.sigma * NormalDist().inv_cdf(min(max(u, 1e-9), 1 - 1e-9)))
        time.sleep(min(drawn_s, self.max_s))
        done = v < 0.3 or len(self.said) == 8
        return StepResult(float(v), done, "" if done else "Go on.")
"""
RULES = {
    "barrier": {},
    "plain": {},
    "tail batching": {"tail_batching": {"enable": True}},
    "partial rollout": {"partial_rollout": {"enable": True}},
}


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--steps", type=int, default=8, help="of each run (8)")
    made.add_argument("--max-s", type=float, default=60.0, help="of the slowest call (60)")
    made.add_argument("--median-s", type=float, default=0.2, help="of a tool, in seconds (0.2)")
    made.add_argument("--p99-s", type=float, default=20.0, help="the same, of one call in a hundred (20)")


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.median_s < options.p99_s:
        raise ValueError(
            f"--p99-s ({options.p99_s:g}) must be above --median-s ({options.median_s:g}), which is above 0"
        )


def _measure(options: argparse.Namespace, session: Session) -> Record:
    sigma = math.log(options.p99_s / options.median_s) / NormalDist().inv_cdf(0.99)
    with session.on(records.describe_host(), is_timed=False), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.append(str(_SUPPORT))
        importlib.import_module("tiny").write_tiny_model(folder / "model", eos_token_id=[2, *range(4, 260, 43)])
        (folder / "slow.py").write_text(GAME)
        (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"Row {i}."}) + "\n" for i in range(64)))
        real = {rule: _real(folder, rule, options, sigma) for rule in RULES}
        simulated = {rule: _simulated(folder, rule, options) for rule in RULES if rule != "barrier"}
    say(f"{'':16}{'s a sample':>12}{'idle':>8}{'speed':>8}{'simulated':>12}{'speed':>8}")
    cases: list[dict[str, Any]] = []
    for rule, (seconds, idle) in real.items():
        case = {"rule": rule, "s_a_sample": seconds, "idle": idle, "speed": real["plain"][0] / seconds}
        line = f"{rule:16}{seconds:12.2f}{idle:8.0%}{case['speed']:8.2f}"
        if rule in simulated:
            predicted_s = simulated[rule][0]
            case |= {"simulated_s": predicted_s, "simulated_speed": simulated["plain"][0] / predicted_s}
            line += f"{predicted_s:12.2f}{case['simulated_speed']:8.2f}"
        say(line)
        cases.append(case)
    return session.record({"cases": cases})


def _config(folder: Path, rule: str, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(folder / "model"), "random_init": True},
        "environment": {"kind": "native", "path": str(folder / "slow.py"), "name": "Slow", "num_workers": 64},
        "data": {
            "train_files": [str(folder / "rows.jsonl")],
            "answer_key": "",
            "max_prompt_length": 96,
            "max_response_length": 256,
            "train_batch_size": 8,
        },
        "rollout": {"n": 4, "max_num_seqs": 64, "max_num_batched_tokens": 128, "decode_steps": 8, **RULES[rule]},
        "actor": {"ppo_max_token_len_per_gpu": 1024},
        "reward": {"kind": "environment"},
        "trainer": {"total_training_steps": options.steps, "save_freq": 0, "run_dir": str(folder / rule)},
        **more,
    }


def _real(folder: Path, rule: str, options: argparse.Namespace, sigma: float) -> tuple[float, float]:
    values = _config(folder, rule, options)
    values["environment"] |= {
        "args": {"median_s": options.median_s, "sigma": sigma, "max_s": options.max_s},
        "timeout_s": 600.0,
    }
    with _barrier() if rule == "barrier" else nullcontext():
        train(from_mapping(values), say=lambda line: None)
    return _per_sample(folder / rule)


def _simulated(folder: Path, rule: str, options: argparse.Namespace) -> tuple[float, float]:
    machine = {"num_devices": 1, "run_dir": str(folder / f"{rule} simulated"), "tool": {"max_s": options.max_s}}
    lengths = {"recorded_run": str(folder / "plain"), "recorded_rule": "pooled"}
    simulate(from_mapping(_config(folder, rule, options, simulate=machine | lengths)), say=lambda line: None)
    return _per_sample(folder / f"{rule} simulated")


def _per_sample(run_dir: Path) -> tuple[float, float]:
    """Seconds of rollout per trained sample, and the share of them in which the devices waited for tools."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    rollout_s = fmean(line["timing_s/gen"] + line["timing_s/reward"] for line in lines)
    return rollout_s / 32, fmean(line["environment/idle_s"] for line in lines) / rollout_s


@contextmanager
def _barrier() -> Iterator[None]:
    """Answers wait until no turn is under way and all tools have answered."""
    answered, held = EnvironmentPool.completed, list[Observed]()

    def completed(pool: EnvironmentPool, timeout_s: float = 0.0) -> Sequence[Observed]:
        held.extend(answered(pool, timeout_s))
        if not timeout_s or pool._pending:
            return []
        found = [*held]
        held.clear()
        return found

    def cancel(pool: EnvironmentPool, keys: Collection[SampleKey]) -> None:
        held[:] = [each for each in held if each.key not in keys]
        cancelled(pool, keys)

    cancelled, patch = EnvironmentPool.cancel, mock.patch.object
    with patch(EnvironmentPool, "completed", completed), patch(EnvironmentPool, "cancel", cancel):
        yield


BENCHMARK = Benchmark("turns", __doc__, _measure, _options, None, ("steps",), _check, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
