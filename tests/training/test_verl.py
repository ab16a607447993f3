"""Advantages and losses of random batches, as verl's functions computed them (`record_verl.py`), and as ours do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from trainer_fixtures import group_of

from jaxrl.config import Config, from_mapping
from jaxrl.training import advantages, losses
from jaxrl.training.advantages import kl_estimate
from jaxrl.training.packing import TokenBatch
from jaxrl.types import Group

GROUP_SIZE = 4
RECORDED = json.loads((Path(__file__).parent / "data" / "verl.json").read_text(encoding="utf-8"))
BATCHES = RECORDED["batches"]
RULES = Path(__file__).parents[2] / "docs" / "rollout-rules.md"


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


@pytest.mark.parametrize("name", names("cispo "))
def test_cispos_loss(case, name: str):
    given, expected = case
    actor = {"loss_mode": "cispo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    config = config_of(actor=actor, algorithm={"loss_agg_mode": name.split()[1]})
    new = jnp.asarray(given["new"], jnp.float32)
    compare(losses.compute(new, new, token_batch(given), config), expected[name])


@pytest.mark.parametrize("name", names("rejection "))
def test_losses_without_what_is_rejected(case, name: str):
    given, expected = case
    _, mode, criteria, thresholds = name.split()
    actor = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    correction = {"rollout_rs": criteria.split(","), "rollout_rs_threshold": thresholds.split(",")}
    config = config_of(actor=actor, algorithm={"loss_agg_mode": mode, "rollout_correction": correction})
    new = jnp.asarray(given["new"], jnp.float32)
    terms = losses.compute(new, new, token_batch(given), config)
    compare(terms, expected[name])
    for metric in terms.maxima.keys() & expected[name].keys():
        np.testing.assert_allclose(terms.maxima[metric], expected[name][metric], rtol=2e-5, err_msg=metric)
    assert mode != "token-mean" or terms.maxima.keys() & expected[name].keys()


def test_the_presets_of_rollout_correction_are_the_settings_that_the_page_says():
    table = RULES.read_text(encoding="utf-8").partition("| preset of verl |")[2].partition("\n\n")[0]
    said = {}
    for line in table.splitlines()[2:]:
        name, correction, more = (cell.strip() for cell in line.strip("|").split("|"))
        name, bypass = name.strip("`"), name.startswith("`bypass")
        assert bool(more) == bypass
        actor = {"old_logprobs": "rollout"} if bypass else {}
        if name.startswith("bypass_pg"):
            actor["loss_mode"] = "reinforce"
        config = config_of(actor=actor, algorithm={"rollout_correction": yaml.safe_load(correction.strip("`"))})
        ours = config.algorithm.rollout_correction
        said[name] = {
            "rollout_is": None if ours.rollout_is == "none" else ours.rollout_is,
            "rollout_is_threshold": ours.rollout_is_threshold,
            "rollout_is_batch_normalize": False,
            "rollout_rs": ",".join(ours.rollout_rs) or None,
            "rollout_rs_threshold": ",".join(ours.rollout_rs_threshold) or None,
            "bypass_mode": config.actor.old_logprobs == "rollout",
            "loss_type": "reinforce" if config.actor.loss_mode == "reinforce" else "ppo_clip",
        }
    theirs = {
        name: each | {"rollout_rs_threshold": each["rollout_rs_threshold"] and str(each["rollout_rs_threshold"])}
        for name, each in RECORDED["presets"].items()
    }
    assert said == theirs


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_reinforce_in_bypass_mode(case, level: str):
    given, expected = case
    correction = {"rollout_is": level, "rollout_is_threshold": 1.3}
    correction |= {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.2"}
    config = config_of(
        actor={"loss_mode": "reinforce", "old_logprobs": "rollout"},
        algorithm={"loss_agg_mode": "seq-mean-token-sum", "rollout_correction": correction},
    )
    new, batch = jnp.asarray(given["new"], jnp.float32), token_batch(given)
    batch = dataclasses.replace(batch, rollout_logprobs=batch.old_logprobs)
    compare(losses.compute(new, new, batch, config), expected[f"bypass {level}"])


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
