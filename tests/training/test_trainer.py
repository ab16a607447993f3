"""The trainer: packed, chunked, accumulated, sharded gradients are those of the padded whole batch."""

import dataclasses
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw
from small_models import TRAINED
from trainer_fixtures import (
    EVERYTHING_ON,
    EXACT,
    LONG,
    ODD,
    WIDE,
    assert_whole_logprobs,
    copied,
    distance,
    of_tokens,
    padded,
    programs_of,
    weights_of,
    whole_log_p,
)

from jaxrl.config import ConfigError, OptimSection
from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.streaming import STREAMED
from jaxrl.sharding.compiled import CompileAhead
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training import losses
from jaxrl.training import optimizer as optimizers
from jaxrl.training.packing import BatchShape
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import RunFailed

SLOW = pytest.mark.slow  # the same again in another combination
OF_KERNELS = EVERYTHING_ON | {"actor__ppo_max_token_len_per_gpu": 96}
WIDE_HEADS = dataclasses.replace(TRAINED, head_dim=16)  # the kernels' smallest
SHARED_ROW = (BatchShape(1, 128),)  # of eight devices each has 16 tokens, where samples have up to 48
CORRECTED = "algorithm__rollout_correction__"
LOSSES = {
    "ppo": {"algorithm__loss_agg_mode": "token-mean"},
    "grpo": {
        **{"actor__use_kl_loss": True, "actor__kl_loss_type": "mse"},
        "algorithm__loss_agg_mode": "seq-mean-token-sum",
    },
    "cispo": {"actor__loss_mode": "cispo", "algorithm__loss_agg_mode": "seq-mean-token-mean"},
    "reinforce": {
        **{"actor__loss_mode": "reinforce", "actor__old_logprobs": "rollout"},
        f"{CORRECTED}rollout_is": "token",
    },
    "weighted": {f"{CORRECTED}rollout_is": "sequence", f"{CORRECTED}rollout_is_threshold": 1.2},
    "rejected": {
        f"{CORRECTED}rollout_rs": ["seq_mean_k1", "seq_max_k2"],
        f"{CORRECTED}rollout_rs_threshold": ["0.95_1.05", "0.4"],
        "algorithm__loss_agg_mode": "seq-mean-token-mean",
    },
}


def whole_gradient(config, model, batch):
    """At the first weights of a trainer."""
    rows = padded(batch)

    def objective(params):
        log_p = whole_log_p(params, rows, model, config.rollout.temperature or 1.0)
        entropy = jnp.pad(-jnp.sum(jnp.exp(log_p) * log_p, axis=-1)[:, :-1], ((0, 0), (1, 0)))
        terms = losses.compute(of_tokens(log_p, rows), entropy, rows, config)
        return terms.total / terms.denominator

    return jax.jit(jax.grad(objective))(weights_of(model, config.actor.param_dtype))


def check_gradient(trainer, batch, tolerance=1e-12):
    expected = whole_gradient(trainer.config, trainer.model_config, batch)
    # the second way: parts of several sizes, in another order
    for parts in ([list(range(12))], [[8], [4, 11, 2, 3, 7], [0, 5, 10, 9, 6, 1]]):
        for part in parts:
            trainer.accumulate(batch.select(part))
        assert distance(trainer.gradients(), expected) <= tolerance
        trainer.discard()


def shares_prompts(trainer, batch):
    micros = trainer.programs.pack(batch).microbatches
    assert any(m.tokens.shape[1] > trainer.programs.decoder.attention.tiling.longest_plain for m in micros)
    return any((m.prefix_ids != m.segment_ids).any() for m in micros)


@pytest.mark.parametrize(("sharing", "rows"), [(1, LONG), (8, SHARED_ROW)], ids=["rows apart", "rows shared"])
def test_gradients_and_log_probabilities_on_eight_devices(x64, sharing, rows, make_config, make_batch, make_trainer):
    """Each device has rows of its own, or all of them share each row; with prompts that samples share, and turns."""
    config = make_config(**EXACT, actor__context_parallel_size=sharing)
    trainer, batch = make_trainer(config, 8, ODD, rows), make_batch(same=True, turns=True)
    assert shares_prompts(trainer, batch)
    check_gradient(trainer, batch)
    for which in ("actor", "ref"):
        assert_whole_logprobs(trainer.token_logprobs(batch, which), trainer.params, batch, ODD)


@SLOW
@pytest.mark.parametrize(("name", "sharing"), [*zip(LOSSES, (2, 8, 4) * 2, strict=True)])
def test_every_loss_float64(x64, name, sharing, make_config, make_batch, make_trainer):
    options = {"actor__remat": {2: "none", 4: "full", 8: "dots"}[sharing], "actor__context_parallel_size": sharing}
    trainer = make_trainer(make_config(**WIDE, **LOSSES[name], **options), 8, ODD, SHARED_ROW)
    check_gradient(trainer, make_batch(same=True, turns=True))


@pytest.mark.parametrize(
    ("family", "seed"),
    # the first two of two layers, one of them with a window
    [("gemma2", 55), ("gpt_oss", 28), *(pytest.param(family, 1, marks=SLOW) for family in FAMILIES)],
)
def test_gradients_of_families_float64(x64, family, seed, make_config, make_batch, make_trainer):
    """Windows, caps, sinks and layers of several kinds, in packed rows and tiles, with shared prompts."""
    model = ModelConfig.from_hf(draw(family, seed) | {"vocab_size": 64})
    check_gradient(make_trainer(make_config(**EXACT), 2, model, LONG), make_batch(), 1e-11)


@pytest.mark.parametrize("option", ["pallas", pytest.param("reference", marks=SLOW)])
def test_attention_is_what_the_option_says(option, make_config, make_batch, make_trainer):
    """With shared prompts: gradients equal those of the tiles, by the norm of the difference over the norm."""
    batch = make_batch(size=24, same=True)
    tiles, other = (  # both pack the same rows, long ones
        make_trainer(make_config(**OF_KERNELS | attention), 2, WIDE_HEADS, LONG, interpret=True)
        for attention in ({}, {"actor__attention": option})
    )
    assert shares_prompts(tiles, batch)
    assert other.programs.decoder.attention.implementation == option
    for trainer in (tiles, other):
        trainer.accumulate(batch)
    assert 0 < distance(other.gradients(), tiles.gradients()) <= 2e-6


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
    programs = TrainPrograms(config, TRAINED, make_mesh(jax.devices()[:2]))
    trainer = MeshTrainer(programs, weights_of(TRAINED, "float32"))
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
    before = copied(trainer.state())
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
    trainer = MeshTrainer(programs, params)
    trainer.accumulate(make_batch())
    trainer.apply()
    assert np.isfinite(np.asarray(params["embed"])).all()


def test_adamw_by_hand():
    optim = OptimSection(lr=0.1, weight_decay=0.01, beta1=0.9, beta2=0.99)
    optimizer = optimizers.build(optim, grad_clip=1.0)
    w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    params = {"w": jnp.asarray(w, jnp.float32)}
    state = optimizer.chain.init(params)
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
