"""Prompts of a simulation: lengths and identities, no text, tokenizer or grain (which imports jax).

A prompt's index decides its length, its kind and, through the workload, the lengths of its responses. Departures: each
epoch's order is numpy's for (seed, epoch), not grain's: equally random, but not the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import Prompt

_STATE_VERSION = 1


class SimulatedPrompts:
    """`num_prompts` prompts, epoch after epoch.

    Args:
      max_prompt_length: tokens at which prompts are cut.
      quotas: prompts per batch by task (`data.source_quotas`).
      reference_time_key: the column of seconds that a right program takes; empty for no such column.
    """

    def __init__(
        self,
        workload: ModelledWorkload,
        num_prompts: int,
        max_prompt_length: int,
        seed: int,
        shuffle: bool = True,
        quotas: Mapping[str, int] | None = None,
        reference_time_key: str = "",
    ) -> None:
        self.num_prompts = num_prompts
        self._workload, self._max_prompt_length, self._seed = workload, max_prompt_length, seed
        self._shuffle, self._reference_time_key = shuffle, reference_time_key
        self._position = 0
        self._orders: dict[str, tuple[int, np.ndarray]] = {}  # by source: the last epoch asked for, and its order
        self._given = dict(quotas or {})
        kinds = (workload.kind_name(index) for index in range(num_prompts))
        self._quotas = None
        if quotas:
            from jaxrl.data.quotas import SourceQuotas

            self._quotas = SourceQuotas(quotas, kinds)

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; batches cross the ends of epochs."""
        positions = range(self._position, self._position + num_prompts)
        self._position += num_prompts
        return [self.prompt(*self._place(p)) for p in positions]

    def get(self, epoch: int, index: int) -> Prompt:
        """A prompt that `next` has returned before, by its key."""
        return self.prompt(index, epoch)

    def held_out(self, count: int) -> list[Prompt]:
        """Prompts for evaluation, which training never sees."""
        return [self.prompt(self.num_prompts + i, 0) for i in range(count)]

    def prompt(self, index: int, epoch: int) -> Prompt:
        kind = self._workload.kind_name(index)
        length = max(min(self._workload.prompt_length(index), self._max_prompt_length), 1)
        key = self._reference_time_key
        extra = {key: self._workload.reference_time_s(index)} if key else {}
        return Prompt(epoch, index, (0,) * length, f"simulated prompt {index} of {kind}", kind, extra=extra)

    def state(self) -> dict[str, Any]:
        return {"version": _STATE_VERSION, "position": self._position, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved cursor. Raises ValueError for one of another set of prompts."""
        expected = {"version": _STATE_VERSION, **self._identity()}
        found = {name: state.get(name) for name in expected}
        if found != expected:
            raise ValueError(
                f"prompts: saved with {found}, found {expected}: simulate.num_prompts, data.seed, data.shuffle and "
                "data.source_quotas of a resumed simulation must be what they were"
            )
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"num_prompts": self.num_prompts, "seed": self._seed, "shuffle": self._shuffle, "quotas": self._given}

    def _place(self, position: int) -> tuple[int, int]:
        if self._quotas is None:
            epoch, place = divmod(position, self.num_prompts)
            return self._ordered("", self.num_prompts, epoch, place, (self._seed, epoch)), epoch
        source, count = self._quotas.at(position)
        members = self._quotas.members[source]
        epoch, place = divmod(count, len(members))
        number = list(self._quotas.members).index(source)
        return members[self._ordered(source, len(members), epoch, place, (self._seed, epoch, number))], epoch

    def _ordered(self, source: str, count: int, epoch: int, place: int, seed: tuple[int, ...]) -> int:
        if not self._shuffle:
            return place
        if source not in self._orders or self._orders[source][0] != epoch:
            self._orders[source] = epoch, np.random.default_rng(seed).permutation(count)
        return int(self._orders[source][1][place])
