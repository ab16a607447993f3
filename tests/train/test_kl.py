"""KL estimates are the same numbers for numpy and for jax, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.train.advantages import kl_estimate

BY_HAND = {
    "kl": [0.5, -1, 30],
    "abs": [0.5, 1, 30],
    "mse": [0.125, 0.5, 450],
    "low_var_kl": [np.exp(-0.5) - 0.5, np.e - 2, 10],
}


@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("kind", BY_HAND)
def test_by_hand(kind, library):
    new, ref = library.asarray([0.5, 0.0, 0.0]), library.asarray([0.0, 1.0, -30.0])
    found = kl_estimate(new, ref, kind)
    assert isinstance(found, np.ndarray if library is np else jax.Array)
    assert found.dtype == new.dtype
    np.testing.assert_allclose(found[:2], BY_HAND[kind][:2], rtol=1e-6)
    assert abs(found[2]) <= BY_HAND[kind][2]


def test_gradient_of_the_low_variance_estimate():
    """d k3 / d logprob = 1 - exp(ref - logprob)."""
    gradient = jax.jit(jax.grad(lambda x: kl_estimate(x, jnp.float32(-1.0), "low_var_kl")))(jnp.float32(-1.5))
    np.testing.assert_allclose(gradient, 1 - np.exp(0.5), rtol=1e-6)


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"actor\.kl_loss_type and algorithm\.kl_penalty must be .*found 'k4'"):
        kl_estimate(np.zeros(1), np.zeros(1), "k4")
