"""Attention over packed rows equals attention of each sequence alone, by a numpy loop."""

import numpy as np

from jaxrl.kernels.reference import packed_attention


def alone(q, k, v):
    """[T, H, D] causal attention, one query at a time."""
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = k[: t + 1, h // group] @ q[t, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[: t + 1, h // group] / weights.sum()
    return out


def test_segments_do_not_see_each_other(x64):
    random = np.random.default_rng(0)
    q = random.normal(size=(2, 10, 6, 4))
    k, v = random.normal(size=(2, 2, 10, 3, 4))
    segments = np.array([[1] * 4 + [2] * 5 + [0], [1] * 10])
    positions = np.array([[*range(4), *range(5), 0], [*range(10)]])
    out = np.asarray(packed_attention(q, k, v, segments, positions))
    assert out.dtype == np.float64
    assert np.isfinite(out).all()
    for row, part in ((0, slice(0, 4)), (0, slice(4, 9)), (1, slice(0, 10))):
        expected = alone(q[row, part], k[row, part], v[row, part])
        # entries that happen to lie near zero carry the rounding of the sum they come from
        np.testing.assert_allclose(out[row, part], expected, rtol=1e-12, atol=1e-14)


def test_narrow_input_keeps_its_dtype():
    import jax.numpy as jnp

    x = jnp.ones((1, 3, 2, 4), jnp.bfloat16)
    assert packed_attention(x, x[:, :, :1], x[:, :, :1], np.ones((1, 3)), np.arange(3)[None]).dtype == jnp.bfloat16
