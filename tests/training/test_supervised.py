"""Masks, losses and gradients of `jaxrl sft` and `jaxrl dpo` against TRL 1.16's (record_trl.py), float32, to 1e-5."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from keyword_options import with_options
from preference_rows import CONVERSATIONS, LOSSES, PAIRS, moved, written_model

from jaxrl.config import Config
from jaxrl.config.updates import DpoSection
from jaxrl.data.conversations import ConversationTokens, Example, ExampleRow
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.config import ModelConfig
from jaxrl.models.weights import Weight
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import map_weights
from jaxrl.training.objectives import LikelihoodObjective
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.supervised import Demonstrations, Method, Pairs, Preferences, batch_of, preference_losses
from jaxrl.training.trainer import MeshTrainer

FOUND = np.load(Path(__file__).parent / "data" / "trl.npz")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig, Any]:
    return written_model(tmp_path_factory.mktemp("trl") / "base")


def config_of(**options: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"max_prompt_length": 256, "max_response_length": 256},
        "actor": {"ppo_max_token_len_per_gpu": 512, "logprob_chunk_tokens": 64},
    }
    return with_options(values, options)


def trainer_of(config: Config, method: Method, model: ModelConfig, params: Any, devices: int = 1) -> MeshTrainer:
    """With `params` as its reference."""
    mesh, trained = make_mesh(jax.devices()[:devices]), method.trained(config)
    programs = TrainPrograms(trained, model, mesh, objective=LikelihoodObjective)
    return MeshTrainer(programs, params)


def demonstrations(path: Path) -> list[tuple[int, ExampleRow]]:
    tokens = tokens_of(path)
    rows = []
    for number, messages in enumerate(CONVERSATIONS):
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        example = tokens.example(tuple(messages[:first]), tuple(messages[first:]), None)
        rows.append((number, ExampleRow(f"row {number}", (example,))))
    return rows


def tokens_of(path: Path) -> ConversationTokens:
    tokenizer = Tokenizer.from_path(path)
    return ConversationTokens(tokenizer, tokenizer.stop_token_ids, config_of())


def assert_gradients(trainer: MeshTrainer, model: ModelConfig, name: str) -> None:
    compared: list[str] = []

    def compare(weight: Weight, gradient: jax.Array) -> None:
        for layer, hf_name in enumerate(weight.names()):
            if f"{name}/{hf_name}" in FOUND:
                ours = weight.to_file(np.asarray(gradient[layer] if weight.stacked else gradient))
                theirs = FOUND[f"{name}/{hf_name}"]
                assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max(), hf_name
                compared.append(hf_name)

    map_weights(compare, model.weights(), trainer.gradients())
    assert len(compared) == 3


def test_tokens_and_masks_are_those_of_assistant_only_loss(written: Any):
    path, *_ = written
    for i, (_, row) in enumerate(demonstrations(path)):
        (example,) = row.examples
        ids = np.concatenate([example.prompt, example.response])
        labels = np.where(np.concatenate([np.zeros(len(example.prompt), bool), example.is_said]), ids, -100)
        np.testing.assert_array_equal(FOUND["sft/tokens"][i][: len(ids)], ids)
        np.testing.assert_array_equal(FOUND["sft/labels"][i][: len(ids)], labels)
        assert (FOUND["sft/labels"][i][len(ids) :] == -100).all()


def test_sft_has_trls_loss_and_gradient_packed_or_not(written: Any):
    path, model, params = written
    trainer = trainer_of(config_of(), method := Demonstrations(config_of()), model, params, devices=4)
    batch = batch_of(demonstrations(path))
    batch.advantages = [np.ones(len(sample), np.float32) for sample in batch.samples]
    trainer.accumulate(batch)
    for name in ("sft", "packed"):
        assert_gradients(trainer, model, name)
    trainer.discard()
    measured, tokens = method.evaluate(trainer, batch)
    assert tokens == (FOUND["sft/labels"] >= 0).sum()
    assert measured["loss"] == pytest.approx(FOUND["sft/loss"].item(), rel=1e-5)
    assert method.train_step(trainer, batch)["train/loss"] == pytest.approx(FOUND["packed/loss"].item(), rel=1e-5)


@pytest.mark.parametrize(("name", "devices"), [*zip(LOSSES, (4, 1, 4), strict=True)])
def test_dpo_has_trls_loss_metrics_and_gradient(written: Any, name: str, devices: int):
    """On TRL's own tokens: it also learns the line break that the template writes after a turn."""
    _, model, params = written
    config = config_of(**{f"dpo__{option}": value for option, value in LOSSES[name].items()})
    method = Preferences(config)
    trainer = trainer_of(config, method, model, params, devices)
    batch = batch_of(trls_pairs(name))
    other = trainer_of(config, method, model, moved(params), devices)
    state = trainer.state()
    trainer.load_state({**state, "params": other.state()["params"]})
    kept: list[float] = []
    trainer.apply, apply = lambda: kept.append(1.0) or {}, trainer.apply  # what was accumulated stays
    measured = method.train_step(trainer, batch)
    assert measured["train/loss"] == pytest.approx(FOUND[f"{name}/loss"].item(), rel=1e-5)
    assert_gradients(trainer, model, name)
    theirs = json.loads(FOUND[f"{name}/metrics"].item())
    for metric in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert measured[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric
    assert apply()["actor/skipped_updates"] == 0


def trls_pairs(name: str) -> list[tuple[int, ExampleRow]]:
    tokens, masks = FOUND[f"{name}/tokens"], FOUND[f"{name}/mask"]
    half = len(tokens) // 2

    def example(i: int) -> Example:
        said = np.flatnonzero(masks[i])
        first, last = said[0], said[-1] + 1
        return Example(tokens[i][:first], tokens[i][first:last].astype(np.int32), np.ones(last - first, bool))

    return [(i, ExampleRow("", (example(i), example(half + i)))) for i in range(half)]


def test_pairs_are_tokenised_as_by_trl_up_to_the_end_of_the_turn(written: Any):
    path, *_ = written
    tokens = tokens_of(path)
    for (_, theirs), pair in zip(trls_pairs("sigmoid"), PAIRS, strict=True):
        for their, said in zip(theirs.examples, (pair["chosen"], pair["rejected"]), strict=True):
            ours = tokens.example(tuple(pair["prompt"]), tuple(said), None)
            np.testing.assert_array_equal(ours.prompt, their.prompt)
            np.testing.assert_array_equal(ours.response, their.response[:-1])


def test_weights_are_the_derivative_of_the_loss():
    random = np.random.default_rng(0)
    pairs = Pairs(random.normal(size=(5, 2)) * 9, random.normal(size=(5, 2)) * 9, random.integers(1, 9, (5, 2)))
    for options in (
        DpoSection(beta=0.3, label_smoothing=0.2),  # the authors' conservative DPO, which TRL's cases do not have
        DpoSection(loss_type="ipo", beta=0.4),
    ):
        _, weights = preference_losses(pairs, options)
        for i, j in np.ndindex(5, 2):
            moved = np.zeros((5, 2))
            moved[i, j] = 1e-5
            up, down = (
                preference_losses(replace(pairs, logps=pairs.logps + sign * moved), options)[0].sum()
                for sign in (1, -1)
            )
            assert -weights[i, j] == pytest.approx((up - down) / 2e-5, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("rank", "which"), [(0, "actor"), (4, "ref")])
def test_the_reference_that_is_known_before_is_the_one_that_is_kept(rank: int, which: str):
    """With adapters the base, also where the run begins with adapters that have learnt something. Nothing else of what
    RL reads has a part in it."""
    given = config_of(dpo__precompute_ref_log_probs=True, model__lora_rank=rank)
    method, asked = Preferences(given), []

    class Asked:
        def token_logprobs(self, batch: Any, which: str) -> list[np.ndarray]:
            asked.append(which)
            return [np.full(len(sample), -1.0, np.float32) for sample in batch.samples]

    trainer: Any = Asked()
    example = Example(np.array([1], np.int32), np.array([2, 3], np.int32), np.array([False, True]))
    assert method.reference(trainer, batch_of([(0, ExampleRow("", (example, example)))])).tolist() == [[-1, -1]]
    assert asked == [which]
    trained = method.trained(given)
    assert (trained.needs_ref, trained.has_critic, trained.has_teacher) == (bool(rank), False, False)
