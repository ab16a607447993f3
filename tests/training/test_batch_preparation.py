"""Groups that are prepared apart are prepared as all of them together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl.config import Config, from_mapping
from jaxrl.training import batch_preparation
from jaxrl.types import Group, Prompt, Sample, SampleKey, TrainBatch

STEP = 3  # trains version 2


def group(index: int, *versions: list[int]) -> Group:
    """Samples with tokens of these versions, and random log-probabilities and rewards."""
    rng, samples = np.random.default_rng(index), []
    for i, own in enumerate(versions):
        sample = Sample.empty(SampleKey(0, index, i))
        sample.token_ids, sample.versions = np.zeros(len(own), np.int32), np.asarray(own, np.int32)
        sample.rollout_logprobs = rng.normal(size=len(own)).astype(np.float32)
        sample.reward = float(rng.random())
        samples.append(sample)
    return Group(Prompt(0, index, (1, 2), "", ""), samples)


FRESH = [group(i, [2, 2, 2], [2]) for i in (0, 1)]
STALE = [group(i, [1, 0], [1, 1, 1]) for i in (2, 3)]
MIXED = [group(4, [1, 2], [2, 2]), group(5, [2, 2], [0, 1, 2])]
TURNS = [group(6, [2, -1, -1, 2], [2, 2]), group(7, [1, -1, 1, -1, 2], [2, -1, 2])]


def config(stale_tokens: str = "recorded", old: str = "recompute", kl: bool = False) -> Config:
    sections = {"actor": {"old_logprobs": old}, "algorithm": {"use_kl_in_reward": kl}}
    return from_mapping({"model": {"path": "m"}, "rollout": {"stale_tokens": stale_tokens}, **sections})


def logprobs(batch: TrainBatch, shift: float) -> list[np.ndarray]:
    """Of another model: anything that follows from the sample."""
    return [(sample.rollout_logprobs + shift).astype(np.float32) for sample in batch.samples]


def prepared(c: Config, groups: list[Group]) -> TrainBatch:
    batch = TrainBatch.of(groups)
    current = logprobs(batch, 0.5) if batch_preparation.needs_policy(c, batch, STEP) else None
    batch.old_logprobs = batch_preparation.old_logprobs(c, batch, STEP, current)
    batch.ref_logprobs = logprobs(batch, -0.5) if c.needs_ref else None
    batch.loss_masks = batch_preparation.loss_masks(c, batch, STEP)
    batch_preparation.set_advantages(c, groups, batch)
    return batch


@pytest.mark.parametrize(
    ("options", "groups", "needed"),
    [
        (("recorded", "rollout"), FRESH, False),
        (("recorded",), FRESH, True),
        (("recorded",), STALE, False),
        (("recorded",), MIXED, True),
        (("recompute",), STALE, True),
        (("mask",), STALE, False),
    ],
)
def test_when_the_policys_log_probabilities_are_needed(options: Any, groups: list[Group], needed: bool):
    assert batch_preparation.needs_policy(config(*options), TrainBatch.of(groups), STEP) is needed


def test_denominators_by_version():
    (old, other) = prepared(config(), MIXED[:1]).old_logprobs or []
    first, second = MIXED[0].samples
    np.testing.assert_allclose(old, first.rollout_logprobs + np.array([0, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(other, second.rollout_logprobs + 0.5, rtol=1e-6)
    assert prepared(config(), STALE).old_logprobs is None
    assert batch_preparation.joined(STALE, [prepared(config(), [each]) for each in STALE]).old_logprobs is None
    masks = prepared(config("mask"), MIXED[:1]).loss_masks
    assert masks is not None
    assert [mask.tolist() for mask in masks] == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("stale_tokens", "old", "kl"),
    [("recorded", "recompute", True), ("recorded", "rollout", False), ("recompute", "recompute", False),
     ("mask", "rollout", True)],
)  # fmt: skip
def test_parts_are_the_whole(stale_tokens: str, old: str, kl: bool):
    c, groups = config(stale_tokens, old, kl), FRESH + STALE + MIXED + TURNS
    whole = prepared(c, groups)
    cut = [MIXED[1:] + STALE + TURNS, [*FRESH[1:], MIXED[0]], FRESH[:1]]
    found = batch_preparation.joined(groups, [prepared(c, part) for part in cut])
    assert [sample.key for sample in found.samples] == [sample.key for sample in whole.samples]
    for name in ("advantages", "old_logprobs", "ref_logprobs", "loss_masks"):
        ours, theirs = getattr(found, name), getattr(whole, name)
        assert (ours is None) == (theirs is None)
        for a, b in zip(ours or [], theirs or [], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("stale_tokens", "learnt"), [("recorded", [1, 0, 1, 0, 1]), ("mask", [0, 0, 0, 0, 1])])
def test_what_an_environment_has_answered_is_masked_and_costs_no_kl(stale_tokens: str, learnt: list[int]):
    masks = prepared(config(stale_tokens), TURNS).loss_masks
    assert masks is not None
    assert masks[2].tolist() == learnt
    assert prepared(config(), FRESH).loss_masks is None
    plain, answered = group(8, [2, 2], [2]), group(8, [2, -1, 2], [2])
    answered.samples[0].rollout_logprobs = np.insert(plain.samples[0].rollout_logprobs, 1, 0)
    answered.samples[0].reward, answered.samples[1] = plain.samples[0].reward, plain.samples[1]
    both = [np.unique(prepared(config(kl=True), [each]).advantages[0]).tolist() for each in (plain, answered)]
    assert both[0] == both[1]
