"""The factored mesh and the specs that follow from a layout."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl.schema.devices import prime_factors
from jaxrl.sharding.layout import Layout, tp_degrees
from jaxrl.sharding.mesh import make_mesh, nested_axes, platform_of, submeshes


@pytest.mark.parametrize(
    ("platform", "version", "named"),
    [("gpu", "PJRT C API\ncuda 13000", "gpu"), ("gpu", "PJRT C API\nrocm 60300", "rocm"), ("cpu", "rocm", "cpu")],
)
def test_gpus_of_two_makers_are_two_platforms(platform: str, version: str, named: str):
    device = SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))
    assert platform_of(device) == named
    assert platform_of(jax.devices()[0]) == "cpu"


@pytest.mark.parametrize(
    ("count", "shape", "degrees"),
    [(1, (1,), (1,)), (6, (3, 2), (1, 2, 6))],
)
def test_other_counts_factor_into_primes(count, shape, degrees):
    mesh = make_mesh(jax.devices()[:count])
    assert mesh.devices.shape == shape
    assert tp_degrees(mesh) == degrees


@pytest.mark.parametrize(
    ("tp", "tp_axes", "dp_axes"),
    [(1, (), ("x2", "x1", "x0")), (2, ("x0",), ("x2", "x1")), (4, ("x0", "x1"), ("x2",)), (8, ("x0", "x1", "x2"), ())],
)
def test_axes(tp, tp_axes, dp_axes):
    layout = Layout(make_mesh(), tp)
    assert (layout.tp_axes, layout.dp_axes, layout.dp) == (tp_axes, dp_axes, 8 // tp)


def test_kv_heads_take_the_longest_prefix_that_divides():
    layout = Layout(make_mesh(), 8)
    prefixes = [(), ("x0",), (), ("x0", "x1"), ("x0",), ("x0", "x1", "x2"), ("x0", "x1", "x2")]
    assert [layout.kv_axes(k) for k in (1, 2, 3, 4, 6, 8, 16)] == prefixes


def groups_of(layout: Layout) -> list[list[int]]:
    """The devices of each dp group, by what the shardings themselves say: [dp group][tp rank]."""
    sharding = layout.sharding("dp", "tp")
    at = sharding.devices_indices_map((layout.dp, layout.tp))
    found = [[-1] * layout.tp for _ in range(layout.dp)]
    for device, (rows, columns) in at.items():
        found[rows.indices(layout.dp)[0]][columns.indices(layout.tp)[0]] = device.id
    return found


@pytest.mark.parametrize("count", [1, 6, 8])
def test_the_layouts_of_submeshes_are_the_dp_groups_of_the_whole(count):
    mesh = make_mesh(jax.devices()[:count])
    factors = prime_factors(count)
    for num in range(1, count + 1):
        possible = [int(np.prod(factors[::-1][:cut])) for cut in range(len(factors) + 1)]
        if num not in possible:
            into = (
                f"must cut a mesh of {count} devices along its major axes, into one of {', '.join(map(str, possible))} "
            )
            with pytest.raises(ValueError, match=rf"rollout.num_workers \({num}\) {into}"):
                submeshes(mesh, num)
            continue
        parts = submeshes(mesh, num)
        assert [d for part in parts for d in part.devices.flat] == list(mesh.devices.flat)
        for part in parts:
            assert part == make_mesh(part.devices.ravel().tolist())
            assert nested_axes(part) == (nested_axes(mesh)[: len(part.axis_names)])
            assert set(tp_degrees(part)) == {tp for tp in tp_degrees(mesh) if part.size % tp == 0}
        for tp in tp_degrees(parts[0]):
            together = [group for part in parts for group in groups_of(Layout(part, tp))]
            assert together == groups_of(Layout(mesh, tp))
