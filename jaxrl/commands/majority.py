"""maj@k of an evaluation: how often a prompt's most frequent answer is right.

A sample's answer is the value that its scorer calls `extracted`, or `pred` as verl's do. The verifier decides whether
two answers are the same (`jaxrl.rewards.math.equal`: `0.5` and `1/2` vote together) in worker processes, within
`reward.math_timeout_s`; two answers that it fails to compare are different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np

from jaxrl.config import Config
from jaxrl.record.files import to_json
from jaxrl.record.metrics import RIGHT
from jaxrl.rewards.reward_pool import RewardPool, build_pool
from jaxrl.rewards.scorers import MathScorer
from jaxrl.types import Group, Prompt, Sample, SampleKey

Ballots = list[list[int]]
"""For each prompt and sample: the number of its answer among the prompt's, the same for equal ones; -1: it has none."""


def ballots(config: Config, groups: Sequence[Group]) -> Ballots:
    """Which answers of each prompt are the same, asked in worker processes where their texts differ."""
    named = [[_named(sample) for sample in group.samples] for group in groups]
    found: Ballots = [[] for _ in groups]
    with ExitStack() as stack:
        pool: RewardPool | None = None
        if any(len({*answers} - {None}) > 1 for answers in named):
            by_math = config.replace(reward=config.reward.replace(kind="math", domains={}, parts={}))
            pool = build_pool(by_math, MathScorer("none"), where=lambda key: "two answers that maj@k compares")
            stack.enter_context(closing(pool))
            pool.warm()
        counts = [_count(answers) for answers in named]

        def proceed(i: int, same: bool | None) -> None:
            try:
                answer, other = counts[i].send(same)
            except StopIteration as done:
                found[i] = done.value
                return
            assert pool is not None
            pool.submit(Prompt(0, i, (), "", "", other), replace(Sample.empty(SampleKey(0, i, 0)), text=answer))

        for i in range(len(groups)):
            proceed(i, None)
        while pool is not None and pool.num_pending:
            for verdict in pool.wait():
                proceed(verdict.key.prompt_index, verdict.reward >= RIGHT)
    return found


def majorities(groups: Sequence[Group], found: Ballots, ks: Sequence[int]) -> dict[str, float]:
    """maj@k: the share of prompts whose most frequent answer among k samples (ties: the first) is right. Prompts of a
    source whose scorer names no answers are left out, and the figures if that is all."""
    naming = {group.prompt.source for group, votes in zip(groups, found, strict=True) if max(votes) >= 0}
    counted = [(g.samples, votes) for g, votes in zip(groups, found, strict=True) if g.prompt.source in naming]
    return {f"maj@{k}": float(np.mean([_is_right(*each, k) for each in counted])) for k in ks if counted}


def _is_right(samples: Sequence[Sample], votes: Sequence[int], k: int) -> bool:
    cast = Counter(vote for vote in votes[:k] if vote >= 0)  # in the order in which they were seen, which decides ties
    return bool(cast) and (samples[votes.index(cast.most_common(1)[0][0])].reward or 0.0) >= RIGHT


def _named(sample: Sample) -> str | None:
    info = sample.reward_info
    answer = info.get("extracted") if info.get("extracted") is not None else info.get("pred")
    return answer if answer is None or isinstance(answer, str) else to_json(answer, default=str)


def _count(answers: Sequence[str | None]) -> Generator[tuple[str, str], bool | None, list[int]]:
    """Numbers the answers, equal ones alike. Yields two of which it must know whether they are equal."""
    numbers: dict[str, int] = {}
    different: list[str] = []
    for answer in answers:
        if answer is None or answer in numbers:
            continue
        for number, other in enumerate(different):
            if (yield answer, other):
                numbers[answer] = number
                break
        else:
            numbers[answer] = len(different)
            different.append(answer)
    return [-1 if answer is None else numbers[answer] for answer in answers]
