"""What the tests of a process share of each other's programs: only what is the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from keyword_options import with_options
from own_process import alone, call
from shared_programs import key_of, make_room, num_maps
from small_models import TRAINED

from jaxrl.rollout.layout_programs import ExecutorConfig, LayoutPrograms
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.train.programs import TrainPrograms

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


def test_an_update_knows_how_many_there_will_be():
    decay = {"actor__optim": {"lr": 0.1, "lr_scheduler_type": "cosine"}}
    keys = {key_of(update(count, **decay), ("update", 0, 0)) for count in (5, 9)}
    assert len(keys) == 2


def test_a_part_of_a_mesh_has_weights_split_as_on_all_of_it():
    own = update(num_devices=2)
    part = update(num_devices=4).without_updates(own.mesh)
    assert part.shardings != own.shardings, "else nothing is shown"
    assert key_of(part, SHAPE) != key_of(own, SHAPE)
    assert key_of(part, SHAPE) == key_of(update(num_devices=4).without_updates(own.mesh), SHAPE)


def test_settings_of_jax_and_every_size_of_a_layout_count():
    def layout(**sizes: Any) -> LayoutPrograms:
        return LayoutPrograms(TRAINED, Layout(make_mesh(jax.devices()[:1]), 1), ExecutorConfig(num_slots=2, **sizes))

    shape = layout().shapes()[0]
    keys = [key_of(layout(), shape), key_of(layout(truncate=True), shape), key_of(layout(num_blocks=9), shape)]
    with jax.enable_x64(True):
        keys.append(key_of(layout(), shape))
    assert len(set(keys)) == 4
    assert key_of(layout(), shape) == keys[0]


def compile_and_make_room() -> None:
    begun = num_maps()
    held = [jax.jit(lambda x, i=i: jnp.sort(x) * i) for i in range(20)]
    for each in held:
        each(jnp.ones(3))
    full = num_maps()
    make_room(full)
    assert num_maps() == full > begun + 20, "a program has mappings of its own"
    make_room(full - 1)
    assert num_maps() < full - 20


@pytest.mark.skipif(not num_maps(), reason="the system does not say how many mappings a process has")
def test_programs_go_before_mappings_run_out():
    alone(__file__, "compile_and_make_room()")


if __name__ == "__main__":
    call(globals())
