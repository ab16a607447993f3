"""Quantised rollout weights: what codes stand for, the same in every layout, and what a forward pass makes of them."""

import math
import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from uneven_models import normal_params, placed, uneven

from jaxrl.kernels.by_rows import at_once
from jaxrl.models import decoder
from jaxrl.sharding import rules
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.narrow_weights import SCALE, codes_of, largest
from jaxrl.sharding.reshard import reshard

MIXED = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS = {  # 9/3 is padded; biases, norms of heads; experts
    "llama": uneven(9, 3, "llama", num_layers=2),
    "qwen2": uneven(12, 4, "qwen2", num_layers=2),
    "qwen3_moe": uneven(8, 4, "qwen3_moe", num_layers=2, qk_norm=True, **MIXED),
}
FORMS = {"last": {}, "first": {"features_first": True}, "fused": {"fused_projections": True}}


MATRICES = {"q", "k", "v", "o", "gate", "up", "down", "qkv", "gate_up"}


def converted(name, tp, kind, form="last", max_tp=4, dtype=jnp.float64, devices=4):
    config, layout = MODELS[name], Layout(make_mesh(jax.devices()[:devices]), tp)
    params = placed(normal_params(config, jnp.float64), config, layout.mesh)
    return rules.to_rollout(params, config, layout, dtype, max_tp, quantization=kind, **FORMS[form])


def whole(layer, form):
    """The matrices that codes and factors stand for, as a plain layer has them."""
    found = {}
    for name, array in layer.items():
        if name.endswith(SCALE):
            continue
        if name + SCALE in layer:
            factors, codes = np.asarray(layer[name + SCALE], np.float64), np.asarray(array, np.float64)
            if name in ("gate", "up", "down") and codes.ndim == 3:  # of experts: one dim of inputs, between
                array = codes * factors[:, None]
            elif form == "first":
                array = codes * factors.reshape(*factors.shape, *(1,) * (codes.ndim - factors.ndim))
            else:
                array = codes * factors
        found[name] = jnp.asarray(array)
    return found


@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 127), ("fp8", 2**-3)])
def test_codes_are_the_nearest(kind, step):
    """An int8 code is off by half a step of its output, a float8 one by half a step of its own magnitude."""
    array = np.random.default_rng(0).normal(size=(64, 7)).astype(np.float32)
    array *= np.float32([1, 1e30, 1, 0, 1e-35, 1e-36, 1e-37])
    array[np.abs(array) < np.finfo(np.float32).tiny] = 0  # XLA may flush them
    codes, magnitudes = codes_of(kind, jnp.asarray(array), 0)
    assert np.isfinite(np.asarray(codes, np.float32)).all()
    assert np.asarray(codes[:, 3] == 0).all()
    np.testing.assert_allclose(magnitudes, np.maximum(np.abs(array).max(0), 1e-35), rtol=1e-6)
    found = np.asarray(codes, np.float64) / largest(kind) * np.asarray(magnitudes, np.float64)
    assert np.abs(np.asarray(codes, np.float64)).max() == largest(kind)
    # below 2**-6 float8's steps are all of one size
    magnitudes = np.asarray(magnitudes, np.float64)
    own, all_alike = np.maximum(np.abs(array), magnitudes * 2**-6 / 448), np.broadcast_to(magnitudes, (64, 7))
    least = own if kind == "fp8" else all_alike
    off = np.abs(found - array)
    assert (off <= step / 2 * least * (1 + 1e-5)).all()
    assert off.max() > step / 8 * magnitudes.max(), "in so few bits"


@pytest.mark.parametrize(("name", "form"), [("llama", "last"), ("qwen2", "fused"), ("qwen3_moe", "first")])
def test_matrices_alone_are_quantised(name, form, x64):
    plain, codes = (converted(name, 2, kind, form, dtype=jnp.float32) for kind in ("none", "int8"))
    assert plain.keys() == codes.keys()
    for one, narrow in zip(plain["layers"], codes["layers"], strict=True):
        quantised = {each for each in narrow if each + SCALE in narrow}
        assert quantised == MATRICES & set(one)
        assert all(narrow[each].dtype == jnp.int8 for each in quantised)
        assert all(narrow[each + SCALE].dtype == jnp.float32 for each in quantised)
        found = whole(narrow, form)
        for each in one:
            assert found[each].shape == one[each].shape
            allowed = np.abs(one[each]).max() / 254 * 1.001 if each in quantised else 0
            np.testing.assert_allclose(found[each], one[each], rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("name", "form", "kind"), [("llama", "first", "int8"), ("qwen2", "fused", "fp8"), ("qwen3_moe", "last", "int8")]
)
def test_codes_are_the_same_in_every_layout_and_move_between_them(name, form, kind, x64):
    fresh = {tp: converted(name, tp, kind, form) for tp in (1, 2, 4)}
    for tp in (2, 4):
        jax.tree.map(np.testing.assert_array_equal, fresh[tp], fresh[1])
    alone = converted(name, 1, kind, form, devices=1)
    jax.tree.map(np.testing.assert_array_equal, alone, fresh[1])
    mesh = make_mesh(jax.devices()[:4])
    for before, after in pairwise((1, 4, 2, 1)):
        target = rules.rollout_shardings(MODELS[name], Layout(mesh, after), 4, quantization=kind, **FORMS[form])
        moved = reshard(fresh[before], target, keep=True)
        for own, wanted in zip(*map(jax.tree.leaves, (moved, fresh[after])), strict=True):
            np.testing.assert_array_equal(own, wanted)
            assert own.sharding.is_equivalent_to(wanted.sharding, own.ndim)


@pytest.mark.parametrize(
    ("name", "form", "kind"), [("llama", "last", "fp8"), ("qwen2", "fused", "int8"), ("qwen3_moe", "first", "int8")]
)
def test_a_forward_pass_is_that_of_the_numbers_that_codes_stand_for(name, form, kind, x64):
    """In float64 there is nothing between them but the order of a multiplication."""
    config, first = MODELS[name], form == "first"
    params = jax.tree.map(np.asarray, converted(name, 1, kind, form, max_tp=1, devices=1))
    plain = params | {"layers": [whole(layer, form) for layer in params["layers"]]}
    tokens = np.random.default_rng(0).integers(0, 101, (4, 6))

    def attends(index, q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), None

    @jax.jit
    def logits(params):
        at = jnp.broadcast_to(jnp.arange(6), tokens.shape)
        how = {"dtype": jnp.float64, "features_first": first}
        hidden, _ = decoder.forward_layers(params, tokens, at, attends, config, **how)
        return decoder.logits(params, hidden, config, features_first=first)

    np.testing.assert_allclose(logits(params), logits(plain), rtol=1e-9, atol=1e-9)


def test_bfloat16_rounds_after_the_factor():
    """Codes times activations are summed in float32 and take their factor there: not two roundings."""
    config = MODELS["llama"]
    layer = converted("llama", 1, "int8", max_tp=1, dtype=jnp.bfloat16, devices=1)["layers"][0]
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 24)), jnp.bfloat16)
    weights = decoder._LayerWeights(layer, x.dtype, config, False, False, None, multiply=at_once.multiply)
    found = weights.product(x, "up")
    exact = np.asarray(x, np.float64) @ (np.asarray(layer["up"], np.float64) * np.asarray(layer["up_scale"]))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_sync_gathers_codes(name):
    """Also of matrices of which training splits the side of inputs, as heads are too few for its devices."""
    config, layout = MODELS[name], Layout(make_mesh(), 2)
    given = rules.map_weights(
        lambda weight, sharding: jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=sharding),
        config.weights(),
        rules.train_shardings(config, layout.mesh),
    )
    given = {"layers": given["layers"]}
    ((program, arguments),) = rules.rollout_calls(given, config, layout, jnp.float32, 2, quantization="int8")
    text = program.lower(*arguments).compile().as_text()
    gathered = [
        (dtype, math.prod(map(int, dims.split(","))))
        for dtype, dims in re.findall(r"= \(?(\w+)\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    ]
    assert max(size for dtype, size in gathered if dtype == "s8") >= 24 * 9 * 4
    # routers and factors
    assert max(size for dtype, size in gathered if dtype != "s8") <= 4 * 36
