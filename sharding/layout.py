"""`Layout`: how a mesh is divided between data and tensor parallelism, with every spec that follows from it.

`tp` takes a prefix of (x0, x1, ...), `dp` the rest in mesh order. So doubling TP only slices what each device holds,
and halving it only gathers; and dp groups 2i and 2i + 1 are those that merge when TP doubles.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.sharding.mesh import axes_size, dividing_prefix, nested_axes


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and its tensor-parallel degree. Hashable.

    Example::

        layout = Layout(make_mesh(), tp=2)      # 8 devices: dp_axes ("x2", "x1"), tp_axes ("x0",)
        layout.sharding("dp", None, "tp")       # NamedSharding(mesh, P(("x2", "x1"), None, "x0"))
    """

    mesh: Mesh
    tp: int

    def __post_init__(self) -> None:
        degrees = tp_degrees(self.mesh)
        if self.tp not in degrees:
            known = ", ".join(map(str, degrees))
            raise ValueError(f"rollout.layout: tp ({self.tp}) on {self.mesh.size} devices must be one of {known}")

    @property
    def dp(self) -> int:
        return self.mesh.size // self.tp

    @property
    def tp_axes(self) -> tuple[str, ...]:
        axes = nested_axes(self.mesh)
        return next(axes[:end] for end in range(len(axes) + 1) if axes_size(self.mesh, axes[:end]) == self.tp)

    @property
    def dp_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.tp_axes)

    def kv_axes(self, num_kv_heads: int) -> tuple[str, ...]:
        """The axes that key/value heads are split over; over the other tp axes they are replicated."""
        return dividing_prefix(self.mesh, self.tp_axes, num_kv_heads)

    def kv_heads_each(self, num_kv_heads: int) -> int:
        """The key/value heads of one device, at least one."""
        return num_kv_heads // axes_size(self.mesh, self.kv_axes(num_kv_heads))

    def spec(self, *entries: str | tuple[str, ...] | None) -> PartitionSpec:
        """A PartitionSpec in which `"dp"` and `"tp"` stand for those axes; mesh axes and None pass through."""

        def axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...] | str | None:
            match entry:
                case "dp":
                    return self.dp_axes or None
                case "tp":
                    return self.tp_axes or None
                case _:
                    return entry or None

        return PartitionSpec(*(axes(entry) for entry in entries))

    def sharding(self, *entries: str | tuple[str, ...] | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(*entries))


def tp_degrees(mesh: Mesh) -> tuple[int, ...]:
    """The tensor-parallel degrees that a factored mesh can have, ascending: products of its first axes."""
    axes = nested_axes(mesh)
    return tuple(dict.fromkeys(axes_size(mesh, axes[:end]) for end in range(len(axes) + 1)))
