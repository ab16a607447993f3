"""Weights of the vocabulary that are split over a mesh: rows and gradients are those of the whole table, and what
crosses between devices is narrow, or split at once."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models import decoder
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training import vocabulary
from jaxrl.training.logprobs import HeadOptions, token_logprobs
from jaxrl.training.vocabulary import Embedding, Split

V, E, R, T = 48, 6, 8, 25
NO_AXES: tuple[str, ...] = ()


def drawn() -> tuple[np.ndarray, ...]:
    """A table, tokens that occur once, often, and never, and what comes back for their rows."""
    random = np.random.default_rng(0)
    tokens = np.where(random.random((R, T)) < 0.4, 7, random.integers(0, 30, (R, T)))
    return random.normal(size=(V, E)), tokens.astype(np.int32), random.normal(size=(R, T, E))


@partial(jax.jit, static_argnums=0)
def with_gradient(find: Any, table: Any, tokens: Any, d_rows: Any) -> tuple[jax.Array, jax.Array]:
    rows, pull = jax.vjp(lambda t: find(t, tokens), table)
    return rows, pull(d_rows)[0]


@pytest.mark.parametrize(
    ("devices", "axes", "group", "ordered"),
    [
        (1, NO_AXES, 8, True),
        (8, NO_AXES, 8, False),  # a vocabulary that nothing divides
        (8, ("x0", "x1", "x2"), 8, False),
        (8, ("x0", "x1", "x2"), 2, True),  # a group is a part of the mesh
        (8, ("x0",), 8, True),  # the table is split over a part of it
        (6, ("x0", "x1"), 2, False),
    ],
)
def test_rows_and_their_gradient(
    x64: None, devices: int, axes: tuple[str, ...], group: int, ordered: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vocabulary, "GROUP", group)
    mesh = make_mesh(jax.devices()[:devices])
    table, tokens, d_rows = (x if x.shape[0] == V else x[: R - R % devices] for x in drawn())
    find = Embedding(mesh, PartitionSpec(mesh.axis_names), Split(0, axes), jnp.float64, ordered)
    rows, gradient = with_gradient(find, table, tokens, d_rows)
    np.testing.assert_array_equal(rows, table[tokens])
    _, plain = with_gradient(decoder.look_up, table, tokens, d_rows)
    np.testing.assert_allclose(gradient, plain, rtol=0, atol=1e-13)
    assert not np.asarray(gradient)[30:].any()


def test_what_crosses_between_devices():
    """The head narrow, its gradient once and split; of the embedding nothing but tokens and their rows."""
    mesh, axes = make_mesh(jax.devices()[:8]), ("x0", "x1", "x2")
    rows, split = NamedSharding(mesh, PartitionSpec(mesh.axis_names)), Split(0, axes)
    find = Embedding(mesh, rows.spec, split, jnp.bfloat16, ordered=True)
    project = lambda head, x: jnp.einsum("te,ve->tv", x, head)  # noqa: E731
    options = HeadOptions(project, 16, 1.0, split=split)

    def total(table: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
        hidden, mask = find(table, tokens), jnp.ones(tokens.shape)
        return jnp.sum(token_logprobs(options, head, hidden, tokens, mask, mesh)[0])

    table = jax.ShapeDtypeStruct((V, E), jnp.float32, sharding=NamedSharding(mesh, split.spec))
    tokens = jax.ShapeDtypeStruct((R, T), jnp.int32, sharding=rows)
    text = jax.jit(jax.grad(total, (0, 1))).lower(table, table, tokens).as_text()
    call = r"stablehlo\.(all_gather|reduce_scatter|all_reduce)\b.*?: \((tensor<[^>]*>)\)"
    found = re.findall(call, text, re.DOTALL)
    own, whole = f"tensor<{V // 8}x{E}", f"tensor<{V}x{E}"
    kinds = [(kind, shape) for kind, shape in found if shape.startswith((own, whole))]
    assert sorted(kinds) == [("all_gather", f"{own}xbf16>"), ("reduce_scatter", f"{whole}xf32>")], found
