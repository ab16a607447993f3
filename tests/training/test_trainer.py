"""The trainer: packed, chunked, accumulated, sharded gradients are those of the padded whole batch."""

import dataclasses
import json
import re
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw
from small_models import TRAINED
from trainer_fixtures import padded, programs_of, turn_masks, weights_of, whole_hidden

from jaxrl.config import ConfigError, OptimSection
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.streaming import STREAMED
from jaxrl.sharding.compiled import CompileAhead
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training import losses
from jaxrl.training import optimizer as optimizers
from jaxrl.training.packing import BatchShape, row_length
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import ENVIRONMENT, Prompt, RunFailed, Sample, SampleKey, TrainBatch

SLOW = pytest.mark.slow  # the same again in another combination
EVERYTHING_ON = {"actor__use_kl_loss": True, "actor__entropy_coeff": 0.1, "actor__clip_ratio_c": 3.0}
WIDE = {"actor__dtype": "float64", "actor__param_dtype": "float64"}
# Tests share these options, models and rows, because every other combination is compiled again.
EXACT = {
    **WIDE,
    **EVERYTHING_ON,
    "actor__ratio_level": "sequence",
    "actor__remat": "dots",
    "algorithm__loss_agg_mode": "seq-mean-token-mean",
    "rollout__temperature": 0.8,
}
ODD = dataclasses.replace(TRAINED, num_heads=3, num_kv_heads=1, tie_word_embeddings=False)  # which no mesh splits
OF_KERNELS = {
    **EVERYTHING_ON,
    "actor__ppo_max_token_len_per_gpu": 96,
    "actor__remat": "dots",
    "rollout__temperature": 0.8,
}
WIDE_HEADS = dataclasses.replace(TRAINED, head_dim=16)  # the kernels' smallest


def whole_logprobs(params, batch, model_config, temperature):
    hidden = whole_hidden(params, batch, model_config)
    log_p = jax.nn.log_softmax(decoder.logits(params, hidden, model_config) / temperature, axis=-1)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    chosen = jnp.take_along_axis(log_p[:, :-1], jnp.asarray(batch.tokens)[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(entropy[:, :-1], ((0, 0), (1, 0)))


_WHOLE = {}


def whole_gradient(config, model, batch):
    """At the first weights of a trainer. The same one is asked for by several tests."""
    if (key := (repr(config), model, batch.loss_masks is None)) not in _WHOLE:
        whole = padded(batch)

        def objective(params):
            logprobs, entropy = whole_logprobs(params, whole, model, config.rollout.temperature or 1.0)
            terms = losses.compute(logprobs, entropy, whole, config)
            return terms.total / terms.denominator

        _WHOLE[key] = batch, jax.jit(jax.grad(objective))(weights_of(model, config.actor.param_dtype))
    assert jax.tree.all(jax.tree.map(np.array_equal, padded(batch), padded(_WHOLE[key][0])))
    return _WHOLE[key][1]


LONG = (BatchShape(1, row_length(96)),)


def distance(a, b):
    flat = [np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(t)]) for t in (a, b)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


def check_gradient(trainer, batch, tolerance):
    expected = whole_gradient(trainer.config, trainer.model_config, batch)
    # the second way: parts of several sizes, in another order
    for parts in ([list(range(12))], [[8], [4, 11, 2, 3, 7], [0, 5, 10, 9, 6, 1]]):
        for part in parts:
            trainer.accumulate(batch.select(part))
        assert distance(trainer.gradients(), expected) <= tolerance
        trainer.discard()


@pytest.mark.parametrize("devices", [1, 8])
def test_gradients_float64(x64, devices, make_config, make_batch, make_trainer):
    check_gradient(make_trainer(make_config(**EXACT), devices, ODD, LONG), make_batch(), 1e-12)


@pytest.mark.parametrize(
    ("family", "seed"),
    # the first two of two layers, one of them with a window
    [("gemma2", 55), ("gpt_oss", 28), *(pytest.param(family, 1, marks=SLOW) for family in FAMILIES)],
)
def test_gradients_of_families_float64(x64, family, seed, make_config, make_batch, make_trainer):
    """Windows, caps, sinks and layers of several kinds, in packed rows and tiles, with shared prompts."""
    model = ModelConfig.from_hf(draw(family, seed) | {"vocab_size": 64})
    check_gradient(make_trainer(make_config(**EXACT), 2, model, LONG), make_batch(), 1e-11)


def test_gradients_of_turns_float64(x64, make_config, make_batch, make_trainer):
    """What an environment has answered is context and nothing else: whatever stands at its tokens, gradients are the
    same to the bit, and they are those of the padded batch."""
    trainer, batch = make_trainer(make_config(**EXACT), 1, ODD, LONG), make_batch(turns=True)
    assert 0.2 < np.concatenate(batch.loss_masks).mean() < 0.8
    check_gradient(trainer, batch, 1e-12)
    trainer.accumulate(batch)
    expected = trainer.gradients()
    random = np.random.default_rng(1)
    for _ in range(3):
        trainer.discard()
        other = make_batch(turns=True)
        for i, sample in enumerate(other.samples):
            sample.rollout_logprobs = sample.rollout_logprobs.copy()
            for values in (sample.rollout_logprobs, other.advantages[i], other.old_logprobs[i], other.ref_logprobs[i]):
                values[~sample.drawn] = random.choice([0, -1e30, 1e30, 3], np.sum(~sample.drawn))
        trainer.accumulate(other)
        assert jax.tree.all(jax.tree.map(np.array_equal, trainer.gradients(), expected))


@pytest.fixture(scope="module")
def of_torch():
    """What record_torch.py has written."""
    with np.load(Path(__file__).parent / "data" / "turns_gradient.npz") as file:
        return dict(file)


def part(arrays, name):
    return {key.removeprefix(f"{name}/"): value for key, value in arrays.items() if key.startswith(f"{name}/")}


def tree_of(arrays):
    layers = part(arrays, "layers")
    return {name: value for name, value in arrays.items() if "/" not in name} | {"layers": layers}


def recorded_batch(arrays, old):
    """The batch of record_torch.py, one row a sample, as a TrainBatch."""
    prompts, samples, advantages, olds = [], [], [], []
    for i, (start, stop) in enumerate(zip(arrays["prompt_length"], arrays["length"], strict=True)):
        sample, response = Sample.empty(SampleKey(0, i // 4, i % 4)), (i, slice(start, stop))
        sample.token_ids = arrays["tokens"][response].astype(np.int32)
        sample.versions = np.where(arrays["mask"][response] > 0, 0, ENVIRONMENT).astype(np.int32)
        sample.rollout_logprobs = sample.sampled_logprobs = old[response]
        prompts.append(Prompt(0, i // 4, tuple(arrays["tokens"][i, :start].tolist()), "", "test"))
        samples.append(sample)
        advantages.append(arrays["advantages"][response])
        olds.append(old[response])
    return TrainBatch(prompts, samples, advantages, olds, loss_masks=turn_masks(samples))


@pytest.mark.parametrize("head", ["tied", pytest.param("untied", marks=SLOW)])
def test_the_gradient_of_turns_is_torchs(x64, head, of_torch, make_config):
    case, sizes = part(of_torch, head), json.loads(of_torch["model"].item())
    weights, expected = (tree_of(part(case, name)) for name in ("weights", "gradient"))
    model = ModelConfig("llama", **sizes, tie_word_embeddings=head == "tied")
    config = make_config(**WIDE, **json.loads(of_torch["options"].item()), algorithm__loss_agg_mode="token-mean")
    programs = programs_of(config, model, 1, LONG)
    weights = jax.tree.map(lambda x: x.astype(np.float64), weights)
    trainer = MeshTrainer(config, model, weights, programs.mesh, programs=programs)
    batch = recorded_batch(part(of_torch, "batch"), case["old"])
    turns = [1 + np.count_nonzero(np.diff(sample.drawn.astype(int)) > 0) for sample in batch.samples]
    assert {1, 2, 3, 4, 5} <= {*turns}
    assert any(not sample.drawn[-1] for sample in batch.samples), "some end with an answer"
    micros = trainer.programs.pack(batch).microbatches
    assert all(micro.num_sequences.max() > 1 for micro in micros)
    assert any((micro.prefix_ids != micro.segment_ids).any() for micro in micros), "prompts are shared"
    trainer.accumulate(batch)
    same = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(same, trainer.gradients(), expected)
    for mask in batch.loss_masks:  # with one token more or less to learn from, it is another
        for place in {0, len(mask) // 2, len(mask) - 1}:
            mask[place] = 1 - mask[place]
            trainer.discard()
            trainer.accumulate(batch)
            assert distance(trainer.gradients(), expected) > 1e-4
            mask[place] = 1 - mask[place]
    trainer.discard()
    trainer.accumulate(batch)
    assert trainer.apply()["actor/pg_loss"] == pytest.approx(case["loss"].item(), rel=1e-6)


def test_shared_prompts_change_nothing(x64, make_config, make_batch, make_trainer):
    """In rows that are long enough for tiles; groups are split over rows."""
    batch = make_batch(same=True)
    shared = make_trainer(make_config(**EXACT), 1, ODD, LONG)
    apart = make_trainer(make_config(**EXACT, actor__share_prompts=False), 1, ODD, LONG)
    micros = shared.programs.pack(batch).microbatches
    assert any((m.prefix_ids != m.segment_ids).any() for m in micros)
    assert any(m.tokens.shape[1] > shared.programs.packed_attention.tiling.longest_plain for m in micros)
    assert sum(m.tokens.size for m in micros) < sum(m.tokens.size for m in apart.programs.pack(batch).microbatches)
    apart.accumulate(batch)
    # the second way: a sample alone, part of a group, and the rest, in another order
    for parts in ([range(len(batch))], [[8], [3, 0], sorted(set(range(len(batch))) - {0, 3, 8})]):
        for part in parts:
            shared.accumulate(batch.select(list(part)))
        assert distance(shared.gradients(), apart.gradients()) <= 1e-12
        shared.discard()
    for found, expected in zip(shared.token_logprobs(batch), apart.token_logprobs(batch), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    shared.accumulate(batch)
    # some metrics are sums of the batch's own float32 numbers
    assert shared.apply() == pytest.approx(apart.apply(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("option", ["pallas", pytest.param("reference", marks=SLOW)])
def test_attention_is_what_the_option_says(option, make_config, make_batch, make_trainer):
    """With shared prompts: gradients equal those of the tiles, by the norm of the difference over the norm."""
    batch = make_batch(size=24, same=True)
    tiles, other = (  # both pack the same rows, long ones
        make_trainer(make_config(**OF_KERNELS | attention), 2, WIDE_HEADS, LONG, interpret=True)
        for attention in ({}, {"actor__attention": option})
    )
    micro = tiles.programs.pack(batch).microbatches[0]
    assert (micro.prefix_ids != micro.segment_ids).any()
    assert micro.tokens.shape[1] > tiles.programs.packed_attention.tiling.longest_plain
    assert other.programs.packed_attention.implementation == option
    for trainer in (tiles, other):
        trainer.accumulate(batch)
    assert 0 < distance(other.gradients(), tiles.gradients()) <= 2e-6


def test_rows_stay_on_their_devices(x64, make_config, make_trainer):
    """Only weights and their gradients cross devices, and of the rows what the embedding exchanges: tokens, and the
    gradients of what was found for them."""
    trainer = make_trainer(make_config(**EXACT), 8, ODD, LONG)
    program = trainer.programs.program(("accumulate", 8, 96))
    moved = [line for line in program.as_text().splitlines() if " all-gather(" in line or " all-to-all(" in line]
    assert moved
    made = [line.split(" all-")[0] for line in moved]
    of_rows = {re.sub(r".* = (\S+?)\{.*", r"\1", each) for each in made if "96" in each or "768" in each}
    assert of_rows <= {"s32[8,96]", f"f64[8,96,{ODD.hidden_size}]"}


@SLOW
def test_weights_of_the_mismatch_stream(x64, make_config, make_batch, make_trainer):
    correction = {"algorithm__rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": 1.2}}
    config, batch = make_config(**EXACT, **correction), make_batch()
    check_gradient(make_trainer(config, 1, ODD, LONG), batch, 1e-12)
    gradients = (whole_gradient(each, ODD, batch) for each in (config, make_config(**EXACT)))
    assert distance(*gradients) > 0.01


def test_token_logprobs(x64, make_config, make_batch, make_trainer):
    trainer, batch = make_trainer(make_config(**EXACT), 8, ODD, LONG), make_batch()
    params = jax.tree.map(np.asarray, trainer.params)
    whole = jax.jit(partial(whole_logprobs, model_config=ODD, temperature=0.8))
    expected = np.asarray(whole(params, padded(batch))[0])
    for which in ("actor", "ref"):
        found = trainer.token_logprobs(batch, which)
        for i, values in enumerate(found):
            start = len(batch.prompts[i].token_ids)
            assert values.dtype == np.float32
            np.testing.assert_allclose(values, expected[i, start : start + len(values)], rtol=1e-6)


def test_reference_stays_and_is_only_kept_if_needed(make_config, make_batch, make_trainer):
    trainer, batch = make_trainer(make_config(**OF_KERNELS), 2, WIDE_HEADS, LONG), make_batch()
    before = trainer.token_logprobs(batch, "ref")
    trainer.accumulate(batch)
    trainer.apply()
    for a, b in zip(before, trainer.token_logprobs(batch, "ref"), strict=True):
        np.testing.assert_array_equal(a, b)
    moved = np.concatenate(trainer.token_logprobs(batch)) - np.concatenate(before)
    assert np.abs(moved).max() > 1e-3

    streamed = make_trainer(make_config(**OF_KERNELS, actor__offload_reference=True), 2, WIDE_HEADS, LONG)
    reference = streamed.ref_params
    assert reference is not None
    on_host = {name for name, x in reference["layers"].items() if x.sharding.memory_kind == "pinned_host"}
    assert on_host == STREAMED & reference["layers"].keys()
    assert {x.sharding.memory_kind for x in jax.tree.leaves(streamed.params)} == {"device"}
    for a, b in zip(before, streamed.token_logprobs(batch, "ref"), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="reference model is only kept"):
        make_trainer(make_config()).token_logprobs(batch, "ref")


def test_eight_devices_equal_one(x64, make_config, make_batch, make_trainer):
    trainers = [make_trainer(make_config(**EXACT), devices, ODD, LONG) for devices in (1, 8)]
    for seed in range(2):
        metrics = []
        for trainer in trainers:
            trainer.accumulate(make_batch(seed=seed))
            metrics.append(trainer.apply())
        # some metrics are sums of the batch's own float32 numbers
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-7)
    assert distance(trainers[1].params, trainers[0].params) < 1e-7
    # sharded, not replicated: vocabulary and MLP divide by eight
    assert trainers[1].params["embed"].addressable_shards[0].data.size * 8 == trainers[1].params["embed"].size


def test_every_program_of_a_run_is_known_before_its_first_batch(make_config, make_batch, make_trainer):
    """Whatever the lengths: what was compiled ahead is all that runs, counted by us and by jax."""
    options = {"actor__use_kl_loss": True, "data__train_batch_size": 3, "rollout__n": 4}
    config = make_config(**options)
    trainer = make_trainer(config, 2, programs=TrainPrograms(config, TRAINED, make_mesh(jax.devices()[:2])))
    assert len(trainer.programs.microbatches) > 1
    with closing(CompileAhead([trainer.programs])) as ahead:
        assert ahead.wait() == len(trainer.programs.shapes())
    assert trainer.programs.is_warm
    names = []

    def note(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for seed, longest in enumerate((32, 3, 17, 9)):
            for size in (1, 4, 12):
                batch = make_batch(size=size, seed=seed, longest=longest)
                trainer.token_logprobs(batch)
                trainer.token_logprobs(batch, "ref")
                trainer.accumulate(batch)
            assert trainer.apply()["actor/recompiles"] == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert names == []
    trainer.programs.microbatches = (BatchShape(1, 64),)  # none of those
    trainer.accumulate(make_batch())
    assert trainer.apply()["actor/recompiles"] == 1


def test_non_finite_gradient_is_skipped(make_config, make_batch, make_trainer):
    trainer, batch = make_trainer(make_config()), make_batch()
    before = jax.tree.map(lambda x: np.array(x, copy=True), trainer.state())
    bad = make_batch()
    bad.advantages[3][0] = np.nan
    trainer.accumulate(bad)
    metrics = trainer.apply()
    assert metrics["actor/skipped_updates"] == 1
    for part in ("params", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, before[part], jax.tree.map(np.asarray, trainer.state()[part]))
    trainer.accumulate(batch)
    after = trainer.apply()
    assert np.isfinite(after["actor/grad_norm"])
    assert after["actor/skipped_updates"] == 0
    assert (trainer.updates, trainer.skipped_updates) == (2, 1)


def test_weights_that_are_not_finite_end_the_run(make_config, make_batch, make_trainer):
    config = make_config()
    optim = config.actor.optim.replace(lr=3e38, weight_decay=10.0)  # past what the options allow
    trainer = make_trainer(config.replace(actor=config.actor.replace(optim=optim)))
    trainer.accumulate(make_batch())
    with pytest.raises(RunFailed, match=r"1 of the actor has made weights that are NaN .* learning rate 3e\+38"):
        trainer.apply()


def test_callers_params_survive(make_config, make_batch):
    params = jax.device_put(weights_of(TRAINED, "float32"))
    programs = programs_of(make_config(), TRAINED, 1)
    trainer = MeshTrainer(programs.config, TRAINED, params, programs.mesh, programs=programs)
    trainer.accumulate(make_batch())
    trainer.apply()
    assert np.isfinite(np.asarray(params["embed"])).all()


def test_frozen_parameters_stay(make_config, make_batch, make_trainer):
    trainer = make_trainer(make_config(), trainable=lambda path: path == "layers/q")
    before = jax.tree.map(lambda x: np.array(x, copy=True), trainer.params)
    trainer.accumulate(make_batch())
    trainer.apply()
    changed = jax.tree.map(lambda a, b: bool(np.any(a != np.asarray(b))), before, trainer.params)
    layers = changed.pop("layers")
    assert layers.pop("q")
    assert not any(changed.values())
    assert not any(layers.values())
    assert len(trainer.state()["optimizer"]) == 4  # two counts, two moments
    trainer.load_state(jax.tree.map(np.asarray, trainer.state()))
    trainer.accumulate(make_batch())
    trainer.apply()


def test_adamw_by_hand():
    optim = OptimSection(lr=0.1, weight_decay=0.01, beta1=0.9, beta2=0.99, eps=1e-8)
    optimizer = optimizers.build(optim, grad_clip=1.0)
    w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    params = {"w": jnp.asarray(w, jnp.float32)}
    state = optimizer.init(params)
    for t, g in enumerate([np.array([3.0, 4.0]), np.array([0.3, 0.1])], start=1):
        params, state, outcome = optimizer.update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        norm = np.linalg.norm(g)
        g = g / max(norm, 1.0)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        w = w - 0.1 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8) + 0.01 * w)
        np.testing.assert_allclose(params["w"], w, rtol=1e-5)
        np.testing.assert_allclose(outcome.grad_norm, norm, rtol=1e-6)


def test_schedules():
    """The i-th update of a warm-up of n has i / n of the rate, as with verl without its empty update."""
    linear = optimizers.schedule(OptimSection(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="linear"), 6)
    assert [float(linear(i)) for i in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    for kind in ("linear", "cosine"):  # a run that ends in its warm-up, as one of two steps to try a configuration
        short = optimizers.schedule(OptimSection(lr=1.0, lr_warmup_steps=4, lr_scheduler_type=kind), 2)
        assert [float(short(i)) for i in range(4)] == [0.25, 0.5, 0.75, 1]
    cosine = optimizers.schedule(OptimSection(lr=1.0, min_lr_ratio=0.1, lr_scheduler_type="cosine"), 10)
    np.testing.assert_allclose([cosine(0), cosine(5), cosine(10), cosine(20)], [1, 0.55, 0.1, 0.1], rtol=1e-6)
    with pytest.raises(ConfigError, match="total_training_steps"):
        optimizers.schedule(OptimSection(lr_scheduler_type="cosine"))
