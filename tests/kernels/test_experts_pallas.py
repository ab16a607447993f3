"""What experts give for tokens, in kernels (interpreted): the values of the plain computation, and bits that depend
neither on other tokens nor on which device has which experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import experts_pallas
from jaxrl.models import experts

TOKENS, EMBED, MLP, EXPERTS, CHOSEN = 90, 48, 80, 8, 3


def made(dtype: str, *, bias: bool) -> tuple[Any, Any, dict[str, Any]]:
    random = np.random.default_rng(2)
    sizes = {"gate": (EMBED, MLP), "up": (EMBED, MLP), "down": (MLP, EMBED)}
    weights = {name: random.normal(size=(EXPERTS, *size)) / 7 for name, size in sizes.items()}
    if bias:
        weights |= {f"{name}_bias": random.normal(size=(EXPERTS, size[1])) for name, size in sizes.items()}
    x = jnp.asarray(random.normal(size=(TOKENS, EMBED)), dtype)
    logits = random.normal(size=(TOKENS, EXPERTS)) + np.linspace(0, 3, EXPERTS)  # some are chosen often
    chosen = np.sort(np.argsort(-logits, axis=1)[:, :CHOSEN], axis=1).astype(np.int32)
    share = jnp.asarray(random.dirichlet(np.ones(CHOSEN), TOKENS), jnp.float32)
    return x, experts.Routing(jnp.asarray(chosen), share, None), {n: jnp.asarray(w, dtype) for n, w in weights.items()}


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@partial(jax.jit, static_argnames="count")
def in_kernels(x: Any, routing: experts.Routing, weights: Any, begin: int = 0, first: int = 0, count: int = EXPERTS):
    arrays = x, routing.experts - begin, routing.weights, weights
    return experts_pallas.mix(*arrays, gated, first, num_experts=count, interpret=True)


@pytest.mark.parametrize(("dtype", "bias", "tolerance"), [("float32", True, 1e-5), ("bfloat16", False, 2e-2)])
def test_values_are_those_of_the_plain_computation(dtype: str, bias: bool, tolerance: float):
    x, routing, weights = made(dtype, bias=bias)
    wanted = np.asarray(experts.mix(x, routing, weights, experts.ExpertSettings(gated)), np.float32)
    found = np.asarray(in_kernels(x, routing, weights))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def test_a_token_has_the_same_bits_among_any_number_of_others(monkeypatch: pytest.MonkeyPatch):
    x, routing, weights = made("bfloat16", bias=True)
    whole = np.asarray(in_kernels(x, routing, weights))
    for tokens in (slice(0, 1), slice(20, 85)):
        own = jax.tree.map(lambda each, tokens=tokens: each[tokens], routing)
        np.testing.assert_array_equal(in_kernels(x[tokens], own, weights), whole[tokens])
    monkeypatch.setattr(experts_pallas, "MOST_TOKENS", 32)  # of which the last chunk has no more than 26
    np.testing.assert_array_equal(in_kernels.__wrapped__(x, routing, weights), whole)


def test_a_share_of_the_experts_gives_what_those_give():
    """Once as weights of their own, and once among all, where they lie."""
    x, routing, weights = made("float32", bias=True)
    half = EXPERTS // 2
    for begin in (0, half):
        own = {name: w[begin : begin + half] for name, w in weights.items()}
        alone = in_kernels(x, routing, own, begin, 0, half)
        biases = {name: w for name, w in own.items() if name.endswith("_bias")}
        np.testing.assert_array_equal(in_kernels(x, routing, weights | biases, begin, begin, half), alone)
        chosen = (routing.experts >= begin) & (routing.experts < begin + half)
        kept = routing._replace(weights=jnp.where(chosen, routing.weights, 0))
        wanted = experts.mix(x, kept, weights, experts.ExpertSettings(gated))
        np.testing.assert_allclose(alone, wanted, rtol=0, atol=1e-5)


def test_blocks_have_each_pair_once():
    own = jnp.asarray([[0, 2], [2, 5], [1, 2], [-1, 2]], jnp.int32)  # 5 and -1 are others'
    blocks = experts_pallas.blocks_of(own, 4, 2)
    found = [
        (int(expert), np.asarray(blocks.order)[start : start + count].tolist())
        for expert, start, count in zip(*map(np.asarray, blocks[1:]), strict=True)
        if count
    ]
    assert found == [(0, [0]), (1, [4]), (2, [1, 2]), (2, [5, 7])]
    assert len(blocks.expert) >= len(found)
