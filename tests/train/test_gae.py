"""Advantages against a critic, and the critic's loss, against their published formulas, written without recursion.

The oracle is the sum of Schulman et al. 2016, eq. 16, over all pairs of tokens, and the conventions of verl's
`compute_gae_advantage_return` and `compute_value_loss`: tokens with mask 0 are passed over, whitening divides by the
unbiased standard deviation with 1e-8 under the root, and the loss is half the larger of two squared errors.
"""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import AlgorithmSection, CriticSection
from jaxrl.config.checks import NEEDS_WHOLE_BATCH
from jaxrl.train import advantages, losses
from jaxrl.train.packing import TokenBatch
from jaxrl.types import Group, Prompt, Sample, SampleKey


def random_group(rng, lengths, index=0):
    samples = []
    for i, length in enumerate(lengths):
        sample = Sample.empty(SampleKey(0, index, i))
        sample.token_ids, sample.reward = np.zeros(length, np.int32), float(rng.normal())
        samples.append(sample)
    return Group(Prompt(0, index, (1,), "", ""), samples)


def ragged(rng, groups):
    return [rng.normal(size=len(sample)).astype(np.float32) for group in groups for sample in group.samples]


def expected_of(rewards, values, mask, gamma, lam):
    """(advantages, returns) of one sample before whitening; NaN where the mask is 0."""
    kept = np.flatnonzero(mask)
    r, v = rewards[kept], np.append(values[kept], 0.0)
    errors = r + gamma * v[1:] - v[:-1]
    weights = np.array([[(gamma * lam) ** (j - i) if j >= i else 0.0 for j in range(len(r))] for i in range(len(r))])
    out = np.full((2, len(values)), np.nan)
    out[0, kept] = weights.reshape(len(r), len(r)) @ errors
    out[1, kept] = out[0, kept] + v[:-1]
    return out


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("masked", [False, True])
def test_random_batches(gamma, lam, masked):
    rng = np.random.default_rng(int(100 * gamma + 10 * lam))
    groups = [random_group(rng, lengths, i) for i, lengths in enumerate(([7, 1, 0, 12], [3, 3], [20]))]
    samples = [sample for group in groups for sample in group.samples]
    values, ours, ref = (ragged(rng, groups) for _ in range(3))
    masks = [(rng.random(len(s)) < 0.6).astype(np.float32) for s in samples] if masked else None
    algorithm = AlgorithmSection(adv_estimator="gae", gamma=gamma, lam=lam, use_kl_in_reward=True, kl_coef=0.1)
    found, returns = advantages.compute(groups, algorithm, ours, ref, masks, values)
    assert returns is not None

    raw = []
    for i, sample in enumerate(samples):
        rewards = -0.1 * (ours[i].astype(np.float64) - ref[i])
        rewards[-1:] += np.float64(sample.reward)
        mask = np.ones(len(sample)) if masks is None else masks[i]
        raw.append(expected_of(rewards, values[i].astype(np.float64), mask, gamma, lam))
    learnt = np.concatenate([x[0] for x in raw])
    learnt = learnt[~np.isnan(learnt)]
    whitened = [(x[0] - learnt.mean()) / np.sqrt(learnt.var(ddof=1) + 1e-8) for x in raw]
    assert [x.dtype for x in (*found, *returns)] == [np.float32] * (2 * len(samples))
    for mine, own, theirs, (_, target) in zip(found, returns, whitened, raw, strict=True):
        np.testing.assert_allclose(mine, np.nan_to_num(theirs), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own, np.nan_to_num(target), rtol=1e-5, atol=1e-6)


def test_by_hand():
    """One sample of two tokens, reward 1, values 0.5 and 0.25: errors -0.25 and 0.75."""
    rng = np.random.default_rng(0)
    group = random_group(rng, [2])
    group.samples[0].reward = 1.0
    algorithm = AlgorithmSection(adv_estimator="gae", lam=0.5)
    found, returns = advantages.compute([group], algorithm, values=[np.array([0.5, 0.25], np.float32)])
    assert returns is not None
    assert returns[0].tolist() == [0.625, 1.0]
    half = 0.3125  # advantages 0.125 and 0.75: their mean is 0.4375
    np.testing.assert_allclose(found[0], np.array([-half, half]) / math.sqrt(2 * half**2 + 1e-8), rtol=1e-6)


def test_without_values_or_tokens():
    algorithm = AlgorithmSection(adv_estimator="gae")
    with pytest.raises(ValueError, match="adv_estimator=gae needs the values of a critic"):
        advantages.compute([random_group(np.random.default_rng(0), [2])], algorithm)
    nothing = random_group(np.random.default_rng(0), [0, 0])
    found, returns = advantages.compute([nothing], algorithm, values=[np.zeros(0)] * 2)
    assert returns is not None
    assert [len(x) for x in (*found, *returns)] == [0] * 4
    alone, _ = advantages.compute([random_group(np.random.default_rng(0), [1])], algorithm, values=[np.zeros(1)])
    assert alone[0].tolist() == [0.0], "one token has nothing to stand out from"
    assert "gae" in NEEDS_WHOLE_BATCH


# ---------------------------------------------------------------- the critic's loss


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("reach", [0.5, 0.05, math.inf])
def test_the_loss_on_random_batches(mode, reach):
    rng, shape, lengths = np.random.default_rng(3), (5, 9), [9, 4, 0, 1, 6]
    mask = (np.arange(9) < np.array(lengths)[:, None]).astype(np.float32)
    before, returns, now = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
    batch = replace(
        TokenBatch.zeros(*shape),
        loss_mask=mask,
        values=before,
        returns=returns,
        sequence_length=np.broadcast_to(np.array(lengths, np.int32)[:, None], shape),
        num_sequences=np.array([n > 0 for n in lengths], np.int32),
    )
    terms = losses.compute_values(jnp.asarray(now), batch, CriticSection(loss_agg_mode=mode, cliprange_value=reach))

    total, clips, sums, means = 0.0, 0, [], []
    for row, length in enumerate(lengths):
        errors = []
        for v, old, target in zip(now[row, :length], before[row, :length], returns[row, :length], strict=True):
            near = min(max(float(v), old - reach), old + reach)
            plain, clipped = (float(v) - target) ** 2, (near - target) ** 2
            errors.append(max(plain, clipped))
            clips += clipped > plain
        total += sum(errors)
        if errors:
            sums.append(sum(errors))
            means.append(sum(errors) / len(errors))
    expected = {
        "token-mean": total / sum(lengths),
        "seq-mean-token-sum": np.mean(sums),
        "seq-mean-token-mean": np.mean(means),
    }
    assert float(terms.total / terms.denominator) == pytest.approx(0.5 * expected[mode], rel=1e-5)
    measured = {name: float(each.total / each.denominator) for name, each in terms.means.items()}
    assert measured["critic/vf_loss"] == pytest.approx(0.5 * expected[mode], rel=1e-5)
    assert measured["critic/vf_clipfrac"] == pytest.approx(clips / sum(lengths))
    assert measured["critic/vpred_mean"] == pytest.approx(now[mask > 0].mean(), rel=1e-5)
    assert (clips > 0) == (reach != math.inf)
