"""The other hosts of a run, as one host needs them: a store for small values, and meeting points.

Purpose: `HostGroup` is what a host has of the others besides the controller's calls. A checkpoint is compared with its
checksums by all hosts together, each a share of its files; and before a program of all hosts runs for the first time,
all must have compiled it, because a collective on CPUs gives up after 30 seconds.

It uses the key-value store that `jax.distributed` keeps in the first host. Its client is a private part of jax (the
calls are those of jax 0.10 and 0.11), and no other file imports it. What fails here ends the run: the controller hears
of it as of any error on a host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl.runtime.devices import ProcessDevices
from jaxrl.train.steps import Peers

_PATIENCE_MS = 7 * 24 * 3600 * 1000
"""The controller sees whether hosts make progress, and ends the run where none does."""


class HostGroup:
    """Implements `jaxrl.runtime.host.Group`.

    Args:
      on_machine: how many hosts of the run this machine has, and this one's memory has to do for.
    """

    def __init__(self, on_machine: int = 1) -> None:
        from jax._src import distributed

        state = distributed.global_state
        assert state.client is not None, "jax.distributed is not initialized"
        self._client: Any = state.client
        self._process, self._num_processes = state.process_id, state.num_processes
        self.on_machine = on_machine
        self.peers = Peers(self._process, self._num_processes, self._first, self._any_of)

    def with_least(self, devices: ProcessDevices) -> ProcessDevices:
        self._put(f"memory/{self._process}", str(devices.memory.reported or ""))
        found = [self._get(f"memory/{i}") for i in range(self._num_processes)]
        return devices.with_least(min(map(int, found)) if all(found) else None)

    def meet(self, name: str) -> None:
        self._client.wait_at_barrier(f"jaxrl/meet/{name}", _PATIENCE_MS)

    def _first(self, name: str, make: Callable[[], str]) -> str:
        if self._process == 0:
            self._put(f"first/{name}", make())
        return self._get(f"first/{name}")

    def _any_of(self, name: str, make: Callable[[], str]) -> str:
        self._put(f"any/{name}/{self._process}", make())
        return next(filter(None, (self._get(f"any/{name}/{i}") for i in range(self._num_processes))), "")

    def _put(self, key: str, value: str) -> None:
        self._client.key_value_set(f"jaxrl/{key}", value)

    def _get(self, key: str) -> str:
        return self._client.blocking_key_value_get(f"jaxrl/{key}", _PATIENCE_MS)
