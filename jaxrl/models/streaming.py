"""Streams layers' weights from host memory to the devices while the model runs. So a model can share the actor's
devices with few of its layers resident.

Source: RollPacker §4.3, the layer-wise pipeline scheme: a layer's copy runs under the compute of the layers before it.

A layer's matrices are streamed; its norms and biases stay on the devices. When a streamed layer begins to compute, the
copy of the next one begins, into the buffer of the one before. A barrier ties each copy to the layer's input. Without
it XLA would begin all copies at the start of the program, with a buffer for each, and would hoist them out of the loop
over decode steps. Departure: the resident layers do not come first but lie evenly between the streamed ones, so that a
copy has the time of several layers. On CPUs programs have the same barriers, and no copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

STREAMED = frozenset({"q", "k", "v", "o", "gate", "up", "down", "qkv", "gate_up"})
"""The weights of a layer that are streamed: its matrices, fused ones too."""

HOST = "pinned_host"
"""The kind of memory that streamed weights lie in: pages that devices read by themselves."""


def streamed_layers(num_layers: int, num_resident: int) -> tuple[int, ...]:
    """The indices of the streamed layers: evenly spread, the last layer among them."""
    streamed = num_layers - num_resident
    return tuple(i for i in range(num_layers) if (i + 1) * streamed // num_layers > i * streamed // num_layers)


def on_host(shardings: Sequence[Mapping[str, Any]], num_resident: int) -> list[dict[str, Any]]:
    streamed = set(streamed_layers(len(shardings), num_resident))
    return [
        {name: s.with_memory_kind(HOST) if i in streamed and name in STREAMED else s for name, s in layer.items()}
        for i, layer in enumerate(shardings)
    ]


class LayerFeed:
    """The weights of a forward pass, layer by layer, while it is traced; those in the host's memory are streamed: a
    layer's copy begins while the streamed layer before it computes."""

    def __init__(self, layers: Sequence[Mapping[str, Any]]) -> None:
        self._layers = layers
        self._streamed = [i for i, layer in enumerate(layers) if any(map(is_on_host, layer.values()))]
        self._fetched: dict[int, dict[str, Any]] = {}

    def take(self, index: int, x: jax.Array) -> tuple[jax.Array, Mapping[str, Any]]:
        """(x, the layer's weights on the devices). Layers are taken in order; x is the layer's input."""
        if not self._streamed:
            return x, self._layers[index]
        if index == 0:
            x = self._begin(self._streamed[0], x)
        if index not in self._streamed:
            return x, self._layers[index]
        if later := [i for i in self._streamed if i > index]:
            x = self._begin(later[0], x)
        return x, self._fetched.pop(index)

    def _begin(self, index: int, x: jax.Array) -> jax.Array:
        """Begins a layer's copy, not before x is there."""
        layer = self._layers[index]
        x, waiting = lax.optimization_barrier((x, {name: w for name, w in layer.items() if is_on_host(w)}))
        copied = {name: jax.device_put(w, jax.memory.Space.Device) for name, w in waiting.items()}
        self._fetched[index] = dict(layer) | copied
        return x


def is_on_host(weight: Any) -> bool:
    return jax.typeof(weight).memory_space == jax.memory.Space.Host
