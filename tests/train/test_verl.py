"""Advantages and losses of random batches, as verl's functions computed them (`record_verl.py`), and as ours do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from trainer_fixtures import group_of

from jaxrl.config import Config, from_mapping
from jaxrl.train import advantages, losses
from jaxrl.train.kl import kl_estimate
from jaxrl.train.packing import TokenBatch
from jaxrl.types import Group

GROUP_SIZE = 4
BATCHES = json.loads((Path(__file__).parent / "data" / "verl.json").read_text(encoding="utf-8"))["batches"]


@pytest.fixture(params=range(len(BATCHES)))
def case(request: pytest.FixtureRequest) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A batch's arrays [samples] or [samples, tokens], and what verl makes of them."""
    each = BATCHES[request.param]
    return {name: np.array(value) for name, value in each["given"].items()}, each["expected"]


def names(start: str) -> list[str]:
    return [name for name in BATCHES[0]["expected"] if name.startswith(start)]


def groups_of(given: dict[str, np.ndarray]) -> list[Group]:
    lengths, rewards = (given[name].reshape(-1, GROUP_SIZE).tolist() for name in ("lengths", "rewards"))
    return [group_of(*each, index) for index, each in enumerate(zip(lengths, rewards, strict=True))]


def ragged(given: dict[str, np.ndarray], name: str) -> list[np.ndarray]:
    return [row[:length] for row, length in zip(given[name], given["lengths"], strict=True)]


def padded(given: dict[str, np.ndarray], rows: list[np.ndarray]) -> np.ndarray:
    out = np.zeros(given["response"].shape)
    for each, row in zip(out, rows, strict=True):
        each[: len(row)] = row
    return out


def token_batch(given: dict[str, np.ndarray]) -> TokenBatch:
    """One sample in each row."""
    learnt, counts = given["learnt"], given["learnt"].sum(axis=1, keepdims=True)
    arrays = {
        "segment_ids": given["response"],
        "loss_mask": learnt,
        "advantages": given["advantages"],
        "old_logprobs": given["old"],
        "rollout_logprobs": given["old"] - np.log(given["weights"]),  # whose weight is the one that verl was given
        "values": given["values"],
        "returns": given["returns"],
        "sequence_length": given["response"] * counts,
    }
    empty = TokenBatch.zeros(*learnt.shape)
    typed = {name: value.astype(getattr(empty, name).dtype) for name, value in arrays.items()}
    return dataclasses.replace(empty, **typed, num_sequences=(counts[:, 0] > 0).astype(np.int32))


def config_of(**sections: dict[str, Any]) -> Config:
    return from_mapping({"model": {"path": "x"}, **sections})


def compare(terms: losses.LossTerms, expected: dict[str, float]) -> None:
    np.testing.assert_allclose(terms.total / terms.denominator, expected["loss"], rtol=2e-5)
    for name, value in expected.items():
        if name in terms.means:
            found = terms.means[name]
            np.testing.assert_allclose(found.total / found.denominator, value, rtol=2e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("name", names("kl "))
def test_kl_estimates(case, name: str):
    given, expected = case
    found = kl_estimate(given["new"], given["ref"], name.split()[1])
    np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", [*names("grpo"), *names("dr_grpo"), *names("rloo"), *names("reinforce")])
def test_advantages_without_a_critic(case, name: str):
    given, expected = case
    estimator, _, kl = name.partition(" ")
    settings = {"adv_estimator": estimator, "use_kl_in_reward": bool(kl), "kl_coef": 0.1}
    algorithm = config_of(algorithm=settings).algorithm
    found, _ = advantages.compute(groups_of(given), algorithm, ragged(given, "old"), ragged(given, "ref"))
    np.testing.assert_allclose(padded(given, found), expected[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", names("gae "))
def test_advantages_and_returns_with_one(case, name: str):
    given, expected = case
    gamma, lam = map(float, name.split()[1:])
    algorithm = config_of(rollout={"n": 1}, algorithm={"adv_estimator": "gae", "gamma": gamma, "lam": lam}).algorithm
    masks, values = ragged(given, "learnt"), ragged(given, "values")
    found, returns = advantages.compute(groups_of(given), algorithm, loss_masks=masks, values=values)
    assert returns is not None
    np.testing.assert_allclose(padded(given, found), expected[name], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(padded(given, returns), expected[f"returns {gamma} {lam}"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", names("policy "))
def test_policy_losses(case, name: str):
    given, expected = case
    _, mode, c, *weighted = name.split()
    actor = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": float(c)}
    correction = {"rollout_is": "token", "rollout_is_threshold": 1e9} if weighted else {}
    config = config_of(actor=actor, algorithm={"loss_agg_mode": mode, "rollout_correction": correction})
    new = jnp.asarray(given["new"], jnp.float32)
    compare(losses.compute(new, new, token_batch(given), config), expected[name])


def test_gspos_loss(case):
    given, expected = case
    actor = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "ratio_level": "sequence"}
    config = config_of(actor=actor, algorithm={"loss_agg_mode": "seq-mean-token-mean"})
    new = jnp.asarray(given["new"], jnp.float32)
    compare(losses.compute(new, new, token_batch(given), config), expected["gspo"])


@pytest.mark.parametrize("name", names("value "))
def test_critics_losses(case, name: str):
    given, expected = case
    new, batch = jnp.asarray(given["new_values"], jnp.float32), token_batch(given)
    for reach in (0.5, np.inf):
        critic = config_of(critic={"cliprange_value": reach, "loss_agg_mode": name.split()[1]}).critic
        terms = losses.compute_values(new, batch, critic)
        if reach == np.inf:  # verl has no such value
            assert terms.means["critic/vf_clipfrac"].total == 0
        else:
            compare(terms, expected[name])
    assert terms.means["critic/vf_loss"] == (terms.total, terms.denominator)
    learnt = given["learnt"]
    mean, errors = terms.means["critic/vpred_mean"], (given["new_values"] - given["returns"])[learnt > 0] ** 2
    assert float(mean.total / mean.denominator) == pytest.approx(given["new_values"][learnt > 0].mean(), rel=1e-5)
    if name == "value token-mean":
        assert float(terms.total / terms.denominator) == pytest.approx(0.5 * errors.mean(), rel=1e-5)
