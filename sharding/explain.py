"""The output of `jaxrl explain-layout`, for any number of devices, present or not: which part of the rollout weights
each device holds in a layout, and the bytes that devices and hosts send each other.

Source of the bytes: rings, as NCCL has them: of an array of S bytes on n devices an all-gather or a reduce-scatter has
each device send (n - 1) / n * S, and an all-reduce twice that. Not counted: rows of the embedding, the tokens of
experts, and keys and values of rows that devices share, which are as many as there are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from jax.sharding import AbstractMesh, Mesh

from jaxrl.schema.devices import MAX_DEVICES, mesh_factors
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import axes_size, entry_axes
from jaxrl.sharding.rules import DeclaredWeight, Model, axes_of_dims, padded_config, rollout_spec

_NARROW, _WIDE = 2, 4  # weights cross in bfloat16, gradients in float32
_BLOCK = 128  # `jaxrl.rollout.sampling.BLOCK`


class HeldRange(NamedTuple):
    """A range of a dim, `stop` excluded, of which `num_padded` entries are padding."""

    start: int
    stop: int
    num_padded: int = 0

    def __str__(self) -> str:
        ends = str(self.start) if self.stop - self.start == 1 else f"{self.start}-{self.stop - 1}"
        return ends + (f" ({self.num_padded} padded)" if self.num_padded else "")


class WeightShare(NamedTuple):
    """A kind of weight: its rollout shape (of one layer), how it is split, and the shape that a device holds of it."""

    name: str
    shape: tuple[int, ...]
    split: str
    held: tuple[int, ...]
    num_copies: int  # one per layer, or one


class DeviceShare(NamedTuple):
    """One device's part of each dim that is split."""

    device: int
    dp_group: int
    tp_rank: int
    heads: HeldRange
    kv_heads: HeldRange
    mlp: HeldRange
    vocab: HeldRange


def explain_layout(config: Model, num_devices: int, tp: int, *, name: str = "model", num_hosts: int = 1) -> str:
    """The layout of a model on `num_devices` devices of `num_hosts` hosts, as text. Raises ValueError for impossible
    numbers."""
    if not 1 <= num_devices <= MAX_DEVICES.most:
        raise ValueError(f"--devices must be at least 1 and at most {MAX_DEVICES.most}, found {num_devices}")
    if tp < 1:
        raise ValueError(f"--tp must be at least 1, found {tp}")
    if num_hosts < 1 or num_devices % num_hosts:
        raise ValueError(f"--hosts ({num_hosts}) must divide the number of devices ({num_devices})")
    layout = Layout(abstract_mesh(num_devices, num_hosts), tp)
    padded = padded_config(config, tp)
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
        f"padded for tp {tp}: {', '.join(changed) or 'nothing'}",
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
    rows, total = [("weight", "shape", "split", "on a device", "numbers on a device")], 0
    for name, shape, split, held, num_copies in shares:
        numbers = math.prod(held) * num_copies
        total += numbers
        of = name if num_copies == 1 else f"{name} (of {num_copies} layers)"
        rows.append((of, str([*shape]), split, str([*held]), f"{numbers:,}"))
    return _table([*rows, ("all", "", "", "", f"{total:,}")])


def _device_table(shares: list[DeviceShare]) -> list[str]:
    head = ("device", "dp group", "tp rank", "query heads", "kv heads", "mlp columns", "vocabulary rows")
    return _table([head, *(tuple(map(str, share)) for share in shares)])


def _kv_sentence(padded: Model, layout: Layout) -> str:
    kv_heads = padded.num_kv_heads
    if layout.tp == 1:
        return f"KV: {layout.dp} pools, one per dp group; each device holds all {kv_heads} key/value heads of its pool"
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


class Traffic(NamedTuple):
    """Bytes of a microbatch that each device sends."""

    gathered: int  # of weights, among devices that have parts of them
    reduced: int  # of gradients, among the same
    copied: int  # of gradients, among those that have copies: of norms, and of what too few devices divide
    into_host: int  # that come into each host


def update_traffic(config: Model, num_devices: int, num_hosts: int = 1) -> Traffic:
    """The traffic of training, with equally many devices on each host."""
    factors, per_host = mesh_factors(num_devices, num_hosts), num_devices // num_hosts
    gathered = reduced = copied = into_host = 0.0
    for weight, times in _gathered(config.weights()):
        numbers = math.prod(weight.shape)
        shards = math.prod(math.prod(factors[own]) for own in axes_of_dims(weight, factors))
        others, copies = (shards - 1) / shards, num_devices // shards
        each = numbers * times * _NARROW, numbers * bool(times) * _WIDE, 2 * numbers // shards * _WIDE
        gathered, reduced = gathered + each[0] * others, reduced + each[1] * others
        copied += each[2] * (copies - 1) / copies
        hosts = max(1, shards // per_host)  # that hold the parts of a copy
        into_host += (each[0] + each[1]) * (hosts - 1) / hosts
        into_host += each[2] * min(shards, per_host) * (1 - hosts / num_hosts)
    return Traffic(*map(round, (gathered, reduced, copied, into_host)))


class StepTraffic(NamedTuple):
    """The least traffic into each host that has a part of a rollout worker."""

    sums: int  # over all of the worker's devices in a step, one after another
    decode_bytes: int  # for a row of a decode step
    prefill_bytes: int  # for a token of a prefill

    def __str__(self) -> str:
        return (
            f"{self.decode_bytes / 1e6:.2f} MB for each row of a decode step and {self.prefill_bytes / 1e6:.2f} MB for "
            f"each token of a prefill, in {self.sums} sums one after another"
        )


def step_traffic(config: Model, tp: int, num_hosts: int, num_bytes: int = _NARROW) -> StepTraffic:
    """The traffic of a worker that spans hosts, with activations of `num_bytes` each: it sums parts of the hidden state
    after the embedding, each attention and each mlp. Logits, in float32, stay where they are if a device has whole
    blocks of them, as drawing reads them, and are gathered if not. A few numbers of each row are not counted."""
    vocabulary, hidden = config.weights()["embed"].shape
    sums, others = 2 * config.num_layers + 1, (num_hosts - 1) / num_hosts
    prefill = 2 * sums * hidden * num_bytes * others
    gathered = -(-vocabulary // _BLOCK) * _BLOCK * _WIDE if vocabulary % (tp * _BLOCK) else 0
    return StepTraffic(sums, round(prefill + gathered * others), round(prefill))


def _gathered(table: Mapping[str, Any]) -> Iterator[tuple[DeclaredWeight, int]]:
    """Each weight, and how often a microbatch gathers it: those of layers forward and backward."""
    for weight in table["layers"].values():
        yield weight, 0 if "experts" in weight.dims else 2
    for name, weight in table.items():
        if name != "layers":
            yield weight, int(name == "lm_head" or "lm_head" not in table)
