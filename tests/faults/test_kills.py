"""76 SIGKILLs at random moments under seven sets of rules, saves among them: each run ends as an unbroken one.

Verdicts that come out otherwise each time they are asked for (an endpoint's, or test cases that were cut off) are the
journal's as well, and are shown in the same way: whatever a round has heard of one, a step that runs again hears again.

A quick one is in tests/commands/test_train.py.
"""

import json
import random
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from runs import PATIENCE_S, STOPS, Runs, assert_same_end, end, kill, num_steps, wait_for_steps

from jaxrl.record.journal import Journal
from jaxrl.record.metrics import read_metrics

STREAM = "trainer.stream.enable=true"
HALVES = (
    *(STOPS, "rollout.num_workers=2", "actor.ppo_mini_batch_size=0"),
    *("rollout.num_blocks=260", "rollout.max_num_seqs=16", "rollout.decode_steps=2", "data.max_response_length=96"),
)
RULES = {
    "plain": (),
    "tail-batching": (
        STOPS,
        "rollout.tail_batching={enable: true, at_end: leave}",
        "algorithm.filter_groups.enable=true",
    ),
    "partial-rollout": (STOPS, "rollout.partial_rollout={enable: true, at_end: leave}"),
    "one-step-off": (STOPS, "trainer.one_step_off=true"),
    # which end is told first decides what is buffered
    "two-workers": (STOPS, "rollout.partial_rollout={enable: true, at_end: leave}", "rollout.num_workers=2"),
    # a low temperature: responses resemble those of the epoch before. The history is part of the end that is compared
    "speculation": (
        *("rollout.temperature=0.06", "actor.optim.lr=0.002", "rollout.decode_steps=2"),
        "rollout.speculation={enable: true, epochs: 2}",
    ),
    "streaming": (*HALVES, STREAM),
}
DEVICES = {"two-workers": 2, "streaming": 2}
KILLS = {
    "plain": 14,
    "tail-batching": 12,
    "partial-rollout": 12,
    "one-step-off": 12,
    "two-workers": 10,
    "speculation": 6,
    "streaming": 10,
}
STEPS = {"plain": 100}  # its steps are short; 40 of the others are enough for their kills


def wait_for_a_save(process, run_dir: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not list((run_dir / "checkpoints").glob("*.tmp*")):
        assert process.poll() is None, end(process)
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_killed_runs_end_with_the_same_bits(rule: str, tmp_path: Path, tiny_model: Path):
    runs = Runs(tmp_path, tiny_model)
    whole, run_dir, overrides = (
        tmp_path / "whole",
        tmp_path / "killed",
        (*RULES[rule], f"trainer.total_training_steps={STEPS.get(rule, 40)}"),
    )
    devices = DEVICES.get(rule, 1)
    runs.finish(whole, *overrides, devices=devices)
    began = time.monotonic()  # a start now finds every program compiled, as those to come
    runs.finish(tmp_path / "short", *overrides, "trainer.total_training_steps=1", devices=devices)
    starting_s = time.monotonic() - began
    moments, seen, in_saves = random.Random(rule), [], 0
    for i in range(KILLS[rule]):
        with runs.start(run_dir, *overrides, devices=devices) as process:
            match i % 4:
                case 0 | 2:
                    wait_for_a_save(process, run_dir)
                    time.sleep(moments.uniform(0, 0.03))
                case 1:
                    wait_for_steps(process, run_dir, num_steps(run_dir) + 1)
                    time.sleep(moments.uniform(0, 0.8))
                case _:
                    time.sleep(moments.uniform(0, starting_s))
            assert process.poll() is None, end(process)
            kill(process)
        in_saves += bool(list((run_dir / "checkpoints").glob("*.tmp*")))
        seen.append(num_steps(run_dir))
    runs.finish(run_dir, *overrides, devices=devices)
    print(f"{rule}: {len(seen)} kills, {in_saves} with a save under way, after steps {seen}")
    assert_same_end(run_dir, whole)
    for name, of_rule in {"actor/streamed_share": "streaming", "rollout/spec/drafted_share": "speculation"}.items():
        assert rule != of_rule or sum(line[name] for line in read_metrics(run_dir)) > 0
    for killed, expected in zip(read_metrics(run_dir), read_metrics(whole), strict=True):
        assert killed["step"] == expected["step"]
        assert killed["critic/rewards/mean"] == expected["critic/rewards/mean"]
    assert not list((run_dir / "checkpoints").glob("*.tmp*"))


class Told:
    """All entries that a run's journal has while this is open: it drops those of steps that a checkpoint holds."""

    def __init__(self, run_dir: Path) -> None:
        self.entries: dict[Any, bytes] = {}
        self._file, self._is_over = run_dir / "journal.jsonl", threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Told":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def write(self, file: Path) -> None:
        with closing(Journal(file, 0)) as journal:
            for place, line in self.entries.items():
                step, kind, key = place
                journal.append(step, kind, key, json.loads(line))

    def _read(self) -> None:
        while True:
            is_last = self._is_over.wait(0.005)
            lines = self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else []
            for line in lines[1:]:
                if line.endswith(b"\n"):
                    entry = json.loads(line)
                    place = entry["step"], entry["kind"], tuple(entry["key"])
                    assert self.entries.setdefault(place, line) == line, "decided twice"
            if is_last:
                return


def finish_with(told: Told, runs: Runs, run_dir: Path, *overrides: str) -> None:
    """A run that finds in its journal what another was told."""
    with runs.start(run_dir, *overrides) as process:
        while not (run_dir / "journal.jsonl").exists():
            assert process.poll() is None, end(process)
            time.sleep(0.01)
        kill(process)
    told.write(run_dir / "journal.jsonl")
    runs.finish(run_dir, *overrides)


ASKED = """
import random

def compute_score(data_source, solution_str, ground_truth, extra_info):
    total, chance = sum(solution_str.encode()), random.SystemRandom()
    if total % 3 == 0:
        return {"score": chance.random(), "outside": True, "said": chance.random()}
    if total % 3 == 1:
        return {"score": chance.random(), "cut_off": 1, "case_s": [0.1, chance.random()]}
    return total % 7 / 6
"""


@pytest.mark.slow
def test_a_killed_run_hears_outside_verdicts_once(tmp_path: Path, tiny_model: Path):
    runs, run_dir, moments = Runs(tmp_path, tiny_model), tmp_path / "killed", random.Random(19)
    (tmp_path / "asked.py").write_text(ASKED)
    overrides = (f"reward.path={tmp_path / 'asked.py'}", "trainer.total_training_steps=20")
    with Told(run_dir) as told:  # fails where a place is decided twice, and otherwise
        for i in range(8):
            with runs.start(run_dir, *overrides) as process:
                wait_for_steps(process, run_dir, num_steps(run_dir) + 1 + i % 2)
                time.sleep(moments.uniform(0, 0.3))
                assert process.poll() is None, end(process)
                kill(process)
        runs.finish(run_dir, *overrides)
    entries = [json.loads(line) for line in told.entries.values()]
    assert {"outside", "cut_off"} <= {name for entry in entries for name in entry["info"]}
    again = tmp_path / "again"
    finish_with(told, runs, again, *overrides)
    assert_same_end(run_dir, again)
    for name in ("critic/rewards/mean", "reward/num_scored", "reward/timeouts/case"):
        assert [line[name] for line in read_metrics(run_dir)] == [line[name] for line in read_metrics(again)], name
