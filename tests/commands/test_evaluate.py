"""The figures of an evaluation, against counting."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxrl.commands.evaluate import _write_samples, figures, pass_at_k
from jaxrl.types import FinishReason, Group, Prompt, Sample, SampleKey


def make_group(index: int, answers: Sequence[tuple[str | None, float]], length: int = 2) -> Group:
    def one(i: int, answer: str | None, reward: float) -> Sample:
        ids, zeros = np.full((length,), 5, np.int32), np.zeros((length,), np.float32)
        reason: FinishReason = "stop" if i % 2 else "length"
        info = {} if answer is None else {"extracted": answer}
        return Sample(SampleKey(0, index, i), ids, zeros, zeros, ids, reason, "text", reward, info)

    prompt = Prompt(0, index, (1,), f"prompt {index}", "test", "7")
    return Group(prompt, [one(i, *answer) for i, answer in enumerate(answers)])


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_what_counting_all_draws_gives(n: int):
    for correct in range(n + 1):
        right = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            draws = [any(draw) for draw in itertools.combinations(right, k)]
            assert pass_at_k(n, correct, k) == pytest.approx(np.mean(draws), abs=1e-12)


def test_the_figures_of_two_prompts():
    first = make_group(0, [("7", 1.0), ("8", 0.0), ("8", 0.0), ("7", 1.0), ("9", 0.0)])
    second = make_group(1, [(None, 0.0), ("3", 0.5), (None, 0.0), ("5", 1.0), ("5", 1.0)], length=4)
    found = figures([first, second])
    assert list(found) == [
        "num_prompts",
        "avg@5",
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@5",
        "maj@1",
        "maj@2",
        "maj@4",
        "maj@5",
        "mean_reward",
        "mean_length",
        "clip_ratio",
    ]
    assert found["num_prompts"] == 2
    assert found["avg@5"] == found["pass@1"] == pytest.approx(0.4)
    assert found["pass@5"] == 1
    # first: 7; 7 (a tie: the first seen); 7 (a tie); 7. second: none; 3; 3 (a tie); 5
    assert [found[f"maj@{k}"] for k in (1, 2, 4, 5)] == [0.5, 0.5, 0.5, 1.0]
    assert found["mean_reward"] == pytest.approx(4.5 / 10)
    assert found["mean_length"] == 3
    assert found["clip_ratio"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        ([("1", 0.0), ("2", 1.0), ("2", 1.0)], 1.0),
        ([("1", 0.0), ("1", 0.0), ("2", 1.0)], 0.0),
        ([("2", 1.0), ("1", 0.0)], 1.0),
        ([("1", 0.0), ("2", 1.0)], 0.0),
        ([(None, 0.0), (None, 0.0), ("2", 1.0)], 1.0),  # a sample without an answer has no vote
        ([(None, 0.0), (None, 1.0)], 0.0),
        ([("2", 0.99), ("2", 0.99)], 0.0),  # partly right is not right
    ],
)
def test_majority(answers: list[tuple[str | None, float]], right: float):
    assert figures([make_group(0, answers)])[f"maj@{len(answers)}"] == right


def test_one_sample_per_prompt():
    found = figures([make_group(0, [("7", 1.0)]), make_group(1, [("7", 0.0)])])
    assert found["avg@1"] == found["pass@1"] == found["maj@1"] == 0.5


def test_every_response_can_be_written(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with open(path, "wb") as file:
        _write_samples(file, [make_group(0, [("7", 1.0), (None, 0.0)])])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["info"] for line in lines] == [{"extracted": "7"}, {}]
    assert lines[0] == {
        "prompt": "prompt 0",
        "answer": "7",
        "response": "text",
        "reward": 1.0,
        "info": {"extracted": "7"},
        "length": 2,
        "finish_reason": "length",
    }
