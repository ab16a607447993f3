"""Which part of the rollout weights each device holds in a layout, as text (`jaxrl explain-layout`): for any number of
devices, present or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from annotated_types import Interval
from jax.sharding import AbstractMesh, Mesh

from jaxrl.schema.declared import Declared, number_problem
from jaxrl.schema.devices import MAX_DEVICES, mesh_factors
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import axes_size, entry_axes
from jaxrl.sharding.rules import Model, padded_config, rollout_spec
from jaxrl.sharding.traffic import step_traffic, update_traffic


@dataclass(frozen=True, slots=True)
class HeldRange:
    """A range of a dim, `stop` excluded, of which `num_padded` entries are padding."""

    start: int
    stop: int
    num_padded: int = 0

    def __str__(self) -> str:
        ends = str(self.start) if self.stop - self.start == 1 else f"{self.start}-{self.stop - 1}"
        return ends + (f" ({self.num_padded} padded)" if self.num_padded else "")


@dataclass(frozen=True, slots=True)
class WeightShare:
    """A kind of weight: its rollout shape (of one layer), how it is split, and the shape that a device holds of it."""

    name: str
    shape: tuple[int, ...]
    split: str
    held: tuple[int, ...]
    count: int  # copies of it: one per layer, or one

    @property
    def held_numbers(self) -> int:
        return math.prod(self.held) * self.count


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What one device holds of each dim that is split."""

    device: int
    dp_group: int
    tp_rank: int
    heads: HeldRange
    kv_heads: HeldRange
    mlp: HeldRange
    vocab: HeldRange


def explain_layout(
    config: Model,
    num_devices: int,
    tp: int,
    max_tp: int | None = None,
    *,
    name: str = "model",
    num_hosts: int = 1,
) -> str:
    """The layout of a model on `num_devices` devices of `num_hosts` hosts, as text. `max_tp`: the largest degree that
    weights are padded for, by default `tp`. Raises ValueError for impossible numbers."""
    max_tp = tp if max_tp is None else max_tp
    problem = number_problem("--devices", num_devices, Declared(int, Interval(ge=1), cap=MAX_DEVICES))
    if problem is not None:
        raise ValueError(problem)
    if tp < 1:
        raise ValueError(f"--tp must be at least 1, found {tp}")
    if num_hosts < 1 or num_devices % num_hosts:
        raise ValueError(f"--hosts ({num_hosts}) must divide the number of devices ({num_devices})")
    layout = Layout(abstract_mesh(num_devices, num_hosts), tp)
    if max_tp < 1 or max_tp % tp:
        raise ValueError(f"--max-tp ({max_tp}), which weights are padded for, must be a multiple of --tp ({tp})")
    padded = padded_config(config, max_tp)
    named_sizes = (
        ("query heads", config.num_heads, padded.num_heads),
        ("key/value heads", config.num_kv_heads, padded.num_kv_heads),
        ("mlp columns", config.intermediate_size, padded.intermediate_size),
        ("vocabulary rows", config.vocab_size, padded.vocab_size),
    )
    changed = [f"{what} {before} to {after}" for what, before, after in named_sizes if before != after]
    mesh = " ".join(f"{axis}={size}" for axis, size in layout.mesh.shape.items())
    dp_axes, tp_axes = (" ".join(axes) or "nothing" for axes in (layout.dp_axes, layout.tp_axes))
    lines = [
        f"{name}: {num_devices} device{'s' * (num_devices > 1)}, dp {layout.dp} × tp {tp}",
        f"mesh {mesh}; dp over {dp_axes}, tp over {tp_axes}",
        f"padded for tp {max_tp}: {', '.join(changed) or 'nothing'}",
        "",
        *_weight_table([*weight_shares(config, padded, layout)]),
        "",
        *_device_table([device_share(config, padded, layout, number) for number in range(num_devices)]),
        "",
        _kv_sentence(padded, layout),
    ]
    if num_devices > 1:
        lines.append(_traffic_sentence(config, num_devices, num_hosts))
    if (spanned := tp * num_hosts // num_devices) > 1:
        lines.append(f"rollout in bfloat16: into each host come {step_traffic(padded, tp, spanned)}")
    return "\n".join(line.rstrip() for line in lines)


def abstract_mesh(num_devices: int, num_hosts: int = 1) -> Mesh:
    """A mesh without devices, shaped as `mesh.make_mesh` shapes one: only its sizes and names are used."""
    factors = mesh_factors(num_devices, num_hosts) or (1,)
    names = tuple(f"x{i}" for i in reversed(range(len(factors))))
    return cast(Mesh, AbstractMesh(factors[::-1], names))


def weight_shares(config: Model, padded: Model, layout: Layout) -> Iterator[WeightShare]:
    table = padded.weights()
    for name, weight in [*((n, w) for n, w in table.items() if n != "layers"), *table["layers"].items()]:
        first = int(weight.dims[0] == "layers")
        dims, shape = weight.dims[first:], weight.shape[first:]
        shards = [axes_size(layout.mesh, entry_axes(entry)) for entry in rollout_spec(weight, layout, padded)]
        split = [f"{dim} over {count}" for dim, count in zip(dims, shards, strict=True) if count > 1]
        held = tuple(size // count for size, count in zip(shape, shards, strict=True))
        yield WeightShare(
            name, shape, ", ".join(split) or "whole on every device", held, config.num_layers if first else 1
        )


def device_share(config: Model, padded: Model, layout: Layout, number: int) -> DeviceShare:
    """The share of the device at a place of the mesh's order."""
    sizes = dict(layout.mesh.shape)
    at, rest = {}, number
    for axis in reversed(sizes):
        rest, at[axis] = divmod(rest, sizes[axis])

    def index(axes: tuple[str, ...]) -> int:
        """The index of the shard, if a dim is split over `axes`."""
        found = 0
        for axis in axes:
            found = found * sizes[axis] + at[axis]
        return found

    def held(size: int, unpadded: int, axes: tuple[str, ...]) -> HeldRange:
        width = size // axes_size(layout.mesh, axes)
        start, stop = index(axes) * width, (index(axes) + 1) * width
        return HeldRange(start, stop, stop - min(max(start, unpadded), stop))

    heads = held(padded.num_heads, padded.num_heads, layout.tp_axes)
    group, real_group = padded.num_heads // padded.num_kv_heads, config.num_heads // config.num_kv_heads
    # Real query heads come first in the group of their key/value head, and real groups come before padded ones.
    num_padded = sum(
        head // group >= config.num_kv_heads or head % group >= real_group for head in range(heads.start, heads.stop)
    )
    return DeviceShare(
        device=number,
        dp_group=index(layout.dp_axes),
        tp_rank=index(layout.tp_axes),
        heads=HeldRange(heads.start, heads.stop, num_padded),
        kv_heads=held(padded.num_kv_heads, config.num_kv_heads, layout.kv_axes(padded.num_kv_heads)),
        mlp=held(padded.intermediate_size, config.intermediate_size, layout.tp_axes),
        vocab=held(padded.vocab_size, config.vocab_size, layout.tp_axes),
    )


def _weight_table(shares: list[WeightShare]) -> list[str]:
    rows = [("weight", "shape", "split", "on a device", "numbers on a device")]
    for share in shares:
        name = share.name if share.count == 1 else f"{share.name} (of {share.count} layers)"
        rows.append((name, str([*share.shape]), share.split, str([*share.held]), f"{share.held_numbers:,}"))
    rows.append(("all", "", "", "", f"{sum(share.held_numbers for share in shares):,}"))
    return _table(rows)


def _device_table(shares: list[DeviceShare]) -> list[str]:
    rows = [("device", "dp group", "tp rank", "query heads", "kv heads", "mlp columns", "vocabulary rows")]
    rows += [
        (str(d.device), str(d.dp_group), str(d.tp_rank), str(d.heads), str(d.kv_heads), str(d.mlp), str(d.vocab))
        for d in shares
    ]
    return _table(rows)


def _kv_sentence(padded: Model, layout: Layout) -> str:
    kv_heads = padded.num_kv_heads
    if layout.tp == 1:
        return f"KV: {layout.dp} pools, one per dp group; each device holds all {kv_heads} key/value heads of its own"
    pools = f"{layout.dp} pools, one per dp group" if layout.dp > 1 else "one pool"
    replicas = layout.tp // axes_size(layout.mesh, layout.kv_axes(kv_heads))
    if replicas == 1:
        return f"KV: {pools}; each key/value head is on one device of its group"
    return f"KV: {pools}; each key/value head is on {replicas} devices of its group ({kv_heads} heads, tp {layout.tp})"


def _traffic_sentence(config: Model, num_devices: int, num_hosts: int) -> str:
    traffic = update_traffic(config, num_devices, num_hosts)
    sent = [f"{traffic.gathered / 1e9:.1f} GB of weights", f"{traffic.reduced / 1e9:.1f} GB of gradients"]
    if traffic.copied >= 5e7:
        sent.append(f"{traffic.copied / 1e9:.1f} GB of gradients of copies")
    into = f"; {traffic.into_host / 1e9:.1f} GB come into each host" if num_hosts > 1 else ""
    return f"training in bfloat16: in each microbatch a device sends {', '.join(sent)}{into}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
