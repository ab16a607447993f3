"""The bytes that devices send each other in a microbatch of training, and those that hosts receive in a rollout step
whose tensor parallelism spans them: for `jaxrl explain-layout --hosts N` and `explain-config`.

Source: rings, as NCCL has them: of an array of S bytes on n devices an all-gather or a reduce-scatter has each device
send (n - 1) / n * S, and an all-reduce twice that. Not counted: rows of the embedding, the tokens of experts, and keys
and values of rows that devices share, which are as many as there are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.schema.devices import mesh_factors
from jaxrl.sharding.rules import DeclaredWeight, Model, axes_of_dims

_NARROW, _WIDE = 2, 4  # weights cross in bfloat16, gradients in float32
_BLOCK = 128  # `jaxrl.rollout.sampling.BLOCK`


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a microbatch that each device sends."""

    gathered: int  # of weights, among devices that have parts of them
    reduced: int  # of gradients, among the same
    copied: int  # of gradients, among those that have copies: of norms, and of what too few devices divide
    into_host: int  # that come into each host


def update_traffic(config: Model, num_devices: int, num_hosts: int = 1) -> Traffic:
    """The traffic of training, with equally many devices on each host."""
    factors, per_host = mesh_factors(num_devices, num_hosts), num_devices // num_hosts
    gathered = reduced = copied = into_host = 0.0
    for weight, times in _weights(config.weights()):
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


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """What comes into each host that has a part of a rollout worker, at the least."""

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


def _weights(table: Mapping[str, Any]) -> Iterator[tuple[DeclaredWeight, int]]:
    """Each weight, and how often a microbatch gathers it: those of layers forward and backward."""
    for weight in table["layers"].values():
        yield weight, 0 if "experts" in weight.dims else 2
    for name, weight in table.items():
        if name != "layers":
            yield weight, int(name == "lm_head" or "lm_head" not in table)
