"""Advantages against a critic, against their published formula, written without recursion.

The oracle is the sum of Schulman et al. 2016, eq. 16, over all pairs of tokens, and the conventions of verl's
`compute_gae_advantage_return`: tokens with mask 0 are passed over, and whitening divides by the unbiased standard
deviation with 1e-8 under the root.
"""

import numpy as np
import pytest
from trainer_fixtures import group_of

from jaxrl.config import AlgorithmSection
from jaxrl.config.checks import NEEDS_WHOLE_BATCH
from jaxrl.train import advantages


def random_group(rng, lengths, index=0):
    return group_of(lengths, rng.normal(size=len(lengths)).tolist(), index)


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


@pytest.mark.parametrize(("gamma", "lam", "masked"), [(1.0, 0.95, False), (0.99, 0.9, True), (0.0, 0.5, True)])
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
