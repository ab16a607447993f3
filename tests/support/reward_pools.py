"""A reward pool over a scorer that does what a response says: sleeps, dies, hangs, leaks, answers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl.config import from_mapping
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.reward_pool import RewardPool, build_pool
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, Sample, SampleKey

SCORER = """
import os, sys, time
NOT_PICKLABLE = lambda: None
HOARD = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    what, _, value = solution_str.partition(" ")
    if what == "sleep":
        time.sleep(float(value))
    elif what == "until":
        while not os.path.exists(value):
            time.sleep(0.01)
        return 0.8
    elif what == "spin":
        while True:
            pass
    elif what == "once":
        if not os.path.exists(value):
            open(value, "w").close()
            os._exit(3)
        return 0.5
    elif what == "hoard":
        HOARD.append(bytearray(int(value) << 20))
        return 0.5
    elif what == "die":
        os._exit(3)
    elif what == "native":
        sum(iter(int, 1))  # a loop in C: no Python handler of a signal runs
    elif what == "raise":
        raise RuntimeError("no")
    elif what == "nan":
        return float("nan")
    elif what == "odd":
        return {"score": 1, "odd": NOT_PICKLABLE}
    elif what == "asked":
        return {"score": 1, "outside": True}
    elif what == "cut":
        return {"score": 0, "cut_off": int(value)}
    elif what == "modules":
        return {"score": 1, "jax": "jax" in sys.modules, "pid": os.getpid()}
    return float(value or 0)
"""
TIMEOUT_S = 1.5
Opened = Callable[..., RewardPool]


def make(
    folder: Path, kind: str = "process", source: str = SCORER, log: Path | None = None, **reward: Any
) -> RewardPool:
    path = folder / "reward.py"
    path.write_text(source)
    options = {"kind": "custom", "path": str(path), "pool": kind, "timeout_s": TIMEOUT_S, "num_workers": 2, **reward}
    config = from_mapping({"model": {"path": "x"}, "reward": options})
    return build_pool(config, build_scorer(config), log=log)


def submit(pool: RewardPool, *responses: str, source: str = "test", first: int = 0) -> None:
    for i, response in enumerate(responses, first):
        sample = Sample.empty(SampleKey(0, 7, i))
        sample.text = response
        pool.submit(Prompt(0, 7, (1,), "?", source, "a"), sample)


def collect(pool: RewardPool, limit_s: float = 120.0) -> dict[int, Verdict]:
    verdicts: list[Verdict] = []
    deadline = time.monotonic() + limit_s
    while pool.num_pending and time.monotonic() < deadline:
        verdicts += pool.wait(1.0)
    assert pool.num_pending == 0
    by_index = {verdict.key.sample_index: verdict for verdict in verdicts}
    assert len(by_index) == len(verdicts)
    return by_index
