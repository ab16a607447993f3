"""Alarms: what looks like training and is none is said at once, and ends the run after `trainer.max_bad_steps`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from jaxrl.config import from_mapping
from jaxrl.record.alarms import Alarms, non_finite
from jaxrl.types import Group, Prompt, Sample, SampleKey, TrainBatch


def make_alarms(limit: int = 3, quantization: str = "none", **algorithm: Any) -> Alarms:
    """A batch has 2 prompts of 2 samples: 4 rewards."""
    values = {
        "model": {"path": "m"},
        "data": {"task": "t", "train_batch_size": 2},
        "rollout": {"n": 2, "quantization": quantization},
        "trainer": {"max_bad_steps": limit},
        "algorithm": algorithm,
    }
    return Alarms(from_mapping(values))


def make_batch(logprob: float = -1.0) -> TrainBatch:
    logprobs = np.array([logprob, -1.0], np.float32)
    sample = Sample(SampleKey(0, 0, 0), np.array([5, 6]), logprobs, logprobs, np.zeros(2, np.int32), "stop")
    return TrainBatch.of([Group(Prompt(0, 0, (1,), "p", "s"), [sample])])


def heard(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


def test_a_reward_that_works_begins_the_count_anew():
    alarms = make_alarms(limit=1)
    for _ in range(5):
        assert [alarms.rewarded(status, "why") for status in ("error", "error", "error", "ok")] == [None] * 4


def updated(alarms: Alarms, step: int, updates: int, skipped: int, batch: TrainBatch | None = None) -> Any:
    counts = {"actor": (updates, skipped)}
    return alarms.updated(step, counts, {"actor/grad_norm": float("nan")}, batch or make_batch())


def test_steps_without_an_update_end_the_run(caplog: pytest.LogCaptureFixture):
    alarms = make_alarms()
    assert updated(alarms, 1, 2, 0) is None
    assert heard(caplog) == []
    assert updated(alarms, 2, 2, 2) is None
    assert updated(alarms, 3, 2, 2) is None
    text = "updates skipped: the gradient is not finite (norm nan); all that it was computed from is finite"
    assert heard(caplog) == [f"step 2: 2 of 2 {text}", f"step 3: 2 of 2 {text}; no update in 2 steps in a row"]
    assert updated(alarms, 4, 2, 1) is None, "half of the step has learned: no bad step"
    assert heard(caplog) == [f"step 4: 1 of 2 {text}"]
    assert [updated(alarms, step, 2, 2) for step in (5, 6)] == [None, None]
    assert updated(alarms, 7, 2, 2) == (
        f"step 7: 2 of 2 {text}; no update in 3 steps in a row (trainer.max_bad_steps=3)"
    )


def mismatched(alarms: Alarms, *values: float, share: float = 0.0) -> None:
    for step, value in enumerate(values, 1):
        measured = {"rollout_corr/k3_kl": value, "training/off_policy/share": share}
        assert alarms.updated(step, {"actor": (1, 0)}, measured, make_batch()) is None


def test_a_quantised_rollout_that_is_another_policy_is_told_when_it_begins_and_doubles(
    caplog: pytest.LogCaptureFixture,
):
    mismatched(make_alarms(quantization="int8"), 0.009, 0.011, 0.02, 0.022, 0.03, 0.01, 0.012)
    text = "nats a token, above 0.01: rollout.quantization=int8 makes another policy of the rollout"
    off = "; algorithm.rollout_correction.rollout_is is none"
    assert heard(caplog) == [
        f"step {step}: rollout_corr/k3_kl is {value} {text}{off}"
        for step, value in ((2, "0.011"), (4, "0.022"), (7, "0.012"))
    ]
    corrected = {"rollout_correction": {"rollout_is": "token"}}
    mismatched(make_alarms(quantization="int8", **corrected), 0.011, share=0.25)
    stale = " (earlier weights wrote 25% of the tokens, which counts as well)"
    assert heard(caplog) == [f"step 1: rollout_corr/k3_kl is 0.011 {text}{stale}"]
    mismatched(make_alarms(), 0.5)
    assert heard(caplog) == [], "one that is not quantised has other reasons"


def test_what_is_not_finite_is_named(caplog: pytest.LogCaptureFixture):
    batch = make_batch(float("-inf"))
    batch.old_logprobs = [np.zeros(2, np.float32)]
    batch.advantages = [np.array([0.0, np.nan], np.float32)]
    assert non_finite(batch) == ["the rollout's log-probabilities", "the advantages"]
    updated(make_alarms(), 1, 1, 1, batch)
    assert heard(caplog)[0].endswith("so are the rollout's log-probabilities and the advantages")
