"""What each device holds in a layout: every kind of weight, query and key/value heads, dp groups, devices.

Purpose: `jaxrl explain-layout`. `explain_layout` works it out from the same rules that place the arrays
(`Layout`, `rules.rollout_spec`), for any number of devices, present or not; its `str()` is the text, and
`jaxrl.sharding.layout_drawing` draws it.

Source: docs/architecture.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from annotated_types import Interval
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxrl.schema.declared import Declared, number_problem
from jaxrl.schema.devices import MAX_DEVICES, mesh_factors
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import axes_size, entry_axes
from jaxrl.sharding.rules import Model, Weight, padded_config, rollout_spec
from jaxrl.sharding.traffic import StepTraffic, Traffic, step_traffic, update_traffic


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of a dim, `stop` excluded, and the stretches of padding in it."""

    start: int
    stop: int
    padding: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        span = str(self.start) if self.stop - self.start == 1 else f"{self.start}-{self.stop - 1}"
        missing = sum(stop - start for start, stop in self.padding)
        return span + (f" ({missing} padded)" if missing else "")


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One kind of weight: its rollout shape (of one layer), the axes that split it, and its shape on a device."""

    name: str
    shape: tuple[int, ...]
    split: str
    held: tuple[int, ...]
    count: int  # how many of them: one per layer, or one

    @property
    def numbers(self) -> int:
        """Numbers of all its copies (one per layer) on one device."""
        return math.prod(self.held) * self.count


@dataclass(frozen=True, slots=True)
class DevicePart:
    """What one device holds of each dim that is split."""

    device: int
    dp_group: int
    tp_rank: int
    heads: Range
    kv_heads: Range
    mlp: Range
    vocab: Range


@dataclass(frozen=True, slots=True)
class LayoutExplanation:
    """A layout of a model, worked out.

    Attributes:
      name: of the model.
      dp, tp, max_tp: groups, degree, and the degree that weights are padded for.
      mesh: sizes by axis, major first; dp_axes, tp_axes: the mesh axes of dp and of tp, major first.
      sizes: (what, unpadded, padded).
      kv_replicas: devices of a dp group that hold the same key/value heads.
      parts: by kind of weight. devices: in the mesh's order.
      traffic: of training on these devices, and num_hosts: on which they are.
      step_traffic: of the rollout, where a dp group spans hosts; else None.
    """

    name: str
    dp: int
    tp: int
    max_tp: int
    mesh: Mapping[str, int]
    dp_axes: tuple[str, ...]
    tp_axes: tuple[str, ...]
    sizes: tuple[tuple[str, int, int], ...]
    kv_replicas: int
    parts: tuple[WeightPart, ...]
    devices: tuple[DevicePart, ...]
    traffic: Traffic
    num_hosts: int
    step_traffic: StepTraffic | None

    @property
    def device_numbers(self) -> int:
        """Numbers of weights that a device holds."""
        return sum(part.numbers for part in self.parts)

    def __str__(self) -> str:
        return _render(self)


def explain_layout(
    config: Model,
    num_devices: int,
    tp: int,
    max_tp: int | None = None,
    *,
    name: str = "model",
    num_hosts: int = 1,
) -> LayoutExplanation:
    """Works a layout out for the first `num_devices` devices, in their order.

    Args:
      max_tp: the largest degree that weights are padded for; default: `tp`.
      num_hosts: on which the devices are, for what is sent between them.

    Raises:
      ValueError: no device, or a degree that is impossible on so many devices or does not divide `max_tp`.
    """
    max_tp = tp if max_tp is None else max_tp
    problem = number_problem("--devices", num_devices, Declared(int, Interval(ge=1), cap=MAX_DEVICES))
    if problem is not None:
        raise ValueError(problem)
    if tp < 1:
        raise ValueError(f"--tp must be at least 1, found {tp}")
    if num_hosts < 1 or num_devices % num_hosts:
        raise ValueError(f"--hosts ({num_hosts}) must divide the number of devices ({num_devices})")
    layout = Layout(_mesh(num_devices, num_hosts), tp)
    if max_tp < 1 or max_tp % tp:
        raise ValueError(f"--max-tp ({max_tp}), which weights are padded for, must be a multiple of --tp ({tp})")
    padded = padded_config(config, max_tp)
    heads = layout.kv_axes(padded.num_kv_heads)
    return LayoutExplanation(
        name=name,
        dp=layout.dp,
        tp=tp,
        max_tp=max_tp,
        mesh=dict(layout.mesh.shape),
        dp_axes=layout.dp_axes,
        tp_axes=layout.tp_axes,
        sizes=tuple(
            (what, getattr(config, field), getattr(padded, field))
            for what, field in (
                ("query heads", "num_heads"),
                ("key/value heads", "num_kv_heads"),
                ("mlp columns", "intermediate_size"),
                ("vocabulary rows", "vocab_size"),
            )
        ),
        kv_replicas=tp // axes_size(layout.mesh, heads),
        parts=tuple(_parts(config, padded, layout)),
        devices=tuple(_device(config, padded, layout, number) for number in range(num_devices)),
        traffic=update_traffic(config, num_devices, num_hosts),
        num_hosts=num_hosts,
        step_traffic=step_traffic(padded, tp, spanned) if (spanned := tp * num_hosts // num_devices) > 1 else None,
    )


def _mesh(num_devices: int, num_hosts: int) -> Mesh:
    """A mesh without devices, shaped as `mesh.make_mesh` shapes one: only its sizes and names are used."""
    factors = mesh_factors(num_devices, num_hosts) or (1,)
    names = tuple(f"x{i}" for i in reversed(range(len(factors))))
    return cast(Mesh, AbstractMesh(factors[::-1], names))


def _parts(config: Model, padded: Model, layout: Layout) -> Iterator[WeightPart]:
    table = padded.weights()
    for name, weight in [*((n, w) for n, w in table.items() if n != "layers"), *table["layers"].items()]:
        stacked = weight.dims[0] == "layers"
        shape = weight.shape[1:] if stacked else weight.shape
        spec = rollout_spec(weight, layout, padded)
        held = tuple(
            size // axes_size(layout.mesh, axes) for size, axes in zip(shape, map(entry_axes, spec), strict=True)
        )
        yield WeightPart(name, shape, _split(weight, spec, layout), held, config.num_layers if stacked else 1)


def _split(weight: Weight, spec: PartitionSpec, layout: Layout) -> str:
    dims = weight.dims[1:] if weight.dims[0] == "layers" else weight.dims
    split = zip(dims, map(entry_axes, spec), strict=True)
    found = [f"{dim} over {axes_size(layout.mesh, axes)}" for dim, axes in split if axes]
    return ", ".join(found) or "whole on every device"


def _device(config: Model, padded: Model, layout: Layout, number: int) -> DevicePart:
    at, rest = {}, number
    for axis in reversed(layout.mesh.axis_names):
        rest, at[axis] = divmod(rest, layout.mesh.shape[axis])

    def index(axes: tuple[str, ...]) -> int:
        """The index of the shard, if a dim is split over `axes`."""
        found = 0
        for axis in axes:
            found = found * layout.mesh.shape[axis] + at[axis]
        return found

    def part(size: int, unpadded: int, axes: tuple[str, ...]) -> Range:
        width = size // axes_size(layout.mesh, axes)
        start, stop = index(axes) * width, (index(axes) + 1) * width
        first = max(start, unpadded)
        return Range(start, stop, ((first, stop),) if first < stop else ())

    tp, kv_axes = layout.tp_axes, layout.kv_axes(padded.num_kv_heads)
    whole = part(padded.num_heads, padded.num_heads, tp)
    group, real_group = padded.num_heads // padded.num_kv_heads, config.num_heads // config.num_kv_heads
    # Real query heads come first in the group of their key/value head, and real groups come before padded ones.
    empty = [h for h in range(whole.start, whole.stop) if h // group >= config.num_kv_heads or h % group >= real_group]
    heads = Range(whole.start, whole.stop, tuple((h, h + 1) for h in empty))
    return DevicePart(
        device=number,
        dp_group=index(layout.dp_axes),
        tp_rank=index(tp),
        heads=heads,
        kv_heads=part(padded.num_kv_heads, config.num_kv_heads, kv_axes),
        mlp=part(padded.intermediate_size, config.intermediate_size, tp),
        vocab=part(padded.vocab_size, config.vocab_size, tp),
    )


# ---------------------------------------------------------------- text


def _render(e: LayoutExplanation) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in e.mesh.items())
    changed = [f"{what} {before} to {after}" for what, before, after in e.sizes if before != after]
    devices = f"{len(e.devices)} device" + "s" * (len(e.devices) > 1)
    rows = [("device", "dp group", "tp rank", "query heads", "kv heads", "mlp columns", "vocabulary rows")]
    rows += [
        (str(d.device), str(d.dp_group), str(d.tp_rank), str(d.heads), str(d.kv_heads), str(d.mlp), str(d.vocab))
        for d in e.devices
    ]
    weights = [("weight", "shape", "split", "on a device", "numbers on a device")]
    weights += [(_times(p), _dims(p.shape), p.split, _dims(p.held), f"{p.numbers:,}") for p in e.parts]
    weights.append(("all", "", "", "", f"{e.device_numbers:,}"))
    lines = [
        f"{e.name}: {devices}, dp {e.dp} × tp {e.tp}",
        f"mesh {mesh}; dp over {' '.join(e.dp_axes) or 'nothing'}, tp over {' '.join(e.tp_axes) or 'nothing'}",
        f"padded for tp {e.max_tp}: {', '.join(changed) or 'nothing'}",
        "",
        *_table(weights),
        "",
        *_table(rows),
        "",
        _kv_sentence(e),
        *([_traffic_sentence(e.traffic, e.num_hosts)] if len(e.devices) > 1 else []),
        *([f"rollout in bfloat16: into each host come {e.step_traffic}"] if e.step_traffic else []),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _kv_sentence(e: LayoutExplanation) -> str:
    kv_heads = e.sizes[1][2]
    if e.tp == 1:
        return f"KV: {e.dp} pools, one per dp group; each device holds all {kv_heads} key/value heads of its own"
    pools = f"{e.dp} pools, one per dp group" if e.dp > 1 else "one pool"
    if e.kv_replicas == 1:
        return f"KV: {pools}; each key/value head is on one device of its group"
    return f"KV: {pools}; each key/value head is on {e.kv_replicas} devices of its group ({kv_heads} heads, tp {e.tp})"


def _traffic_sentence(traffic: Traffic, num_hosts: int) -> str:
    parts = ("weights", traffic.gathered), ("gradients", traffic.reduced), ("gradients of copies", traffic.copied)
    sent = ", ".join(f"{size / 1e9:.1f} GB of {what}" for what, size in parts if size >= 5e7 or what != parts[2][0])
    into = f"; {traffic.into_host / 1e9:.1f} GB come into each host" if num_hosts > 1 else ""
    return f"training in bfloat16: in each microbatch a device sends {sent}{into}"


def _times(part: WeightPart) -> str:
    return part.name if part.count == 1 else f"{part.name} (of {part.count} layers)"


def _dims(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns aligned left, as wide as their entries."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
