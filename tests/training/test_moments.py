"""Moments in fewer bytes: what a code stands for, Adam in float64, any number of devices, the plan of the memory; and
state in the host's memory, where an update has the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import TRAINED
from trainer_fixtures import LONG, copied, programs_of, weights_of

from jaxrl.models.lora import Lora
from jaxrl.models.streaming import HOST
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.moments import Block, decoded, encoded, kept_as
from jaxrl.training.trainer import MeshTrainer
from jaxrl.training.update_memory import resident_parts

STEP = 2 ** (1 / 8) - 1  # between two codes


def drawn(shape: tuple[int, ...], octaves: float, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.choice((-1.0, 1.0), shape) * 2.0 ** -random.uniform(0, octaves, shape)).astype(np.float32)


def roundings(x: np.ndarray, count: int, *, is_square: bool) -> np.ndarray:
    def one(key: Any) -> jax.Array:
        return decoded(encoded(jnp.asarray(x), Block(0, 64), jax.random.bits(key, x.shape) >> 16, is_square=is_square))

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), count)), np.float64)


@pytest.mark.parametrize(("is_square", "octaves"), [(False, 15.7), (True, 31.7)])
def test_codes_have_one_relative_error_and_no_bias(is_square, octaves):
    x = drawn((256, 8), octaves)
    x = np.abs(x) if is_square else x
    found = roundings(x, 1000, is_square=is_square)
    errors = found / x - 1
    assert np.abs(errors).max() < STEP * 1.001
    assert np.abs(errors.mean(0)).max() < 5 * STEP / 2 / 1000**0.5


def adam(dtype: Any) -> Any:
    inner = optax.scale_by_adam(b1=0.9, b2=0.99)
    return inner if dtype is None else kept_as(dtype, inner, {"w": Block(0, 256)} if dtype == "int8" else {})


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.005), ("int8", 0.08)])
def test_steps_are_near_those_of_adam_in_float64(x64, dtype, most):
    """Gradients of 12 octaves in each block: how far a weight goes in 200 steps, and the longest step."""
    random, scales = np.random.default_rng(1), np.abs(drawn((256, 8), 12))
    gradients = (random.normal(size=scales.shape) + random.normal(size=(200, *scales.shape))) * scales

    def walk(transform: Any, wide: Any) -> tuple[np.ndarray, float]:
        def step(state: Any, gradient: Any) -> Any:
            moved, state = transform.update({"w": gradient}, state)
            return state, moved["w"]

        state = transform.init({"w": jnp.zeros(scales.shape, wide)})
        _, steps = jax.lax.scan(step, state, jnp.asarray(gradients, wide))
        return np.asarray(steps, np.float64).sum(0), float(jnp.abs(steps).max())

    expected, longest = walk(adam(None), jnp.float64)
    found, own = walk(adam(dtype), jnp.float32)
    assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)
    assert own < 1.5 * longest, "no step without bound"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_second_moments_fade(dtype):
    """By a hundredth per update, which is less than half a step of either type."""
    transform, zeros = adam(dtype), {"w": jnp.zeros((256, 64))}
    _, state = transform.update({"w": jnp.asarray(drawn((256, 64), 6))}, transform.init(zeros))

    def second(state: Any) -> np.ndarray:
        return np.asarray(decoded(state.nu["w"]) if dtype == "int8" else state.nu["w"], np.float64)

    before = second(state)
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 100, lambda _, s: transform.update(zeros, s)[1], s))(state)
    assert (second(state) / before).mean() == pytest.approx(0.99**100, rel=0.03)


# ---------------------------------------------------------------- trainers, whose updates are of random gradients


WIDE = dataclasses.replace(TRAINED, hidden_size=96, head_dim=16, intermediate_size=64)
"""Most of its matrices have moments of enough numbers for int8."""


def trainer_of(config: Any, model: Any, devices: int) -> MeshTrainer:
    programs = programs_of(config, model, devices, LONG)
    return MeshTrainer(programs, weights_of(model, "float32"))


def update(trainer: MeshTrainer, seed: int, scale: float = 1.0) -> dict[str, float]:
    """One update; gradients of `scale` infinity are not finite."""
    zeros, random = trainer.programs.to_run(("zeros", 0, 0))(), np.random.default_rng(seed)

    def drawn(x: jax.Array) -> jax.Array:
        return jax.device_put((scale * random.normal(size=x.shape)).astype(x.dtype), x.sharding)

    gradients = jax.tree.map(drawn, zeros.gradients)
    denominator = jax.device_put(np.asarray(7, zeros.denominator.dtype), zeros.denominator.sharding)
    trainer._sums = dataclasses.replace(zeros, gradients=gradients, denominator=denominator)
    return trainer.apply()


@pytest.mark.parametrize(("name", "dtype"), [("adamw", "int8"), ("muon", "bfloat16")])
def test_memory_is_as_planned(make_config, dtype, name):
    config = make_config(actor__dtype="float32", actor__optim={"name": name, "state_dtype": dtype})
    for model in (WIDE, dataclasses.replace(WIDE, lora=Lora(64, 64.0, ("gate", "down")))):
        state = programs_of(config, model, 8, LONG).state
        shares = [x.dtype.itemsize * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state)]
        (part,) = (size for word, size in resident_parts(config, model, 8).items() if word.startswith("optimizer"))
        assert 0 <= sum(shares) - part < 64  # counts and coefficients
        assert (np.dtype("int8") in {x.dtype for x in jax.tree.leaves(state)}) == (dtype == "int8")


def test_eight_devices_draw_what_one_draws(make_config):
    """Gradients differ in their last bits, so that a code may fall to the other side once in a while."""
    config = make_config(actor__optim={"lr": 1e-2, "state_dtype": "int8"})
    one, many = (trainer_of(config, WIDE, devices) for devices in (1, 8))
    for seed in range(2):
        for each in (one, many):
            update(each, seed)
    states = copied(one.state()["optimizer"]), copied(many.state()["optimizer"])
    for name, x in states[0].items():
        assert np.mean(x != states[1][name]) < 1e-3, name
    for a, b in zip(*map(jax.tree.leaves, (copied(one.params), copied(many.params))), strict=True):
        assert np.linalg.norm(a - b) < 1e-3 * 3e-2 * a.size**0.5


def test_a_checkpoint_of_another_type(make_config, tmp_path):
    """float32 and bfloat16 go on from each other; one in int8, or from it, is refused with the options to look at."""
    wide, short, codes = (
        trainer_of(make_config(actor__optim={"lr": 1e-2, "state_dtype": dtype}), WIDE, 1)
        for dtype in ("float32", "bfloat16", "int8")
    )
    update(wide, 0)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, wide.state())
        checkpoints.wait()
        short.load_state(checkpoints.restore(short.abstract_state())[0])
        found, expected = short.state()["optimizer"], copied(wide.state()["optimizer"])
        for name, x in expected.items():
            assert (found[name].dtype == jnp.bfloat16) == (x.ndim > 0), name
            np.testing.assert_allclose(np.asarray(found[name], np.float32), x, rtol=2**-8)
        with pytest.raises(ValueError, match=r"does not fit .* as optim\.name and optim\.state_dtype"):
            checkpoints.restore(codes.abstract_state())


MODELS = {
    "untied": dataclasses.replace(TRAINED, tie_word_embeddings=False, qkv_bias=True, family="qwen2"),
    "adapters": dataclasses.replace(TRAINED, lora=Lora(rank=3, alpha=6.0, targets=("q", "o"))),
    "wide": WIDE,
}
OPTIM = {"lr": 1e-2, "weight_decay": 0.1, "lr_warmup_steps": 2}


@pytest.mark.parametrize(
    ("model", "devices", "name", "dtype"),
    [
        ("wide", 8, "adamw", "int8"),
        pytest.param("untied", 8, "muon", "float32", marks=pytest.mark.slow),
        pytest.param("adapters", 2, "muon", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_bits_are_those_of_a_state_on_the_devices(make_config, model, devices, name, dtype):
    """Weights and state, whichever optimizer, with frozen weights and on several devices; a skipped update, too. And a
    state goes on wherever it lies: what one has saved the other loads."""
    options = {"actor__optim": OPTIM | {"name": name, "state_dtype": dtype}}
    here, away = (
        trainer_of(make_config(**options, actor__offload_optimizer=offload), MODELS[model], devices)
        for offload in (False, True)
    )
    for seed, scale in enumerate((1.0, 30.0, np.inf, 0.1)):
        if seed == 3:
            here_state = copied(here.state())
            here.load_state(copied(away.state()))
            away.load_state(here_state)
        metrics = [update(each, seed, scale) for each in (here, away)]
        assert repr(metrics[0]) == repr(metrics[1])  # NaN is itself there
        assert metrics[0]["actor/skipped_updates"] == (scale == np.inf)
        jax.tree.map(np.testing.assert_array_equal, copied(here.state()), copied(away.state()))
    state = away.state()["optimizer"]
    assert {x.sharding.memory_kind for x in state.values() if x.ndim > 1} == {HOST}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(away.params)} == {"device"}
