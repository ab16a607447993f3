"""Mixtures of experts against the plain sum over all experts: values, gradients, and devices that share them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models import experts
from jaxrl.sharding.mesh import make_mesh

E, F, X, C = 12, 16, 8, 3
SHAPE = experts.ExpertSettings(lambda gate, up: jax.nn.silu(gate) * up)


def weights_of(random: np.random.Generator, *, biased: bool) -> dict[str, jax.Array]:
    sizes: dict[str, tuple[int, ...]] = {"gate": (X, E, F), "up": (X, E, F), "down": (X, F, E)}
    sizes |= {"gate_bias": (X, F), "up_bias": (X, F), "down_bias": (X, E)} if biased else {}
    return {name: jnp.asarray(random.normal(size=size)) for name, size in sizes.items()}


def plain(x: jax.Array, routing: experts.Routing, weights: Any) -> jax.Array:
    def biased(y: jax.Array, name: str) -> jax.Array:
        return y + weights[f"{name}_bias"][:, None] if f"{name}_bias" in weights else y

    gate, up = (biased(jnp.einsum("te,xef->xtf", x, weights[name]), name) for name in ("gate", "up"))
    each = biased(jnp.einsum("xtf,xfe->xte", SHAPE.activation(gate, up), weights["down"]), "down")
    share = jnp.sum(jax.nn.one_hot(routing.experts, X) * routing.weights[..., None], axis=-2)
    return jnp.einsum("tx,xte->te", share, each)


def routing_of(random: np.random.Generator, tokens: int, kind: str) -> experts.Routing:
    chosen = np.stack([np.sort(random.permutation(X)[:C]) for _ in range(tokens)])
    if kind == "all to one":
        chosen = np.tile([2, 4, 5], (tokens, 1))
    if kind == "some get none":
        chosen = np.stack([np.sort(random.permutation(4)[:C]) for _ in range(tokens)])
    return experts.Routing(jnp.asarray(chosen, jnp.int32), jnp.asarray(random.uniform(size=chosen.shape)), None)


@pytest.mark.parametrize(
    ("tokens", "kind", "biased"),
    [(40, "any", True), (40, "all to one", False), (7, "some get none", True), (1, "any", False)],
)
def test_blocks_are_the_plain_sum_with_its_gradients(x64, tokens, kind, biased):
    random = np.random.default_rng(tokens)
    x, routing = jnp.asarray(random.normal(size=(tokens, E))), routing_of(random, tokens, kind)
    weights, cotangent = weights_of(random, biased=biased), jnp.asarray(random.normal(size=(tokens, E)))

    def total(function: Any, x: jax.Array, share: jax.Array, weights: Any) -> jax.Array:
        return jnp.sum(function(x, routing._replace(weights=share), weights) * cotangent)

    def blocks(x: jax.Array, routing: experts.Routing, weights: Any) -> jax.Array:
        return experts.mix(x, routing, weights, SHAPE)

    found, expected = (
        jax.jit(jax.value_and_grad(partial(total, f), argnums=(0, 1, 2)))(x, routing.weights, weights)
        for f in (blocks, plain)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), found, expected)


@pytest.mark.parametrize(("tokens", "biased"), [(1, True), (40, False)])
def test_batched_experts_are_the_plain_sum(x64, tokens, biased):
    random = np.random.default_rng(tokens)
    x, weights = jnp.asarray(random.normal(size=(tokens, E))), weights_of(random, biased=biased)
    routing = routing_of(random, tokens, "any")
    if tokens == 1:  # so few that their experts' weights are gathered
        routing = jax.tree.map(lambda each: each[:, :2], routing)
    found = experts.mix(x, routing, weights, SHAPE._replace(batched=True))
    np.testing.assert_allclose(found, plain(x, routing, weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("split", "gathered", "biased"), [(("x0", "x1", "x2"), True, False), (("x0",), True, True), ((), False, True)]
)
def test_experts_of_several_devices_are_those_of_one(x64, split, gathered, biased):
    """Experts over some axes and their columns over the others; tokens everywhere the same, or each device's own."""
    mesh, random = make_mesh(jax.devices()[:8]), np.random.default_rng(5)
    rest = tuple(axis for axis in ("x0", "x1", "x2") if axis not in split)
    specs = {
        **{name: PartitionSpec(split or None, None, rest or None) for name in ("gate", "up")},
        "down": PartitionSpec(split or None, rest or None),
        **{name: PartitionSpec(split or None, rest or None) for name in ("gate_bias", "up_bias")},
        "down_bias": PartitionSpec(split or None),
    }
    rows = PartitionSpec(mesh.axis_names) if gathered else PartitionSpec()
    weights, x = weights_of(random, biased=biased), jnp.asarray(random.normal(size=(16, 5, E)))
    routing = jax.tree.map(lambda each: each.reshape(16, 5, C), routing_of(random, 80, "any"))
    mix = experts.over_devices(mesh, specs, rows, batched=False, gathered=gathered)
    cotangent = jnp.asarray(random.normal(size=x.shape))

    def total(function: Any, x: jax.Array, share: jax.Array, weights: Any) -> jax.Array:
        return jnp.sum(function(x, routing._replace(weights=share), weights, SHAPE) * cotangent)

    def whole(x: jax.Array, routing: experts.Routing, weights: Any, shape: Any) -> jax.Array:
        flat = jax.tree.map(lambda each: each.reshape(80, -1), (x, routing))
        return plain(*flat, weights).reshape(x.shape)

    placed = {name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in weights.items()}
    found = jax.jit(jax.value_and_grad(partial(total, mix), argnums=(0, 1, 2)))(x, routing.weights, placed)
    expected = jax.value_and_grad(partial(total, whole), argnums=(0, 1, 2))(x, routing.weights, weights)
    if not gathered:  # in rollouts nothing is differentiated
        found, expected = found[0], expected[0]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), found, expected)


def test_a_router_chooses_the_largest_and_divides_by_what_is_asked(x64):
    random = np.random.default_rng(1)
    x, router, bias = (random.normal(size=size) for size in ((9, E), (E, X), (X,)))
    logits = x @ router + bias
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.sort(np.argsort(-logits, axis=-1)[:, :C], axis=-1)
    chosen = np.take_along_axis(shares, order, -1)
    for normalised, expected in ((False, chosen), (True, chosen / chosen.sum(-1, keepdims=True))):
        found = experts.route(*map(jnp.asarray, (x, router, bias)), C, normalised=normalised)
        np.testing.assert_array_equal(found.experts, order)
        np.testing.assert_allclose(found.weights, expected, rtol=1e-12)
        assert found.probabilities is not None
        np.testing.assert_allclose(found.probabilities, shares, rtol=1e-12)
