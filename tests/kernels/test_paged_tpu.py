"""JAX's paged kernel for TPUs behind our interface: interpreted on a CPU against the jnp oracle, and what it refuses.

Interpreted, the kernel copies blocks as on a TPU, so a wrong table, length or order of heads is seen. Not by
`pltpu.force_tpu_interpret_mode`, which would see races as well: its callbacks run JAX operations, and on two cores now
and then one waits for ever. bfloat16: as in test_paged_pallas.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jaxrl.kernels import attention, paged_tpu, reference
from jaxrl.kernels.reference import Rule

SIZE, WIDTH, DIM = 8, 3, 128
POSITIONS = [0, SIZE * WIDTH - 1, SIZE, 10**6]  # the last row does not decode, and may stand anywhere


def case(heads=6, kv_heads=2, dim=DIM, size=SIZE, queries=1, dtype="bfloat16") -> Any:
    rng = np.random.default_rng(0)
    blocks = len(POSITIONS) * WIDTH + 1
    q = rng.normal(size=(len(POSITIONS), queries, heads, dim))
    k, v = rng.normal(size=(2, kv_heads, blocks, size, dim))
    tables = rng.permutation(np.arange(1, blocks)).reshape(len(POSITIONS), WIDTH)
    positions = np.repeat(np.asarray(POSITIONS)[:, None], queries, 1)
    arrays = *(jnp.asarray(x, jnp.dtype(dtype)) for x in (q, k, v)), jnp.asarray(tables, jnp.int32)
    return *arrays, jnp.asarray(positions, jnp.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "softcap", "entries"),
    [
        (6, 2, 0.0, 2 * (WIDTH + 1)),
        pytest.param(8, 1, 5.0, 1 << 17, marks=pytest.mark.slow),
    ],
)
def test_against_the_oracle(monkeypatch, heads, kv_heads, softcap, entries):
    """Steps of two blocks, which three do not fill; tables that scalar memory holds for two rows, or for all. What no
    row may see, large as it is, changes no bit."""
    monkeypatch.setattr(paged_tpu, "_STEP_POSITIONS", 2 * SIZE)
    monkeypatch.setattr(paged_tpu, "_MAX_ENTRIES", entries)
    q, k, v, tables, positions = case(heads, kv_heads)
    rule = Rule(0, softcap)
    how = attention.choose_paged("auto", "tpu", softcap)
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    run = jax.jit(how.attend, static_argnames="rule")
    out = run(q, k, v, tables, positions, rule=rule)
    hidden = np.ones(k.shape[1:3], bool)
    for row, position in zip(np.asarray(tables), POSITIONS, strict=True):
        for place in range(min(position + 1, SIZE * WIDTH)):
            hidden[row[place // SIZE], place % SIZE] = False
    assert hidden.sum() > SIZE
    k, v = (jnp.where(hidden[None, ..., None], 1e4, x).astype(x.dtype) for x in (k, v))
    again = run(q, k, v, tables, positions, rule=rule)
    expected = reference.paged_attention(q, k, v, tables, positions, rule)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected)), rtol=0, atol=2e-2)
    assert np.array_equal(np.asarray(out), np.asarray(again))


def test_what_the_kernel_refuses():
    attend = attention.choose_paged("pallas", "tpu").attend
    for how, rule, sinks, reason in (
        ({}, Rule(16), None, r"window \(16\)"),
        ({}, Rule(), np.zeros(6, np.float32), "sinks"),
        ({"dim": 64}, Rule(), None, r"head_dim \(64\) must be a multiple of 128"),
        ({"dtype": "float32"}, Rule(), None, r"rollout.dtype \(float32\) must be bfloat16"),
        ({"size": 12}, Rule(), None, r"rollout.block_size \(12\) must be a multiple of 8"),
    ):
        words = rf"rollout.attention \(pallas\) must be auto or reference: .*{reason}"
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(lambda how=how, rule=rule, sinks=sinks: attend(*case(**how), rule=rule, sinks_H=sinks))


@pytest.mark.parametrize(("implementation", "how"), [("auto", {"dim": 64}), ("pallas", {"queries": 2})])
def test_what_else_is_jnp(implementation, how):
    """What the kernel refuses, and several queries a row. On a CPU the kernel could not run at all."""
    arrays = case(**how)
    out = attention.choose_paged(implementation, "tpu").attend(*arrays)
    assert np.array_equal(np.asarray(out), np.asarray(reference.paged_attention(*arrays)))


def test_writing_head_by_head_is_writing():
    _, k, _, tables, positions = case(queries=2)
    new = jnp.asarray(np.random.default_rng(1).normal(size=(len(POSITIONS), 2, 2, DIM)), k.dtype)
    positions = jnp.minimum(positions, SIZE * WIDTH - 2) + jnp.arange(2)
    rows = tables, positions, jnp.asarray([[True, True], [True, False], [False, False], [True, True]])
    written = attention.choose_paged("auto", "tpu").write(k, new, *rows)
    expected = reference.write_kv(k, new, *rows)
    assert np.array_equal(np.asarray(written[:, 1:]), np.asarray(expected[:, 1:]))  # block 0 belongs to no row
    assert not np.array_equal(np.asarray(written[:, 1:]), np.asarray(k[:, 1:]))
