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
from jaxrl.training import advantages, losses
from jaxrl.training.advantages import kl_estimate
from jaxrl.training.packing import TokenBatch
from jaxrl.types import Group

GROUP_SIZE = 4
RECORDED = json.loads((Path(__file__).parent / "data" / "verl.json").read_text(encoding="utf-8"))
BATCHES = RECORDED["batches"]


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


def options_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of actor and algorithm that make the loss which verl has computed under this name."""
    clip: dict[str, Any] = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    match name.split():
        case ["policy", mode, c, *weighted]:
            correction = {"rollout_is": "token", "rollout_is_threshold": 1e9} if weighted else {}
            return clip | {"clip_ratio_c": float(c)}, {"loss_agg_mode": mode, "rollout_correction": correction}
        case ["gspo"]:
            actor = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "ratio_level": "sequence"}
            return actor, {"loss_agg_mode": "seq-mean-token-mean"}
        case ["cispo", mode]:
            return clip | {"loss_mode": "cispo"}, {"loss_agg_mode": mode}
        case ["rejection", mode, criteria, thresholds]:
            correction = {"rollout_rs": criteria.split(","), "rollout_rs_threshold": thresholds.split(",")}
            return clip | {"clip_ratio_c": 3.0}, {"loss_agg_mode": mode, "rollout_correction": correction}
        case ["bypass", level]:
            correction = {"rollout_is": level, "rollout_is_threshold": 1.3}
            correction |= {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.2"}
            actor = {"loss_mode": "reinforce", "old_logprobs": "rollout"}
            return actor, {"loss_agg_mode": "seq-mean-token-sum", "rollout_correction": correction}
    raise AssertionError(name)


LOSSES = [each for kind in ("policy", "gspo", "cispo", "rejection", "bypass") for each in names(kind)]


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(case, name: str):
    given, expected = case
    actor, algorithm = options_of(name)
    new, batch = jnp.asarray(given["new"], jnp.float32), token_batch(given)
    if name.startswith("bypass"):
        batch = dataclasses.replace(batch, rollout_logprobs=batch.old_logprobs)
    terms = losses.compute(new, new, batch, config_of(actor=actor, algorithm=algorithm))
    compare(terms, expected[name])
    for metric in terms.maxima.keys() & expected[name].keys():
        np.testing.assert_allclose(terms.maxima[metric], expected[name][metric], rtol=2e-5, err_msg=metric)


@pytest.mark.parametrize("name", names("value "))
def test_critics_losses(case, name: str):
    given, expected = case
    new, batch = jnp.asarray(given["new_values"], jnp.float32), token_batch(given)
    for reach in (0.5, np.inf):
        own = config_of(critic={"cliprange_value": reach}, algorithm={"loss_agg_mode": name.split()[1]})
        terms = losses.compute_values(new, batch, own)
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
