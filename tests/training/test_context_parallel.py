"""Rows of tokens that several devices share: whatever is computed is what one device computes, in float64."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from drawn_models import draw
from small_models import TRAINED
from trainer_fixtures import weights_of

from jaxrl.config import from_mapping
from jaxrl.kernels.attention import Heads, choose_packed
from jaxrl.models.config import ModelConfig
from jaxrl.models.shapes import named_shape
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.checkpoint import Checkpointer, HostState
from jaxrl.training.packing import BatchShape, dealt, microbatch_shapes
from jaxrl.training.teacher import MeshTeacher, TeacherPrograms
from jaxrl.training.trainer import MeshTrainer, build_critic

SLOW = pytest.mark.slow  # the same again in another combination
WIDE: dict[str, Any] = {"actor__dtype": "float64", "actor__param_dtype": "float64", "actor__remat": "dots"}
# sums over tokens, over sequences, and over the tokens of a sequence
EXACT: dict[str, Any] = {
    **WIDE,
    "actor__use_kl_loss": True,
    "actor__entropy_coeff": 0.1,
    "actor__clip_ratio_c": 3.0,
    "actor__ratio_level": "sequence",
    "algorithm__loss_agg_mode": "seq-mean-token-mean",
    "rollout__temperature": 0.8,
}
CORRECTED = "algorithm__rollout_correction__"
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm__loss_agg_mode": "token-mean"},
    "grpo": {
        "actor__use_kl_loss": True,
        "actor__kl_loss_type": "mse",
        "algorithm__loss_agg_mode": "seq-mean-token-sum",
    },
    "cispo": {"actor__loss_mode": "cispo", "algorithm__loss_agg_mode": "seq-mean-token-mean"},
    "reinforce": {
        "actor__loss_mode": "reinforce",
        "actor__old_logprobs": "rollout",
        f"{CORRECTED}rollout_is": "token",
    },
    "weighted": {f"{CORRECTED}rollout_is": "sequence"},
    "rejected": {
        f"{CORRECTED}rollout_rs": ["seq_mean_k1", "seq_max_k2"],
        f"{CORRECTED}rollout_rs_threshold": ["0.95_1.05", "0.4"],
        "algorithm__loss_agg_mode": "seq-mean-token-mean",
    },
}
ODD = dataclasses.replace(TRAINED, num_heads=3, num_kv_heads=1, tie_word_embeddings=False)  # which no mesh splits
ROW = (
    BatchShape(1, 128),
)  # one shape: each is a program. Of eight devices each has 16 tokens, where samples have up to 48
EIGHT = 8


def of_family(name):
    family, seed = name.split(":")
    return ModelConfig.from_hf(draw(family, int(seed)) | {"vocab_size": TRAINED.vocab_size})


def assert_same(found, expected, tolerance=1e-12):
    """Each array to within that share of its largest number."""
    for each, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(each, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-6))


@pytest.fixture
def both(x64, make_config, make_trainer):
    """(one device, eight of which so many share a row)."""

    def make(options, sharing, model=ODD, **own):
        alone = make_trainer(make_config(**options), 1, model, ROW, **own)
        options = options | {"actor__context_parallel_size": sharing}
        return alone, make_trainer(make_config(**options), EIGHT, model, ROW, **own)

    return make


def assert_updates(alone, shared, batch, tolerance=1e-12):
    """Gradients of all samples at once, and of parts in another order; and what an update says."""
    parts = [[8], [4, 11, 2, 3, 7], [0, 5, 10, 9, 6, 1]]
    alone.accumulate(batch)
    expected = jax.tree.map(np.asarray, alone.gradients())
    assert all(np.abs(each).max() > 0 for each in jax.tree.leaves(expected))
    for part in parts:
        shared.accumulate(batch.select(part))
    assert_same(shared.gradients(), expected, tolerance)
    shared.discard()
    shared.accumulate(batch)
    assert_same(shared.gradients(), expected, tolerance)
    # some are sums of the batch's own float32 numbers
    assert shared.apply() == pytest.approx(alone.apply(), rel=1e-5, abs=1e-7)


def test_gradients_and_log_probabilities(both, make_batch):
    alone, shared = both(EXACT, EIGHT)
    batch = make_batch(same=True)
    micro = shared.programs.pack(batch).microbatches[0]
    pieces = micro.segment_ids.reshape(len(micro.tokens), 2 * EIGHT, -1)
    crossing = [np.intersect1d(*pair) for row in pieces for pair in itertools.pairwise(row)]
    assert any(each.any() for each in crossing), "samples go on beyond pieces"
    assert (micro.prefix_ids != micro.segment_ids).any(), "prompts are shared"
    for which in ("actor", "ref"):
        assert_same(shared.token_logprobs(batch, which), alone.token_logprobs(batch, which), 1e-6)  # they are float32
    assert_updates(alone, shared, batch)


@SLOW
@pytest.mark.parametrize(("name", "sharing"), [*zip(LOSSES, (2, 8, 4) * 2, strict=True)])
def test_every_loss(name, sharing, both, make_batch):
    remat = {"actor__remat": {2: "none", 4: "full", 8: "dots"}[sharing]}
    assert_updates(*both(WIDE | LOSSES[name] | remat, sharing), make_batch(same=True, turns=True))


# caps and windows; windows, sinks and experts; a norm of all heads together
@SLOW
@pytest.mark.parametrize(("name", "sharing"), [("gemma2:1", 4), ("gpt_oss:2", 8), ("olmo2:0", 2)])
def test_families(name, sharing, both, make_batch):
    assert_updates(*both(EXACT, sharing, of_family(name)), make_batch())


@SLOW
def test_a_critic(x64, make_config, make_batch):
    batch, found, random = make_batch(turns=True), [], np.random.default_rng(3)
    batch.values, batch.returns = (
        [random.normal(size=len(sample)).astype(np.float32) for sample in batch.samples] for _ in range(2)
    )
    score = random.normal(size=(ODD.hidden_size, 1))
    for devices, own in ((1, 1), (EIGHT, 8)):
        options = {"algorithm__adv_estimator": "gae", "critic__loss_agg_mode": "seq-mean-token-mean"}
        config = make_config(**WIDE, **options, actor__context_parallel_size=own)
        critic = build_critic(config, ODD, weights_of(ODD, "float64"), make_mesh(jax.devices()[:devices]))
        critic.programs.microbatches = ROW
        state = critic.state()
        critic.load_state(state | {"params": state["params"] | {"score": score}})
        values = critic.token_values(batch)
        critic.accumulate(batch)
        found.append((jax.tree.map(np.asarray, critic.gradients()), values, critic.apply()))
    (expected, their_values, their_metrics), (gradients, values, metrics) = found
    assert_same(gradients, expected)
    assert_same(values, their_values, 1e-6)
    assert metrics == pytest.approx(their_metrics, rel=1e-5, abs=1e-7)


@SLOW
def test_a_teachers_likeliest_tokens(x64, make_config, make_batch):
    found, first = [], None
    for devices, sharing in ((1, 1), (EIGHT, 4)):
        teacher = {"path": "unused", "dtype": "float64", "top_k": 5, "beta": 0.3, "coef": 0.7}
        config = make_config(**EXACT, algorithm__teacher=teacher, actor__context_parallel_size=sharing)
        mesh, batch = make_mesh(jax.devices()[:devices]), make_batch(same=True)
        programs = TeacherPrograms(config, TRAINED, mesh, vocab_size=TRAINED.vocab_size)
        programs.microbatches = ROW
        params = jax.tree.map(jax.device_put, weights_of(TRAINED, "float64"), programs.shardings)
        MeshTeacher(programs, params).annotate(batch)
        first = first or batch  # what was said, in float32, is learnt from by both
        trainer = MeshTrainer(config, ODD, weights_of(ODD, "float64"), mesh)
        trainer.programs.microbatches = ROW
        trainer.accumulate(first)
        found.append((jax.tree.map(np.asarray, trainer.gradients()), batch.teacher_top_logprobs, batch.teacher_ids))
    (expected, their_logprobs, their_ids), (gradients, logprobs, ids) = found
    jax.tree.map(np.testing.assert_array_equal, ids, their_ids)
    assert_same(logprobs, their_logprobs, 1e-6)
    assert_same(gradients, expected)


def test_a_run_goes_on_with_another_number(tmp_path, both, make_batch):
    """What was saved says nothing of it; and the next update is the same."""
    states: list[Any] = []
    trainers = after, before = both(EXACT, EIGHT)
    batch = make_batch(same=True)
    before.accumulate(batch)
    before.apply()
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, before.state(), HostState({}, {}))
        checkpoints.wait()
        state, _ = checkpoints.restore(after.abstract_state())
    after.load_state(state)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), after.state(), before.state()
    )
    for trainer in trainers:
        trainer.accumulate(batch.select(range(5)))
        trainer.apply()
        states.append(jax.tree.map(np.asarray, trainer.state()))
    # AdamW divides by the root of a mean of squares, which is as small as a gradient may be
    assert_same(states[0]["params"], states[1]["params"], 1e-9)


# ---------------------------------------------------------------- which tokens lie where


@pytest.mark.parametrize(
    ("sharing", "response", "budget"), [(1, 31744, 65536), (2, 1024, 4096), (4, 3000, 4096), (8, 31744, 32768)]
)
def test_shapes(sharing, response, budget):
    """A row holds the longest sample; a device has no more tokens than it may, in two equal pieces of a row, and sees
    as many keys in a row of one sample as the others."""
    assert len({*(1 + dealt(1024, sharing).reshape(sharing, -1)).sum(1)}) == 1
    actor = {"ppo_max_token_len_per_gpu": budget // sharing, "context_parallel_size": sharing}
    data = {"max_prompt_length": 1024, "max_response_length": response, "train_batch_size": 64}
    config, model = from_mapping({"model": {"path": "x"}, "data": data, "actor": actor}), named_shape("Qwen2.5-1.5B")
    heads = Heads(model.num_heads, model.num_kv_heads, model.head_dim, "bfloat16")
    shapes = microbatch_shapes(config, model, EIGHT, choose_packed("auto", "gpu", heads))
    assert shapes[-1].length >= 1024 + response
    assert max(shape.tokens for shape in shapes) // sharing <= budget // sharing + 16
    assert all(shape.length % (16 * sharing) == 0 for shape in shapes)
    assert shapes[-1].tokens / sharing >= 0.8 * budget / sharing, "rows are filled"
