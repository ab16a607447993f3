"""The figures of an evaluation, against counting."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.commands.evaluate import _write_samples, ballots, figures, pass_at_k
from jaxrl.commands.score import score
from jaxrl.config import from_mapping
from jaxrl.data.tasks import draw_task
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.request import ScoreRequest
from jaxrl.types import FinishReason, Group, Prompt, Sample, SampleKey


def make_group(index: int, answers: Sequence[tuple[str | None, float]], length: int = 2) -> Group:
    def one(i: int, answer: str | None, reward: float) -> Sample:
        ids, zeros = np.full((length,), 5, np.int32), np.zeros((length,), np.float32)
        reason: FinishReason = "stop" if i % 2 else "length"
        info = {} if answer is None else {"extracted": answer}
        return Sample(SampleKey(0, index, i), ids, zeros, zeros, ids, reason, "text", reward, info)

    prompt = Prompt(0, index, (1,), f"prompt {index}", "test", "7", question="What?")
    return Group(prompt, [one(i, *answer) for i, answer in enumerate(answers)])


def by_text(groups: Sequence[Group]) -> list[list[int]]:
    """Votes of answers that are the same only if their texts are."""
    named = [[sample.reward_info.get("extracted") for sample in group.samples] for group in groups]
    return [[-1 if answer is None else answers.index(answer) for answer in answers] for answers in named]


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
    found = figures([first, second], by_text([first, second]))
    assert found["num_prompts"] == 2
    assert found["avg@5"] == found["pass@1"] == pytest.approx(0.4)
    assert found["pass@5"] == 1
    # first: 7; 7 (a tie: the first seen); 7 (a tie); 7. second: none; 3; 3 (a tie); 5
    assert [found[f"maj@{k}"] for k in (1, 2, 4, 5)] == [0.5, 0.5, 0.5, 1.0]
    assert found["mean_reward"] == pytest.approx(4.5 / 10)
    assert found["mean_length"] == 3
    assert found["clip_ratio"] == pytest.approx(0.6)


def test_votes_by_what_answers_are_worth():
    """Of the same worth, however they are written and whatever type they have."""
    config = from_mapping({"model": {"path": "m"}, "data": {"task": "leg_counting"}, "reward": {"num_workers": 2}})
    infos: list[dict[str, Any]] = [
        *({"extracted": text} for text in ("0.5", "3", "1/2", "3", r"\frac12")),
        *({"pred": value} for value in (2, [1, 2], "2.0", {"a": [1]}, [1.0, 2])),
        *({"extracted": None, "pred": None}, {}, {"pred": ["b"]}, {"pred": True}, {"extracted": "(x+1)^2"}),
    ]
    groups = [make_group(i, [(None, 1.0)] * 5) for i in range(3)]
    for i, group in enumerate(groups):
        for sample, info in zip(group.samples, infos[5 * i : 5 * i + 5], strict=True):
            sample.reward_info = info
    infos[6]["extracted"] = infos[6].pop("pred")  # a list, of which no set can be made
    votes = ballots(config, groups)
    assert votes == [[0, 1, 0, 1, 0], [0, 1, 0, 2, 1], [-1, -1, 0, 1, 2]]
    for sample, right in zip(groups[0].samples, (1, 0, 1, 0, 1), strict=True):
        sample.reward = float(right)
    assert figures(groups, votes)["maj@5"] == 1.0


@pytest.mark.parametrize("task", ["chain_sum", "word_ladder"])
def test_what_is_written_is_scored_as_it_was(tmp_path: Path, task: str):
    """The columns that a task's scorer needs come with the responses; of these tasks some name no answer."""
    data = {"task": task, "task_size": 4, "val_size": 0}
    config = from_mapping({"model": {"path": "x"}, "data": data})
    scorer = build_scorer(config)
    groups: list[Group] = []
    for problem in draw_task(config.data, held_out=False, count=4):
        entry = problem.extra["entry"]
        right = str(entry["answer"] or entry["metadata"].get("solution"))
        prompt = Prompt(0, problem.index, (1,), "rendered", task, problem.answer, problem.extra, problem.question)
        group = Group(prompt, [])
        for i, text in enumerate((f"So <answer>{right}</answer>", "<answer>3</answer>", "none")):
            ids, zeros = np.full((3,), 5, np.int32), np.zeros((3,), np.float32)
            sample = Sample(SampleKey(0, problem.index, i), ids, zeros, zeros, ids, "stop", text)
            sample.reward, sample.reward_info = scorer(ScoreRequest.of(prompt, sample))
            group.samples.append(sample)
        groups.append(group)
    path = tmp_path / "responses.jsonl"
    with open(path, "wb") as file:
        _write_samples(file, groups, config.data)
    scores = score(config, str(path), str(tmp_path / "scored.jsonl"))
    again = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    before = [sample for group in groups for sample in group.samples]
    assert [line["reward"] for line in again] == [sample.reward for sample in before]
    assert [line["info"] for line in again] == [sample.reward_info for sample in before]
    assert {line["source"] for line in again} == {task}
    assert scores.right >= 4, "the right answers are among them"
