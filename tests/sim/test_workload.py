"""Lengths by identity: pinned values, distributions against theory, correlation, growth; recorded runs."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from jaxrl.config import SimulatedLengths, SimulatedTask
from jaxrl.record.samples import SampleLog
from jaxrl.sim.recorded import RecordedPrompt, RecordedResponse, RecordedWorkload
from jaxrl.sim.workload import ModelledWorkload, exact_length, length_of_score, uniform
from jaxrl.types import Group, Prompt, Sample, SampleKey

LENGTHS = SimulatedLengths(median=600, sigma=0.8, tail_from=0.9, tail_index=1.9)
PLAIN = SimulatedLengths(median=600, sigma=0.8)
MATH = SimulatedTask(name="math", response=LENGTHS, correlation=0.8)
CAP, UNCAPPED = 16384, 1 << 30
WORKLOAD = ModelledWorkload(7, (MATH,), CAP)


def quantile(lengths: SimulatedLengths, share: float, longest: int = UNCAPPED, step: int = 0) -> int:
    return length_of_score(lengths, longest, NormalDist().inv_cdf(share), step)


def key(prompt: int, sample: int = 0, epoch: int = 0, attempt: int = 0) -> SampleKey:
    return SampleKey(epoch, prompt, sample, attempt)


# ---------------------------------------------------------------- identity


def test_values_are_the_same_on_every_python():
    assert [uniform(1), uniform(1, 2), uniform(2, 1), uniform(-1)] == PINNED_UNIFORM
    assert [WORKLOAD.length(key(p, s)) for p in range(3) for s in range(3)] == PINNED_LENGTHS
    assert [WORKLOAD.length(key(0, 0, epoch, attempt)) for epoch in (0, 1) for attempt in (0, 1)] == PINNED_RELAUNCHED
    assert [WORKLOAD.prompt_length(p) for p in range(4)] == PINNED_PROMPTS


PINNED_UNIFORM = [0.5665615751722809, 0.737699252690117, 0.8766756214195505, 0.8939429202831845]
PINNED_LENGTHS = [1006, 2756, 1552, 3547, 3381, 2445, 422, 575, 366]
PINNED_RELAUNCHED = [1006, 7355, 7129, 5396]
PINNED_PROMPTS = [281, 208, 203, 189]


def test_the_hash_is_uniform_and_its_streams_independent():
    draws = np.array([[uniform(stream, i) for i in range(20_000)] for stream in range(3)])
    assert 0 < draws.min() < draws.max() < 1
    for row in draws:
        counts = np.histogram(row, bins=50, range=(0, 1))[0]
        chi_square = float((((counts - 400) ** 2) / 400).sum())
        assert chi_square < 85.4  # 99.9 % of 49 degrees of freedom
    assert np.abs(np.corrcoef(draws)[np.triu_indices(3, 1)]).max() < 0.03
    assert abs(np.corrcoef(draws[0][1:], draws[0][:-1])[0, 1]) < 0.03  # neighbours


# ---------------------------------------------------------------- distribution


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_quantiles_of_the_lognormal(share: float):
    theory = 600 * math.exp(0.8 * NormalDist().inv_cdf(share))
    assert quantile(PLAIN, share) == round(theory)
    assert exact_length(PLAIN, NormalDist().inv_cdf(share)) == pytest.approx(theory)


@pytest.mark.parametrize(("share", "excess"), [(0.95, 2), (0.999, 100)])
def test_quantiles_of_the_tail(share: float, excess: float):
    start = 600 * math.exp(0.8 * NormalDist().inv_cdf(0.9))
    theory = start * excess ** (1 / 1.9)
    assert quantile(LENGTHS, share) == pytest.approx(theory, rel=1e-3)
    assert exact_length(LENGTHS, NormalDist().inv_cdf(share)) == pytest.approx(theory, rel=1e-9)


def test_lengths_grow_by_step_up_to_a_limit():
    growing = PLAIN.replace(growth=0.01)
    assert quantile(growing, 0.5, step=100) == round(600 * 1.01**100)
    assert quantile(growing, 0.5, step=0) == 600
    assert quantile(growing, 0.5, step=10_000) == 6000
    shrinking = growing.replace(growth=-0.01)
    assert quantile(shrinking, 0.5, step=10_000) == 60
    assert quantile(growing, 0.9, 1000, step=10_000) == 1000


# ---------------------------------------------------------------- prompts


def test_a_long_prompt_is_long_again():
    scores = np.array([[WORKLOAD.score(key(p, 0)), WORKLOAD.score(key(p, 1, epoch=1))] for p in range(4000)])
    assert np.corrcoef(scores.T)[0, 1] == pytest.approx(0.8, abs=0.02)
    assert scores.mean() == pytest.approx(0, abs=0.04)
    assert scores.std() == pytest.approx(1, abs=0.03)
    same = ModelledWorkload(7, (MATH.replace(correlation=1.0),), CAP)
    assert len({same.length(key(5, s, epoch, a)) for s in range(3) for epoch in range(3) for a in range(2)}) == 1


# ---------------------------------------------------------------- rewards


def test_rewards_are_of_the_prompts_own_rate():
    certain = SimulatedTask(name="a", pass_rate=0.5, pass_spread=100.0)
    workload = ModelledWorkload(1, (certain,), CAP)
    groups = [{workload.reward(key(p, s)) for s in range(8)} for p in range(500)]
    assert np.mean([len(group) == 1 for group in groups]) > 0.9  # nearly no variance within a prompt
    even = ModelledWorkload(1, (certain.replace(pass_rate=0.3, pass_spread=0.0),), CAP)
    assert np.mean([even.reward(key(p, s)) for p in range(500) for s in range(8)]) == pytest.approx(0.3, abs=0.03)


# ---------------------------------------------------------------- recorded runs


def write_run(folder: Path) -> None:
    """Two prompts over two steps, and one aborted response."""
    aborted = Sample.empty(SampleKey(0, 0, 0))
    aborted.finish_reason = "abort"
    with closing(SampleLog(folder / "samples.jsonl", last_step=-1)) as log:
        for step, lengths in ((1, {0: (10, 12), 1: (100, 120)}), (5, {0: (20, 22), 1: (200, 512)})):
            groups = []
            for index, pair in lengths.items():
                prompt = Prompt(0, index, (1,), text="x" * 40 * (index + 1), source=f"set{index}", answer=None)
                groups.append(Group(prompt, [written(index, i, length) for i, length in enumerate(pair)]))
            log.write(step, groups)
        log.write(6, [Group(Prompt(0, 0, (1,), "other", "set0"), [aborted])])


def written(prompt: int, index: int, length: int) -> Sample:
    ids, zeros = np.zeros(length, np.int32), np.zeros(length, np.float32)
    reason = "length" if length == 512 else "stop"
    return Sample(SampleKey(0, prompt, index), ids, zeros, zeros, ids, reason, "y" * length * 2, float(index))


def read_run(folder: Path) -> RecordedWorkload:
    return RecordedWorkload.read(folder, 3, SimulatedTask(), math.inf)


def test_recorded_lengths_are_drawn_by_source(tmp_path: Path):
    write_run(tmp_path)
    workload: ModelledWorkload = read_run(tmp_path)
    seen: dict[str, set[int]] = {"set0": set(), "set1": set()}
    for prompt in range(40):
        for sample in range(8):
            seen[workload.kind_name(prompt)].add(workload.length(key(prompt, sample)))
    assert seen == {"set0": {10, 12, 20, 22}, "set1": {100, 120, 200, 512}}
    assert {workload.prompt_length(p) for p in range(40)} == {20, 40}  # two characters a token
    assert {workload.reward(key(p, s)) for p in range(10) for s in range(8)} == {0.0, 1.0}
    assert workload.length(key(3, 1)) == read_run(tmp_path).length(key(3, 1))


def test_recorded_rewards_are_without_overlong_shaping(tmp_path: Path):
    """The simulated run shapes by its own options: what the recorded run took off is given back."""
    group = Group(Prompt(0, 0, (1,), "x", "set0"), [written(0, 1, 10), written(0, 1, 10)])
    for sample in group.samples:
        sample.reward_info = {"overlong_reward": -0.25}
    with closing(SampleLog(tmp_path / "samples.jsonl", last_step=-1)) as log:
        log.write(1, [group])
    assert read_run(tmp_path).reward(key(0, 0)) == 1.25
    with pytest.raises(ValueError, match=r"samples.jsonl: no such file; it is written by `jaxrl train` into its run"):
        read_run(tmp_path / "gone")
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"reward": 1, "prompt": 3, "response": "?", "source": "a"}\n')
    with pytest.raises(ValueError, match=r"line 3: damaged \(TypeError: prompt, response, source must be text\)"):
        read_run(tmp_path)


# ---------------------------------------------------------------- lengths by rank


def record_of(workload: ModelledWorkload, prompts: int, samples: int, source: str = "a") -> list[RecordedPrompt]:
    return [
        RecordedPrompt(9, source, tuple(RecordedResponse(workload.length(key(p, s)), float(s)) for s in range(samples)))
        for p in range(prompts)
    ]


def test_by_rank_draws_the_recorded_distribution_and_its_correlation():
    """All recorded lengths are as likely as they were, and what is drawn is recorded as the same again."""
    task = MATH.replace(correlation=0.5)
    recorded = RecordedWorkload.of(0, record_of(ModelledWorkload(1, (task,), CAP), 400, 2), task, math.inf)
    drawn = record_of(recorded, 3000, 4)
    lengths = np.sort([response.length for prompt in drawn for response in prompt.responses])
    for share in (0.1, 0.5, 0.9, 0.98):
        found = recorded.lengths[int(share * 800)]
        assert abs(np.searchsorted(lengths, found) / len(lengths) - share) < 0.025
    assert set(lengths.tolist()) <= set(recorded.lengths)
    again = RecordedWorkload.of(0, drawn, task, math.inf)
    assert again.tasks[0].correlation == pytest.approx(recorded.tasks[0].correlation, abs=0.06)
    assert recorded.length(key(3, 1)) == recorded.length(key(3, 1), 99), "all steps are taken together"
    assert recorded.length(key(3, 1)) != recorded.length(key(3, 1, attempt=1))


def test_a_record_resampled_keeps_its_sources():
    """A small source would else be missing from some, and its quota with it."""
    prompts = [RecordedPrompt(3, "few" if i < 2 else "many", (RecordedResponse(5 + i, 0.0),) * 2) for i in range(30)]
    recorded = RecordedWorkload.of(0, prompts, MATH, math.inf)
    drawn = [recorded.resampled(seed).prompts for seed in range(40)]
    assert all([prompt.source for prompt in one].count("few") == 2 for one in drawn)
    assert len({tuple(sorted(p.responses[0].length for p in one if p.source == "few")) for one in drawn}) == 3
