"""What the tests of a process share of each other's programs: only what is the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
from keyword_options import with_options
from own_process import call
from shared_programs import key_of
from small_models import TRAINED

from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.programs import TrainPrograms

SHAPE = ("accumulate", 1, 16)


def update(total_updates: int = 0, num_devices: int = 1, **options: Any) -> TrainPrograms:
    values = {"model": {"path": "unused"}, "actor": {"logprob_chunk_tokens": 16}}
    config, mesh = with_options(values, options), make_mesh(jax.devices()[:num_devices])
    return TrainPrograms(config, TRAINED, mesh, total_updates=total_updates)


@functools.cache
def plain_text() -> str:
    return text(update())


def text(programs: TrainPrograms, shape: tuple[str, int, int] = SHAPE) -> str:
    return programs.lower(*shape).as_text()


def test_what_is_not_of_the_update_changes_no_program_of_it():
    other = update(
        total_updates=9,
        model__path="another",
        data__max_response_length=77,
        rollout__n=5,
        rollout__max_num_seqs=3,
        trainer__total_training_steps=7,
        trainer__seed=3,
        reward__num_workers=2,
    )
    assert key_of(other, SHAPE) == key_of(update(), SHAPE)
    assert text(other) == plain_text()


@pytest.mark.parametrize(
    "options",
    [
        {"rollout__temperature": 0.5},
        {"actor__clip_ratio_high": 0.4},
        {"actor__entropy_coeff": 0.1},
        {"algorithm__loss_agg_mode": "seq-mean-token-mean"},
        {"algorithm__rollout_correction": {"rollout_is": "token"}},
    ],
    ids=str,
)
def test_what_is_of_it_does(options: dict[str, Any]):
    assert key_of(update(**options), SHAPE) != key_of(update(), SHAPE)
    assert text(update(**options)) != plain_text(), "else nothing is shown"


if __name__ == "__main__":
    call(globals())
