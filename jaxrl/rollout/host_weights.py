"""A model's rollout weights in host memory, a part of which moves to the devices for a while: for a model beside the
actor whose device memory is freed between rollouts. Loading needs the devices for one layer at a time.

Source: RollPacker §4.3; `jaxrl.models.streaming` says what is streamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxrl.models.streaming import HOST
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.sharding.rules import rollout_shardings, to_rollout


class HostWeights:
    """The weights of an executor whose `resident_layers` is set, in its layout of now for all its life. `outer`,
    `layers`: in training form, on the executor's mesh (`jaxrl.models.loading.load_layerwise`); each layer is gone from
    the devices when the next one comes."""

    def __init__(self, executor: MeshExecutor, outer: Mapping[str, Any], layers: Iterable[Mapping[str, Any]]) -> None:
        assert executor.config.resident_layers is not None, "an executor that streams nothing has weights on devices"
        self._executor = executor
        model, layout, config = executor.model, executor.layout, executor.config
        form = (layout, config.dtype, config.max_tp)
        places = jax.tree.map(
            lambda sharding: sharding.with_memory_kind(HOST),
            rollout_shardings(model, layout, config.max_tp, **executor.form),
        )

        def taken(params: dict[str, Any], num_layers: int) -> Any:
            return to_rollout(params, replace(model, num_layers=num_layers), *form, **executor.form)

        first = {name: value for name, value in taken(dict(outer), 0).items() if name != "layers"}
        kept = {name: jax.device_put(value, places[name]) for name, value in first.items()}
        each = (taken({"layers": dict(layer)}, 1)["layers"][0] for layer in layers)
        self._host: dict[str, Any] = kept | {
            "layers": [
                jax.block_until_ready(jax.device_put(layer, place))
                for layer, place in zip(each, places["layers"], strict=True)
            ]
        }

    def enter(self) -> None:
        executor = self._executor
        (programs,) = executor.programs_of([executor.tp])
        places = jax.tree.map(lambda x: x.sharding, programs.abstract_params())
        executor.take_weights(jax.device_put(self._host, places), executor.layout, 0)
