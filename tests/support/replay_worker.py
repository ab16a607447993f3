"""A replaying executor under a backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay_executor import ReplayExecutor

from jaxrl.types import SampleKey


class ReplayWorker(ReplayExecutor):
    """Has the memory phases of a real executor, and notes them in `calls`."""

    def __init__(
        self,
        lengths: Mapping[SampleKey, int],
        num_groups: int = 1,
        num_slots: int = 4,
        num_blocks: int = 99,
        block_size: int = 4,
        max_prefill_tokens: int = 64,
    ) -> None:
        super().__init__(lengths, num_groups, num_slots, num_blocks, block_size, max_prefill_tokens)
        self.recompiles = 0
        self.calls: list[Any] = []

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        self.calls.append(("sync", train_params, policy_version))
        self.policy_version = policy_version

    def allocate(self) -> None:
        self.calls.append("allocate")

    def release(self, *, weights: bool = False) -> None:
        self.calls.append(("release", weights))


class ReplayWorkers:
    """Several of them as one, for a backend over several workers; each has two rows."""

    def __init__(self, lengths: Mapping[SampleKey, int], num_workers: int) -> None:
        self.workers = [ReplayWorker(lengths, num_slots=2) for _ in range(num_workers)]
        self.recompiles = 0
        self.calls: list[Any] = []

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        self.calls.append(("sync", train_params, policy_version))
        for each in self.workers:
            each.sync_weights(train_params, policy_version)

    def allocate(self) -> None:
        self.calls.append("allocate")

    def release(self, *, weights: bool = False) -> None:
        self.calls.append(("release", weights))
