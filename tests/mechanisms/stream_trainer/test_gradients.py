"""Gradients on half of the devices: the update is that of the whole batch, whichever groups were streamed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from keyword_options import with_options
from small_models import TRAINED

from jaxrl.config import Config
from jaxrl.mechanisms.stream_trainer.gradients import TrainStream
from jaxrl.models import decoder
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.split_mesh import Half
from jaxrl.training import batch_preparation
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import Group, StreamFailed, TrainBatch

SMALL: dict[str, Any] = {
    "model__path": "unused",
    "data__max_prompt_length": 16,
    "data__max_response_length": 32,
    "actor__ppo_max_token_len_per_gpu": 96,
    "actor__logprob_chunk_tokens": 16,
    "actor__optim": {"lr": 1e-2},
    "algorithm__use_kl_in_reward": True,  # so that parts need log-probabilities of both models
    "algorithm__kl_coef": 0.3,
}
WIDE = {"actor__dtype": "float64", "actor__param_dtype": "float64"}
STEP = 1


def config_of(**options: Any) -> Config:
    return with_options({}, SMALL | WIDE | options)


@dataclass(frozen=True)
class Shared:
    """A trainer on four devices, in float64, and its stream on the last two: compiled once for all tests."""

    trainer: MeshTrainer
    stream: TrainStream
    begin: dict[str, Any]

    def reset(self) -> None:
        self.stream.abandon()
        self.trainer.load_state(self.begin)
        self.trainer.config = config_of()


@pytest.fixture(scope="module")
def compiled() -> Shared:
    with jax.enable_x64(True):
        params = jax.tree.map(np.asarray, decoder.init(TRAINED, jax.random.key(0), "float64"))
        trainer = MeshTrainer(TrainPrograms(config_of(), TRAINED, make_mesh(jax.devices()[:4])), params)
        return Shared(trainer, stream_of(trainer, 1), jax.tree.map(np.array, trainer.state()))


@pytest.fixture
def shared(compiled: Shared, x64) -> Shared:
    compiled.reset()
    return compiled


def groups_of(batch: TrainBatch) -> list[Group]:
    found: dict[Any, Group] = {}
    for prompt, sample in zip(batch.prompts, batch.samples, strict=True):
        found.setdefault(prompt.key, Group(prompt, [])).samples.append(sample)
    return list(found.values())


def prepared(trainer: MeshTrainer, groups: Sequence[Group]) -> TrainBatch:
    """What the loop makes of a batch before its gradients."""
    config, batch = trainer.config, TrainBatch.of(groups)
    current = trainer.token_logprobs(batch, "actor") if batch_preparation.needs_policy(config, batch, STEP) else None
    batch.old_logprobs = batch_preparation.old_logprobs(config, batch, STEP, current)
    batch.ref_logprobs = trainer.token_logprobs(batch, "ref") if config.needs_ref else None
    batch.loss_masks = batch_preparation.loss_masks(config, batch, STEP)
    batch_preparation.set_advantages(config, groups, batch)
    return batch


def stream_of(trainer: MeshTrainer, index: int = 0) -> TrainStream:
    stream = TrainStream(trainer, Half(trainer.mesh, index))
    for each in (stream.programs, trainer.programs):
        each.microbatches = each.microbatches[-1:]  # one shape: less to compile
    return stream


def streamed(trainer: MeshTrainer, stream: TrainStream, calls: list[list[Group]], rest: list[Group]) -> TrainBatch:
    """Accumulates `calls` on the half and `rest` on all devices; returns the whole batch."""
    stream.open()
    for call in calls:
        stream.give(call, STEP)
        while not stream.poll():
            pass
    parts = stream.close()
    if rest:
        parts.append(prepared(trainer, rest))
        trainer.accumulate(parts[-1])
    groups = sorted((group for part in (*calls, rest) for group in part), key=lambda group: group.prompt.key)
    return batch_preparation.joined(groups, parts)


def dealt(groups: list[Group], seed: int) -> tuple[list[list[Group]], list[Group]]:
    """Some of the groups in calls of one to three, in any order, and the others."""
    rng = random.Random(seed)
    mixed = rng.sample(groups, len(groups))
    count, calls = rng.randint(1, len(groups)), []
    left, rest = mixed[:count], sorted(mixed[count:], key=lambda group: group.prompt.key)
    while left:
        size = rng.randint(1, 3)
        calls.append(left[:size])
        left = left[size:]
    return calls, rest


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


def distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b)))


def check_equal(
    trainer: MeshTrainer, groups: list[Group], tolerance: float, seeds: Sequence[int], stream: TrainStream
) -> None:
    if trainer.config.needs_ref:  # make the reference another model
        trainer.accumulate(prepared(trainer, groups))
        trainer.apply()
    whole = prepared(trainer, groups)
    trainer.accumulate(whole)
    expected = trainer.gradients()
    trainer.discard()
    for seed in seeds:
        calls, rest = dealt(groups, seed)
        batch = streamed(trainer, stream, calls, rest)
        assert distance(trainer.gradients(), expected) <= tolerance
        trainer.discard()
        assert [sample.key for sample in batch.samples] == [sample.key for sample in whole.samples]
        for name in ("advantages", "old_logprobs", "ref_logprobs"):
            for found, wanted in zip(getattr(batch, name) or [], getattr(whole, name) or [], strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_update_is_that_of_the_whole_batch(shared: Shared, make_batch):
    for seed, estimator in enumerate(("grpo", "rloo")):
        shared.trainer.config = config_of(algorithm__adv_estimator=estimator)  # no program depends on it
        check_equal(shared.trainer, groups_of(make_batch(24, same=True)), 1e-12, (seed,), shared.stream)


def test_the_same_parts_in_the_same_order_are_the_same_bits(shared: Shared, make_batch):
    """And again from a checkpoint, up to the weights after the update."""
    trainer, stream = shared.trainer, shared.stream
    groups = groups_of(make_batch(24, same=True))
    calls, rest = dealt(groups, seed=3)
    outcomes = []
    for _ in range(2):
        shared.reset()
        streamed(trainer, stream, calls, rest)
        outcomes.append(flat(trainer.gradients()))
        trainer.apply()
        outcomes.append(flat(trainer.params))
    first = outcomes[0]
    np.testing.assert_array_equal(first, outcomes[2])
    np.testing.assert_array_equal(outcomes[1], outcomes[3])
    # another order adds up otherwise
    shared.reset()
    streamed(trainer, stream, calls[::-1], rest)
    assert (flat(trainer.gradients()) != first).any()


def test_what_is_abandoned_leaves_nothing(shared: Shared, make_batch):
    trainer, stream = shared.trainer, shared.stream
    groups = groups_of(make_batch(12, same=True))
    stream.open()
    stream.give(groups[:1], STEP)
    stream.finish()
    stream.give(groups[1:2], STEP)
    stream.abandon()
    assert stream.given == []
    stream.open()  # nothing is given
    assert stream.close() == []
    with pytest.raises(ValueError, match=r"apply\(\) without accumulate"):
        trainer.apply()
    streamed(trainer, stream, [groups[1:2]], [groups[0], groups[2]])
    first = flat(trainer.gradients())
    trainer.discard()
    streamed(trainer, stream, [groups[1:2]], [groups[0], groups[2]])
    np.testing.assert_array_equal(flat(trainer.gradients()), first)


def test_devices_that_fail_leave_the_trainer_as_it_was(shared: Shared, make_batch, monkeypatch: pytest.MonkeyPatch):
    trainer, stream = shared.trainer, shared.stream
    groups = groups_of(make_batch(12, same=True))

    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for 4 GiB\nthe allocator's table")

    with monkeypatch.context() as patched:
        patched.setattr(stream.programs, "on_device", full)
        stream.open()
        with pytest.raises(StreamFailed, match=r"^RESOURCE_EXHAUSTED: no room for 4 GiB$"):
            stream.give(groups[:2], STEP)
    stream.abandon()
    streamed(trainer, stream, [groups[:2]], groups[2:])
    assert trainer.apply()["actor/skipped_updates"] == 0
