"""Adapters in training: their gradients, what is kept of them, and that the rollout gets what the trainer has."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import TRAINED
from trainer_fixtures import LONG, WIDE, programs_of

from jaxrl.models import decoder
from jaxrl.models.lora import Lora, adapters_alone, is_adapter, with_adapters, without_adapters
from jaxrl.models.peft import merged_params
from jaxrl.models.quantized import quantized_layer
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import to_rollout
from jaxrl.training.packing import BatchShape, TokenBatch, row_length
from jaxrl.training.trainer import MeshTrainer
from jaxrl.training.update_memory import resident_parts, trained_numbers
from jaxrl.types import Prompt, SampleKey, SamplingParams, TrainBatch

ALL = ("q", "k", "v", "o", "gate", "up", "down")
LORA = Lora(rank=3, alpha=6.0, targets=ALL)
MODEL = dataclasses.replace(TRAINED, qkv_bias=True, family="qwen2", lora=LORA)
SOME = dataclasses.replace(MODEL, lora=Lora(rank=2, alpha=2.0, targets=("q", "down"), use_rslora=True))


def weights_of(model: Any, dtype: str) -> Any:
    """Random weights, adapters of which both parts differ from zero among them."""
    params = jax.tree.map(np.asarray, decoder.init(model, jax.random.key(0), dtype))
    random = np.random.default_rng(1)
    for name, x in params["layers"].items():
        if name.endswith("_lora_b"):
            params["layers"][name] = 0.3 * random.normal(size=x.shape).astype(dtype)
    return params


def trainer_of(config: Any, model: Any, devices: int = 1, params: Any = None) -> MeshTrainer:
    programs = programs_of(config, model, devices, LONG)
    given = weights_of(model, config.actor.param_dtype) if params is None else params
    return MeshTrainer(programs, given)


@pytest.mark.parametrize(("model", "devices"), [(MODEL, 1), pytest.param(SOME, 8, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_merged_matrix(x64, model, devices, make_config, make_batch):
    """With W + s A B in place of W, and G the gradient for it, those of A and B are s G B^T and s A^T G."""
    config, batch = make_config(**WIDE), make_batch()
    trainer = trainer_of(config, model, devices)
    whole = trainer_of(config, model.base, devices, merged_params(model, weights_of(model, "float64")))
    for each in (trainer, whole):
        each.accumulate(batch)
    found, full = trainer.gradients(), whole.gradients()
    assert {path for path in found["layers"] if found["layers"][path] is not None} == {*adapters_alone(found)["layers"]}
    assert [name for name, x in found.items() if name != "layers" and x is not None] == []
    scale, params = model.lora.scale, weights_of(model, "float64")["layers"]
    for name in model.lora.targets:
        weight = model.weights()["layers"][name]
        inputs = weight.num_inputs
        g = full["layers"][name].reshape(2, np.prod(weight.layer_shape[:inputs]), -1)
        a, b = params[f"{name}_lora_a"].reshape(2, g.shape[1], -1), params[f"{name}_lora_b"].reshape(2, -1, g.shape[2])
        wanted = scale * g @ b.swapaxes(1, 2), scale * a.swapaxes(1, 2) @ g
        for part, expected in zip("ab", wanted, strict=True):
            own = np.asarray(found["layers"][f"{name}_lora_{part}"]).reshape(expected.shape)
            np.testing.assert_allclose(own, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tp", [1, 4])
def test_the_rollout_has_the_merged_weights(x64, tp):
    layout = Layout(make_mesh(jax.devices()[:4]), tp)
    params = weights_of(MODEL, "float64")
    with_adapters = to_rollout(params, MODEL, layout, "float64")
    merged = to_rollout(merged_params(MODEL, params), MODEL.base, layout, "float64")
    assert jax.tree.structure(with_adapters) == jax.tree.structure(merged)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), with_adapters, merged)
    plain = to_rollout(without_adapters(params), MODEL.base, layout, "float64")
    assert not np.allclose(plain["layers"][0]["q"], merged["layers"][0]["q"])
    codes, wanted = (
        to_rollout(own, model, layout, "float64", quantization="int8")
        for own, model in ((params, MODEL), (merged_params(MODEL, params), MODEL.base))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=a.dtype == np.int8), codes, wanted)
    assert (np.asarray(codes["layers"][0]["q"]) != wanted["layers"][0]["q"]).mean() < 1e-3
    assert codes["layers"][0]["q"].dtype == np.int8, "what adapters make of a matrix is quantised, and not the base"


def test_training_moves_adapters_alone(make_config, make_batch):
    config, batch = make_config(actor__use_kl_loss=True), make_batch()
    trainer = trainer_of(config, MODEL)
    before = jax.tree.map(np.asarray, trainer.params)
    ref = trainer.token_logprobs(batch, "ref")
    for _ in range(3):
        trainer.accumulate(batch)
        trainer.apply()
    after = jax.tree.map(np.asarray, trainer.params)
    for name, x in after["layers"].items():
        assert (x.tobytes() == before["layers"][name].tobytes()) == (not is_adapter(name)), name
    assert after["embed"].tobytes() == before["embed"].tobytes()
    again = trainer.token_logprobs(batch, "ref")
    assert [x.tobytes() for x in ref] == [x.tobytes() for x in again], "the base is the reference"
    assert not np.allclose(ref[0], trainer.token_logprobs(batch)[0])


def test_a_checkpoint_has_adapters_alone(make_config, make_batch):
    config, batch = make_config(actor__use_kl_loss=True), make_batch()
    trainer = trainer_of(config, MODEL)
    trainer.accumulate(batch)
    trainer.apply()
    state = jax.tree.map(np.asarray, trainer.state())
    assert [*state["params"]] == ["layers"]
    assert all(map(is_adapter, state["params"]["layers"]))
    assert sum(x.size for x in jax.tree.leaves(state["params"])) == trained_numbers(MODEL, 1)
    assert sum(x.size for x in state["optimizer"].values()) == 2 * trained_numbers(MODEL, 1) + 2
    other = trainer_of(config, MODEL)
    assert jax.tree.structure(other.abstract_state()) == jax.tree.structure(state)
    other.load_state(state)
    for each in (trainer, other):
        each.accumulate(batch)
        each.apply()
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), trainer.params, other.params)
    assert jax.tree.all(same)


def test_what_is_frozen_is_in_the_type_of_the_products(make_config, make_batch):
    """In bfloat16 with norms and adapters in float32: the numbers are those of masters that each layer casts."""
    config = make_config(actor__dtype="bfloat16")
    params = decoder.init(MODEL, jax.random.key(0), jnp.float32)
    trainer = trainer_of(config, MODEL, params=params)
    types = {name: x.dtype for name, x in trainer.params["layers"].items()}
    assert {name for name, dtype in types.items() if dtype == "float32"} == {
        name for name in types if is_adapter(name) or name.endswith("norm")
    }
    assert trainer.params["embed"].dtype == "bfloat16"
    whole = trainer_of(config, MODEL.base, params=without_adapters(params))
    found, wanted = trainer.token_logprobs(make_batch()), whole.token_logprobs(make_batch())
    assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted], "new adapters add zeros"
    held = sum(x.nbytes for x in jax.tree.leaves(trainer.params))
    assert held == resident_parts(config, MODEL, 1)["master weights"]


def test_dropout_is_in_gradients_alone(make_config, make_batch):
    """The same for the same weights and rows, another after an update; log-probabilities know nothing of it."""
    config, batch = make_config(actor__use_kl_loss=True), make_batch()
    model = dataclasses.replace(MODEL, lora=dataclasses.replace(LORA, dropout=0.3))
    plain, trainer = trainer_of(config, MODEL), trainer_of(config, model)
    found, wanted = trainer.token_logprobs(batch), plain.token_logprobs(batch)
    assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]
    gradients = []
    for each in (plain, trainer, trainer):
        each.accumulate(batch)
        gradients.append(np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(each.gradients())]))
        each.discard()
    whole, first, second = gradients
    assert first.tobytes() == second.tobytes()
    assert 0.1 < np.linalg.norm(first - whole) / np.linalg.norm(whole) < 2
    programs, zeros = trainer.programs, TokenBatch.zeros(1, 16)
    before = programs._dropout_keys(programs.partition(trainer.params)[0], zeros)
    trainer.accumulate(batch)
    trainer.apply()
    after = programs._dropout_keys(programs.partition(trainer.params)[0], zeros)
    assert not np.array_equal(jax.random.key_data(before), jax.random.key_data(after))


QUANTIZED = dataclasses.replace(
    MODEL, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, lora=LORA
)


def in_few_bits(kind: Any, dtype: str) -> tuple[Any, Any, Any]:
    """A model whose base is quantised, its weights, and those of the same model with matrices that codes stand for."""
    model, params = dataclasses.replace(QUANTIZED, quantization=kind), weights_of(QUANTIZED, dtype)
    plain = QUANTIZED.base.weights()["layers"]

    def one(layer: Any) -> tuple[Any, Any]:
        own = quantized_layer(kind, plain, layer)
        return own, {name: jnp.asarray(model.whole(name, own), dtype) for name in layer}

    base, adapters = without_adapters(params), adapters_alone(params)
    own, whole = jax.jit(jax.vmap(one))(base["layers"])
    return model, *(with_adapters(base | {"layers": layers}, adapters) for layers in (own, whole))


@pytest.mark.parametrize(("kind", "syncs"), [("nf4", 3), pytest.param("int8", 50, marks=pytest.mark.slow)])
def test_after_each_sync_rollout_and_trainer_are_one_model(x64, kind, syncs, make_config):
    """What the rollout records of the tokens that it draws is what the trainer says of them before the next update."""
    config = make_config(**WIDE, data__max_prompt_length=4, data__max_response_length=8)
    model, own, _ = in_few_bits(kind, "float64")
    programs = programs_of(config, model, 1, (BatchShape(4, row_length(12)),))
    trainer = MeshTrainer(programs, own)
    sizes = ExecutorConfig(num_slots=8, max_length=12, block_size=4, max_prefill_tokens=32, dtype="float64")
    executor = MeshExecutor(model, Layout(programs.mesh, 1), sizes)
    executor.allocate()
    random, moved = np.random.default_rng(0), []
    for step in range(syncs + 1):
        executor.sync_weights(trainer.params, step)
        engine = Engine(executor, BatcherConfig(decode_steps=8, max_model_len=12))
        prompts = [Prompt(step, i, tuple(random.integers(1, 64, 4).tolist()), "", "test") for i in (0, 0, 1, 1)]
        asked = [
            Request(n, SampleKey(step, p.index, n % 2), p.token_ids, SamplingParams(max_tokens=8))
            for n, p in enumerate(prompts)
        ]
        samples = engine.generate(asked)
        batch = TrainBatch(prompts, samples, [np.full(8, x, np.float32) for x in random.normal(size=4)])
        found = trainer.token_logprobs(batch)
        for a, sample in zip(found, samples, strict=True):
            np.testing.assert_allclose(a, sample.rollout_logprobs, rtol=0, atol=1e-6)
        moved.append(np.mean(np.concatenate(found)))
        batch.old_logprobs = found
        trainer.accumulate(batch)
        trainer.apply()
    assert len(set(moved)) == syncs + 1


def test_a_reference_beside_adapters_takes_nothing(make_config):
    config = make_config(actor__dtype="float32", actor__use_kl_loss=True)
    parts = [resident_parts(config, model, 1) for model in (MODEL.base, MODEL)]
    assert ["reference weights" in each for each in parts] == [True, False]
