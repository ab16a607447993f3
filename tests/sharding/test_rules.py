"""Padding, specs, and the way from training to rollout form: equal logits on every layout."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from uneven_models import normal_params, placed, uneven

from jaxrl.models import decoder
from jaxrl.schema.devices import prime_factors
from jaxrl.sharding import rules
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

TOKENS = np.random.default_rng(0).integers(0, 101, (8, 6))


tiny = partial(uneven, num_layers=5)


def causal(q, k, v):
    B, T, H, D = q.shape
    K = k.shape[2]
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k) / D**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(B, T, H, D)


def positions():
    return jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)


@cache
def train_logits(config):
    @jax.jit
    def logits(params):
        hidden = decoder.forward_scan(params, TOKENS, positions(), causal, config, dtype=jnp.float64)
        return decoder.logits(params, hidden, config)

    return np.asarray(logits(normal_params(config, jnp.float64)))


def rollout_logits(params, config, layout):
    """Attention in shard_map over dp and tp, as rollout runs it: each shard sees its own heads only."""
    K = params["layers"][0]["k"].shape[1]
    heads, kv = layout.spec("dp", None, "tp", None), layout.spec("dp", None, layout.kv_axes(K), None)
    attend = jax.shard_map(causal, mesh=layout.mesh, in_specs=(heads, kv, kv), out_specs=heads)

    def forward(params, tokens):
        hidden, _ = decoder.forward_layers(
            params, tokens, positions(), lambda i, q, k, v: (attend(q, k, v), None), config, dtype=jnp.float64
        )
        return decoder.logits(params, hidden, config)

    return jax.jit(forward)(params, jax.device_put(TOKENS, layout.sharding("dp")))


@pytest.mark.parametrize("tp", [1, 6, 8, 12])
def test_padded_heads_shard_at_every_degree_on_the_way(tp):
    """Brute force over the rule itself, and over every cheaper pair."""

    def fits(heads, kv, degree):
        prefix = shards = 1
        for factor in prime_factors(degree):
            prefix *= factor
            if kv % prefix:
                break
            shards = prefix
        rest = degree // shards
        return heads % kv == 0 and (rest == 1 or (kv == shards and heads // kv % rest == 0))

    degrees = [int(np.prod(prime_factors(tp)[:end], dtype=int)) for end in range(len(prime_factors(tp)) + 1)]
    for kv in range(1, 9):
        for group in range(1, 8):
            heads, padded_kv = rules.pad_heads(kv * group, kv, tp)
            assert all(fits(heads, padded_kv, degree) for degree in degrees)
            assert padded_kv >= kv
            assert heads // padded_kv >= group
            cheaper = [
                (g * k, k)
                for k in range(kv, 2 * tp + kv)
                for g in range(group, 2 * tp + group)
                if g * k < heads and all(fits(g * k, k, degree) for degree in degrees)
            ]
            assert not cheaper


def test_train_specs_split_the_tensor_dim_nested():
    mesh = make_mesh()
    table = tiny(8, 4, intermediate_size=32, vocab_size=102).weights()
    specs = rules.map_weights(lambda weight: rules.train_spec(weight, mesh), table)
    every = ("x0", "x1", "x2")
    assert specs["layers"]["q"] == P(None, None, every, None)
    assert specs["layers"]["k"] == P(None, every, None, None), "four heads would leave two copies"
    assert specs["layers"]["o"] == P(None, every, None, None)
    assert specs["layers"]["down"] == P(None, every, None)
    assert specs["embed"] == P(("x0",), None)
    assert specs["layers"]["attn_norm"] == P(None, None)


def test_padding_is_for_the_largest_degree_and_none_at_one():
    config = tiny()
    assert rules.padded_config(config, 1) == config
    padded = rules.padded_config(config, 8)
    assert (padded.num_heads, padded.num_kv_heads) == (16, 4)
    assert (padded.intermediate_size, padded.vocab_size) == (32, 104)
    with pytest.raises(ValueError, match=r"padded for tp 2 cannot run at tp 4: the layout's tp must divide"):
        rules.rollout_shardings(config, Layout(make_mesh(), 4), 2)


LAYOUTS = [  # query heads, key/value heads, family, devices, tp
    (9, 3, "qwen2", 8, 4),
    (5, 5, "llama", 8, 8),
    (9, 3, "qwen3", 6, 6),
]


@pytest.mark.parametrize(("heads", "kv_heads", "family", "count", "tp"), LAYOUTS)
def test_padded_rollout_has_equal_logits(heads, kv_heads, family, count, tp, x64):
    config, layout = uneven(heads, kv_heads, family, num_layers=2), Layout(make_mesh(jax.devices()[:count]), tp)
    params = placed(normal_params(config, jnp.float64), config, layout.mesh)
    rollout = rules.to_rollout(params, config, layout, jnp.float64, max_tp=count)
    actual = np.asarray(rollout_logits(rollout, config, layout))
    np.testing.assert_allclose(actual[..., :101], train_logits(config), rtol=1e-11, atol=1e-11)
    assert np.all(np.isneginf(actual[..., 101:]))
    assert actual.shape[-1] == rules.padded_config(config, count).vocab_size


def test_whole_and_chunked_conversion_agree():
    config, layout = tiny(), Layout(make_mesh(), 4)
    params = placed(normal_params(config, jnp.float32), config, layout.mesh)
    shardings = rules.rollout_shardings(config, layout, 8)
    whole = rules.to_rollout(params, config, layout, jnp.bfloat16, 8, layers_per_call=config.num_layers)
    chunked = rules.to_rollout(params, config, layout, jnp.bfloat16, 8, layers_per_call=2)
    assert jax.tree.structure(whole) == jax.tree.structure(chunked)
    for a, b, sharding in zip(*map(jax.tree.leaves, (whole, chunked, shardings)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(sharding, a.ndim)
        assert b.sharding.is_equivalent_to(sharding, b.ndim)
    assert chunked["layers"][0]["q"].dtype == jnp.bfloat16
    assert chunked["layers"][0]["attn_norm"].dtype == chunked["final_norm"].dtype == jnp.float32


def test_the_second_sync_compiles_nothing():
    config, layout = tiny(), Layout(make_mesh(), 2)
    params = placed(normal_params(config, jnp.float32), config, layout.mesh)
    rules.to_rollout(params, config, layout, jnp.float32)
    with jax.transfer_guard_device_to_host("disallow"):
        outer, chunk = rules._compiled(config, layout, jnp.dtype(jnp.float32), 2, 4)
        before = outer._cache_size(), chunk._cache_size()
        rules.to_rollout(params, config, layout, "float32")
        assert (outer._cache_size(), chunk._cache_size()) == before
