"""The critic: packed, accumulated, sharded values and gradients are those of the padded whole batch; and it learns."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import TRAINED
from trainer_fixtures import WIDE, distance, group_of, padded, weights_of, whole_hidden

from jaxrl.sharding.mesh import make_mesh
from jaxrl.training import batch_preparation
from jaxrl.training.trainer import build_critic
from jaxrl.training.training_step import Models, training_step
from jaxrl.types import Group

GAE = {"algorithm__adv_estimator": "gae"}
EXACT = {**GAE, **WIDE, "algorithm__loss_agg_mode": "seq-mean-token-mean"}
LEARNING = {
    **GAE,
    "data__train_batch_size": 8,
    "actor__optim": {"lr": 0.0},
    "critic__optim": {"lr": 1e-2, "lr_warmup_steps": 2},
    "actor__grad_clip": 0.5,
    "critic__ppo_epochs": 2,
    "critic__ppo_mini_batch_size": 4,
    "trainer__critic_warmup": 3,
}
UNTIED = replace(TRAINED, tie_word_embeddings=False)


def make_critic(config, model, devices=1):
    params = weights_of(model, config.actor.param_dtype)
    critic = build_critic(config, model, params, make_mesh(jax.devices()[:devices]))
    critic.programs.microbatches = critic.programs.microbatches[-1:]  # one shape: each is a program
    return critic


def values_of(params, batch, model):
    """[R, T] of padded samples: what the head reads before each token."""
    values = (whole_hidden(params, batch, model) @ params["score"])[..., 0]
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))


def test_values_and_gradients_float64(x64, make_config, make_batch):
    critic, batch = make_critic(make_config(**EXACT), UNTIED, 8), make_batch(size=8, same=True)
    random, state = np.random.default_rng(9), critic.state()
    score = 0.5 * random.normal(size=(UNTIED.hidden_size, 1))  # so that gradients reach every weight at once
    critic.load_state(state | {"params": state["params"] | {"score": score}})
    batch.values, batch.returns = (
        [random.normal(size=len(sample)).astype(np.float32) for sample in batch.samples] for _ in range(2)
    )
    params, whole = jax.tree.map(np.asarray, critic.params), padded(batch)
    assert "lm_head" not in params

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def expected(params):
        now, mask = values_of(params, whole, critic.model_config), whole.loss_mask
        near = jnp.minimum(jnp.maximum(now, whole.values - 0.5), whole.values + 0.5)
        errors = jnp.maximum((now - whole.returns) ** 2, (near - whole.returns) ** 2)
        return 0.5 * jnp.mean(jnp.sum(errors * mask, axis=1) / mask.sum(axis=1)), now

    gradients, values = expected(params)
    for own, row, mask in zip(critic.token_values(batch), np.asarray(values), whole.loss_mask, strict=True):
        np.testing.assert_allclose(own, row[mask > 0], rtol=1e-6)
    for parts in ([list(range(8))], [[3, 1], [6], [0, 2, 7, 5, 4]]):
        for part in parts:
            critic.accumulate(batch.select(part))
        assert distance(critic.gradients(), gradients) <= 1e-10
        critic.discard()


# ---------------------------------------------------------------- a step of the loop's training half


class FixedPolicy:
    """A trainer whose policy stays: what the critic has to learn does not move."""

    def __init__(self):
        self.updates = 0

    def token_logprobs(self, batch, which):
        return [sample.rollout_logprobs for sample in batch.samples]

    def train_step(self, batch):
        assert batch.returns is not None
        self.updates += 1
        return {"actor/lr": 0.0}


def groups_of(seed, num=8, size=4):
    """The prompt's first token decides the reward: 1 where it is 1, else 0."""
    rng, groups = np.random.default_rng(seed), []
    for index in range(num):
        group = group_of(rng.integers(1, 9, size).tolist(), [float(index % 2)] * size, index)
        for sample in group.samples:
            sample.rollout_logprobs = sample.sampled_logprobs = np.full(len(sample), -4.0, np.float32)
            sample.versions, sample.token_ids = sample.token_ids, rng.integers(0, 64, len(sample)).astype(np.int32)
        groups.append(Group(replace(group.prompt, token_ids=(index % 2, 7)), group.samples))
    return groups


def test_it_learns_what_a_prompt_is_worth(make_config, model_config):
    config = make_config(**LEARNING)
    policy, critic, phases = FixedPolicy(), make_critic(config, model_config), []

    def phase(name):
        phases.append(name)
        return batch_preparation.nullcontext()

    lines = []
    for step in range(1, 13):
        learnt = training_step(config, Models(policy, critic), [], groups_of(step), step, phase, lambda: None)
        assert len(learnt.updates["critic"]) == 4
        assert learnt.skipped() == {"critic": (4, 0)}
        lines.append(learnt.metrics())
        assert ("actor" in learnt.updates) == (step > 3), "the critic learns alone at first"
    assert policy.updates == 9
    assert phases[:5] == ["old_log_prob", "ref", "values", "adv", "update_critic"]
    explained = [line["critic/vf_explained_var"] for line in lines]
    assert abs(explained[0]) < 1e-3, "a new critic explains nothing"
    assert explained[-1] > 0.8
    assert lines[-1]["critic/vf_loss"] < 0.1 * lines[0]["critic/vf_loss"]
    assert [line["critic/lr"] for line in lines[:2]] == pytest.approx([0.875e-2, 1e-2]), "means of four updates"
    assert {"critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm"} <= set(lines[0])
    assert not any(name.startswith("rollout_corr/") for name in lines[0])
    assert lines[0]["critic/values/max"] == 0
    assert (lines[0]["critic/returns/min"], lines[0]["critic/returns/max"]) == (0, 1)
