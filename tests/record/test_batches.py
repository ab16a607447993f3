"""`batches.jsonl`: what is counted, and the lines that a resumed run drops."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxrl.record.batches import BINS, FILE_NAME, BatchLog, read_batches, reward_failures
from jaxrl.types import Group, Prompt, Sample, SampleKey


def group(index: int, rewards: list[float | None], lengths: list[int]) -> Group:
    samples = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        ids, zeros = np.zeros((length,), np.int32), np.zeros((length,), np.float32)
        samples.append(Sample(SampleKey(0, index, i), ids, zeros, zeros, ids, "stop", reward=reward))
    return Group(Prompt(0, index, (1,), "?", "src"), samples)


def test_rewards_and_lengths_of_a_step(tmp_path: Path):
    log = BatchLog(tmp_path / FILE_NAME, -1, 64)
    log.write(1, [group(0, [1.0, 0.0], [0, 1]), group(1, [None, 1 / 3], [2, 64])])
    log.close()
    (found,) = read_batches(tmp_path)
    assert (found["step"], found["groups"], found["limit"]) == (1, [0.5, 0.1667], 64)
    assert {i: count for i, count in enumerate(found["lengths"]) if count} == {0: 2, 1: 1, BINS - 1: 1}


def test_lines_of_steps_that_run_again_are_dropped(tmp_path: Path):
    log = BatchLog(tmp_path / FILE_NAME, -1, 8)
    for step in (1, 2, 3):
        log.write(step, [group(0, [float(step)], [step])])
    log.close()
    log = BatchLog(tmp_path / FILE_NAME, 1, 8)
    assert len(read_batches(tmp_path)) == 3, "a start may still be refused"
    log.begin()
    assert [each["step"] for each in read_batches(tmp_path)] == [1]


def test_why_rewards_failed(tmp_path: Path):
    """The most frequent texts, and the newest at the end."""
    texts = [*"abc" * 3, *"de" * 2, "f", "", "a", "g" * 9_000]
    groups = [group(i, [0.0, 1.0], [1, 1]) for i in range(len(texts))]
    for one, text in zip(groups, texts, strict=True):
        one.samples[0].failure, one.samples[0].reward_info = text, {"error": "the user's own"}
    log = BatchLog(tmp_path / FILE_NAME, -1, 8)
    log.write(1, groups)
    log.write(2, groups[14:15])
    log.close()
    first, second = read_batches(tmp_path)
    assert first["errors"] == [["b", 3], ["c", 3], ["d", 2], ["e", 2], ["a", 4], ["g" * 500, 1]]
    assert "errors" not in second


OK = {"step": 1, "reward/num_scored": 8.0, "reward/errors": 0.0, "reward/timeouts": 0.0, "reward/crashes": 0.0}
BAD = {"step": 2, "reward/num_scored": 8.0, "reward/errors": 3.0, "reward/timeouts": 1.0, "reward/code/errors": 9.0}


def test_counts_are_of_the_whole_run_and_texts_of_its_batches():
    batches = [{"errors": [["b", 2], ["a", 1]]}, {"step": 2}, {"errors": [["b", 1]]}, {"errors": [["a", 1]]}]
    found = reward_failures([OK, BAD, {"step": 3, "reward/errors": float("nan")}], batches)
    assert found is not None
    assert (found.scored, found.failed, dict(found.kinds)) == (16, 4, {"errors": 3, "timeouts": 1})
    assert (found.most, found.last, found.share) == ("b", "a", 0.25)
    assert found.summary() == "4 of 16 failed, last: a"
